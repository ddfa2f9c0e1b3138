"""One GPT that is GPT-2, GPT-NeoX or Llama by configuration.

A module's parameters are used only inside its own `forward`, so that the engine can unshard them
when it starts and reshard them when it ends. A tied matrix, used at both ends of the model, is the
only exception: it belongs to the root and stays unsharded for the whole pass.
"""

from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.model.attention.kinds import KVCache
from megafrontier.model.block import Block, Prediction
from megafrontier.model.init import matrix_std, with_specs
from megafrontier.model.kernels.backends import Computed
from megafrontier.model.kernels.lookup import FP32GradEmbedding
from megafrontier.model.linear import Linear
from megafrontier.model.loss import (
    CorpusLosses,
    Losses,
    PredictionLoss,
    ZLoss,
    capped,
    chunk_losses,
    later_targets,
    linear_cross_entropy,
)
from megafrontier.model.moe.layer import compile_activations, has_experts
from megafrontier.model.norms import make_norm
from megafrontier.model.positions import (
    AttentionContext,
    Rotary,
    cached_mask,
    document_mask,
    document_positions,
    followed_tokens,
    rotary_tables,
    row_documents,
)
from megafrontier.model.ranks import DividedModule, TensorRanks
from megafrontier.model.recompute.checkpointing import Modes, modes_of
from megafrontier.model.recompute.compile import compiled, let_length_vary
from megafrontier.model.recompute.offload import Offload
from megafrontier.model.scaling import multipliers, scale_specs, scaled
from megafrontier.model.scores import Scores, chunk_scores, token_scores

EmbeddingPlace = Literal["first", "last", "both"]
RotaryKind = tuple[float, bool] | None
"""The base of rotary frequencies, and whether `rotary_scaling` holds. None: no rotary positions."""


class Embedding(DividedModule):
    """Token embeddings, plus those of learned positions.

    With `ranks` the result is that of this rank's tokens [1, b · s / size, hidden].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        own = sqrt(config.hidden) if config.scale_embedding else 1.0
        self.multiplier = own * multipliers(config).embedding
        tokens = FP32GradEmbedding(config.padded_vocab_size, config.hidden)
        self.tokens = with_specs(tokens, "embedding", matrix_std(config), config.vocab_size)
        if config.position == "learned":
            positions = FP32GradEmbedding(config.sequence_length, config.hidden)
            self.positions = with_specs(positions, "embedding", config.init_std)

    def forward(
        self, tokens: Tensor, positions: Tensor, with_next: bool | Tensor = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tokens [b, s], positions [b or 1, s] → [b, s, hidden]; `with_next` also that of the next
        token of each (of any token where there is none), or of the tokens that it gives."""
        if self.ranks is not None:
            return self._over_ranks(tokens, positions, with_next, self.ranks)
        if isinstance(with_next, Tensor):
            places = torch.cat([positions, positions], 1)
            both = self.forward(torch.cat([tokens, with_next], 1), places)
            assert isinstance(both, Tensor)
            return both[:, : tokens.shape[1]], both[:, tokens.shape[1] :]
        hidden = self.tokens(tokens)
        if hasattr(self, "positions"):
            hidden = hidden + self.positions(positions)
        hidden = F.dropout(scaled(hidden, self.multiplier), self.dropout, self.training)
        if not with_next:
            return hidden
        return hidden, hidden.flatten(0, 1).roll(-1, 0).view_as(hidden)

    def _over_ranks(
        self, tokens: Tensor, positions: Tensor, with_next: bool | Tensor, ranks: TensorRanks
    ) -> Tensor | tuple[Tensor, Tensor]:
        given = [with_next] if isinstance(with_next, Tensor) else []
        rows = len(self.tokens.weight)
        ids = torch.cat([tokens, *given], 1).flatten() - ranks.index * rows
        is_local = (ids >= 0) & (ids < rows)
        values = self.tokens(ids.where(is_local, 0)) * is_local[:, None]
        places = ranks.part(positions.expand_as(tokens).flatten())
        if with_next is False:
            return self._reduced(values, places, ranks)
        values, following = values.chunk(2) if given else (values, values.roll(-1, 0))
        return self._reduced(values, places, ranks), self._reduced(following, places, ranks)

    def _reduced(self, values: Tensor, places: Tensor, ranks: TensorRanks) -> Tensor:
        hidden = ranks.reduce_tokens(values)
        if hasattr(self, "positions"):
            hidden = hidden + self.positions(places)
        return F.dropout(scaled(hidden, self.multiplier), self.dropout, self.training)[None]


class Head(DividedModule):
    """Final norm, output projection and loss.

    With `ranks` it gets this rank's tokens, and each rank has some columns of the logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        loss_chunk_tokens: int,
        losses: Losses = chunk_losses,
        z_loss: float = 0.0,
    ) -> None:
        """`losses` is called in place of `chunk_losses`, for example a compiled version of it.
        `z_loss`: the coefficient of the z-loss."""
        super().__init__()
        self.chunk_losses: Losses = losses
        self.chunk_scores: Scores = chunk_scores
        self.z_loss = ZLoss(z_loss) if z_loss else None
        self.corpora: CorpusLosses | None = None
        """Counts the losses of training by corpus, if it is set."""
        self.vocab_size = config.vocab_size
        self.loss_chunk_tokens = loss_chunk_tokens
        self.norm = make_norm(config)
        self.multiplier = multipliers(config).output
        self.softcap = config.logit_softcap or 0.0
        given = config.prediction
        self.prediction = None if given is None else PredictionLoss(given.coefficient)
        if not config.tie_embeddings:
            self.output = Linear(
                config.hidden,
                config.padded_vocab_size,
                matrix_std(config),
                cut="vocabulary",
                valid_rows=config.vocab_size,
            )

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        tied: Tensor | None = None,
        scores: bool = False,
        later: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """hidden [b, s, hidden] → logits [b, s, vocab_size], or with targets [b, s] the fp32 sum of
        their cross-entropies, or with `scores`, too, `token_scores` [b · s, 2]. `tied`
        [rows, hidden] is the output matrix of tied embeddings. `later`: the result of `Prediction`
        and its targets. Raises RuntimeError with `ranks` and without targets."""
        if targets is None and self.ranks is not None:
            raise RuntimeError("logits of a split head, need a model on one rank")
        weight = self.output.matrices[0] if tied is None else tied
        hidden = scaled(self.norm(hidden), self.multiplier)
        if targets is None:
            return capped(F.linear(hidden, weight)[..., : self.vocab_size], self.softcap)
        if scores:
            return token_scores(
                self._all_tokens(hidden),
                weight,
                targets.flatten(),
                vocab_size=self.vocab_size,
                chunk_tokens=self.loss_chunk_tokens,
                softcap=self.softcap,
                scores=self.chunk_scores if self.ranks is None else self.ranks.chunk_scores,
            )
        trains = self.training and torch.is_grad_enabled()
        corpora = self.corpora if trains else None
        loss = self._loss(hidden, weight, targets, self.z_loss, corpora)
        if later is None or self.prediction is None:
            return loss
        found = self._loss(later[0], weight, later[1], None)
        return self.prediction.add(loss, found, later[1])

    def _loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        z_loss: ZLoss | None,
        corpora: CorpusLosses | None = None,
    ) -> Tensor:
        return linear_cross_entropy(
            self._all_tokens(hidden),
            weight,
            targets.flatten(),
            vocab_size=self.vocab_size,
            chunk_tokens=self.loss_chunk_tokens,
            losses=self.chunk_losses if self.ranks is None else self.ranks.chunk_losses,
            z_loss=z_loss,
            softcap=self.softcap,
            corpora=corpora,
        )

    def _all_tokens(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        return tokens if self.ranks is None else self.ranks.gather_tokens(tokens)


class _NextTokens(NamedTuple):
    """What the block of `prediction` needs besides the hidden states."""

    with_next: bool | Tensor = False
    """Of `Embedding`."""
    targets: Tensor | None = None
    """The targets of the next tokens."""
    counted: Tensor | None = None
    """The tokens that have a next one."""

    def ids(self, tokens: Tensor) -> Tensor:
        """The next tokens."""
        if isinstance(self.with_next, Tensor):
            return self.with_next
        return tokens.flatten().roll(-1).view_as(tokens)


class GPT(nn.Module):
    """A decoder-only transformer. May be built on the meta device and filled later.

    A model built on a real device has torch's default weights: call `init.initialise`, or load
    weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        loss_chunk_tokens: int = 1024,
        checkpointing: Modes = "none",
        compile_blocks: bool = False,
        cuda_graphs: bool = False,
        z_loss: float = 0.0,
    ) -> None:
        """The options are those of `train` in the configuration. `cuda_graphs` needs blocks that
        are compiled."""
        super().__init__()
        self.config = config
        self.is_compiled = compile_blocks
        self.embedding = Embedding(config)
        self.embedding_place: EmbeddingPlace = "first"
        """Where it is used: before the first block, or in a pipeline's last stage, which has it for
        `prediction`, or by a process with both stages in either."""
        modes, offload = modes_of(checkpointing, config.trained_layers), Offload()
        run = compiled(Block.forward_recomputed, cuda_graphs) if compile_blocks else None
        # The numbers of tokens of experts are known only when they run, so these are not compiled.
        attend = compiled(Block.attend) if compile_blocks and config.moe is not None else None
        options: list[dict[str, Any]] = [
            {"checkpointing": modes[i], "offload": offload if modes[i] == "offload" else None}
            | ({"attend": attend} if has_experts(config, i) else {"run": run})
            for i in range(config.trained_layers)
        ]
        self.blocks = nn.ModuleList(Block(config, i, **options[i]) for i in range(config.layers))
        self.prediction: Prediction | None = None
        if config.prediction is not None:
            self.prediction = Prediction(config, **options[-1])
        if compile_blocks:
            compile_activations(self)
        losses = compiled(chunk_losses, cuda_graphs) if compile_blocks else chunk_losses
        self.head = Head(config, loss_chunk_tokens, losses, z_loss)
        scale_specs(config, self.blocks, self.embedding, self.head)
        self.part: Callable[[Tensor, Tensor], Tensor] | None = None
        """Maps values of all tokens [b, s] and their documents, on the host, to the values [1, n]
        of this process's tokens, if it has parts of documents (`Attention.split_sequences`)."""

    def own_part(self, values: Tensor, documents: Tensor | None) -> Tensor:
        """The values of those of all tokens [b, s] whose losses `forward` sums. `documents` as for
        `forward`."""
        if self.part is None:
            return values
        return self.part(values, _on_host(documents, values))

    def trained_blocks(self) -> list[Block]:
        """The blocks, and that of `prediction`."""
        return [block for _, block in self.numbered_blocks()]

    def numbered_blocks(self) -> Iterator[tuple[int, Block]]:
        """`trained_blocks`, with their numbers in the whole model."""
        for name, block in self.blocks.named_children():
            if isinstance(block, Block):
                yield int(name), block
        if self.prediction is not None:
            yield self.config.layers, self.prediction.block

    def units(self) -> list[tuple[str, nn.Module]]:
        """The modules that the engine unshards one at a time, in forward order.

        A matrix that this model uses at both ends belongs to the root. Then the embedding and the
        head do, too. So does an embedding that two stages use.
        """
        blocks = [(f"blocks.{name}", block) for name, block in self.blocks.named_children()]
        after = [] if self.prediction is None else [("prediction", self.prediction)]
        ends = {n: getattr(self, n) for n in ("embedding", "head") if hasattr(self, n)}
        if self.config.tie_embeddings and len(ends) == 2:
            return [*blocks, *after]
        embedding, head = ([(n, ends[n])] if n in ends else [] for n in ("embedding", "head"))
        if self.embedding_place == "both":
            embedding = []
        elif self.embedding_place == "last":
            return [*blocks, *embedding, *after, *head]
        return [*embedding, *blocks, *after, *head]

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
        *,
        hidden: Tensor | None = None,
        blocks: range | None = None,
        scores: bool = False,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Logits [b, s, vocab_size], or with `targets` the fp32 sum of their cross-entropies.

        tokens, targets int64 [b, s]. Targets of -100 have no loss; the caller divides the sum by
        the global number of the others. With `part` the sum is that of `own_part`, and there are no
        logits. With `scores` the result is `token_scores` of these tokens, float64 [n, 2], in place
        of the sum. With `last_only` there are logits of the last token of each row only,
        [b, 1, vocab_size]. `documents` int32 [n + 1], on any device: the start of each document in
        the b · s tokens (each row starts one), then b · s; tokens attend only within their
        document, and positions restart there. `cache`: positions continue after its tokens, and
        it takes the new ones; it holds one document per row, so there are no `documents` with it.
        `padding` bool [b, s]: tokens that only fill a row, which routers do not count.

        A stage of a pipeline runs the numbers `blocks` of all blocks. `hidden` is the result of the
        stage before it; without it, the embedding comes first. Before the last block of the model,
        the result is the hidden state. The tokens give its shape and positions.

        Raises ValueError for more tokens than the sequence length or the cache has room for.
        """
        past = cache.length if cache is not None else 0
        room = self.config.sequence_length if cache is None else cache.capacity
        if past + tokens.shape[1] > room:
            raise ValueError(f"{past + tokens.shape[1]} tokens, the model has room for {room}")
        blocks = range(self.config.layers) if blocks is None else blocks
        has_head = blocks.stop == self.config.layers
        if self.part is not None and targets is None and has_head:
            raise RuntimeError("logits of divided sequences, need a model on one rank")
        predicts = self.prediction is not None and self.training and torch.is_grad_enabled()
        predicts = predicts and has_head and targets is not None and not scores
        after = _NextTokens()
        if predicts:
            after = self._next_tokens(tokens, targets, documents, padding)
        counted = None
        if padding is not None and self.config.moe is not None:
            counted = self.own_part(~padding, documents)
        tokens, targets, positions, documents = self._own_inputs(tokens, targets, documents, past)
        rotaries = self._rotaries(positions, range(blocks.start, blocks.stop + predicts))
        following: Tensor | None = None
        if hidden is None and predicts:
            hidden, following = self.embedding(tokens, positions, after.with_next)
        elif hidden is None:
            hidden = self.embedding(tokens, positions)
        elif predicts:
            following = self.embedding(after.ids(tokens), positions)
        batch, length = tokens.shape
        mask, documents = self._mask_or_documents(hidden, tokens, cache, documents)
        context = AttentionContext(None, mask, documents, (batch, length), counted)
        for i in blocks:
            block = self.blocks.get_submodule(str(i))
            of_block = context._replace(rotary=rotaries[i])
            hidden = block(hidden, of_block, None if cache is None else cache.layers[i])
        if cache is not None:
            cache.length += tokens.shape[1]
        if not has_head:
            return hidden
        is_tied = self.config.tie_embeddings and hasattr(self, "embedding")
        tied = self.embedding.tokens.weight if is_tied else None
        predicted = None
        if self.prediction is not None and following is not None and after.targets is not None:
            context = context._replace(rotary=rotaries[blocks.stop], counted=after.counted)
            predicted = self.prediction(hidden, following, context), after.targets
        return self.head(hidden[:, -1:] if last_only else hidden, targets, tied, scores, predicted)

    def _next_tokens(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        documents: Tensor | None,
        padding: Tensor | None,
    ) -> _NextTokens:
        """Of `own_part`.

        A token without a next one gets any token as its next one, which depends on the micro-batch.
        It has no target, no other token attends to it, and neither the router nor the largest
        log-sums of attention count it: so it changes neither losses nor gradients.
        """
        assert targets is not None
        followed = followed_tokens(tokens, documents, padding)
        later = later_targets(targets, followed)
        if self.part is None:
            return _NextTokens(True, later, followed)
        # The next token of this process's may be another's.
        following = tokens.flatten().roll(-1).view_as(tokens)
        given = following, later, followed
        return _NextTokens(*(self.own_part(values, documents) for values in given))

    def _own_inputs(
        self, tokens: Tensor, targets: Tensor | None, documents: Tensor | None, past: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """The tokens, targets and positions of `own_part`, and the documents: with `part` on the
        host, else on the device."""
        given = documents
        if documents is not None:
            documents = documents.to(tokens.device, non_blocking=True)
        positions = self._positions(tokens, past, documents)
        if self.part is not None:
            documents = _on_host(given, tokens)
            tokens, positions = (self.own_part(v, documents) for v in (tokens, positions))
            targets = None if targets is None else self.own_part(targets, documents)
        return tokens, targets, positions, documents

    def _rotary_kind(self, block: int) -> RotaryKind:
        """The base and scaling of a block's rotary positions, or None if it has none."""
        config, base = self.config, self.config.attention.window_rotary_base
        if not config.has_rotary(block):
            return None
        if base is not None and config.window_of(block) is not None:
            return base, False
        return config.rotary_base, True

    def _rotaries(self, positions: Tensor, blocks: range) -> dict[int, Rotary | None]:
        """The rotary tables of each of some blocks. Blocks of one kind share them."""
        kinds = {i: self._rotary_kind(i) for i in blocks}
        tables = {kind: self._tables(positions, kind) for kind in dict.fromkeys(kinds.values())}
        return {i: tables[kind] for i, kind in kinds.items()}

    def _tables(self, positions: Tensor, kind: RotaryKind) -> Rotary | None:
        if kind is None:
            return None
        base, is_scaled = kind
        scaling = self.config.rotary_scaling if is_scaled else None
        return rotary_tables(positions, self.config.rotary_dims, base, scaling)

    def _mask_or_documents(
        self, hidden: Tensor, tokens: Tensor, cache: KVCache | None, documents: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The mask and documents of the context, if the attention of some block needs them."""
        batch, length = tokens.shape
        kinds = {type(block.attention) for block in self.trained_blocks()}
        needs_rows = documents is None and cache is None
        if needs_rows and any(kind.needs_rows(self.config) for kind in kinds):
            documents = row_documents(batch, length, hidden.device)
        if self.part is not None:
            if self.is_compiled and documents is not None:
                let_length_vary(documents)
            return None, documents
        if documents is None:
            past = 0 if cache is None else cache.length
            return cached_mask(past, length, hidden.device), None
        dropout = self.config.dropout if self.training else 0.0
        computed = Computed(hidden.device, hidden.dtype, documents=True)
        masked = [kind.needs_mask(self.config, computed, dropout) for kind in kinds]
        mask = document_mask(documents, batch, length) if any(masked) else None
        if all(masked):
            return mask, None
        if self.is_compiled:
            let_length_vary(documents)
        return mask, documents

    def _positions(self, tokens: Tensor, past: int, documents: Tensor | None) -> Tensor:
        if documents is not None:
            return document_positions(documents, *tokens.shape)
        positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        return positions[None] if self.part is None else positions.expand_as(tokens)


def _on_host(documents: Tensor | None, tokens: Tensor) -> Tensor:
    return row_documents(*tokens.shape) if documents is None else documents.cpu()
