"""What a kind of attention is: it computes, caches, costs, and says what it does not support.

`kinds.py` has the kinds by name. The rest of the library asks them and tests for none of them.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.model.init import matrix_std
from megafrontier.model.kernels.backends import Computed
from megafrontier.model.kernels.exchanges import Exchange
from megafrontier.model.kernels.flash import Heads
from megafrontier.model.linear import Linear
from megafrontier.model.norms import make_rms_norm
from megafrontier.model.positions import AttentionContext, rotate_both

Feature = Literal["documents", "context", "cache", "dropout"]


class LayerCache:
    """What a block keeps of the tokens before the next ones, to generate text."""


class Attention(nn.Module):
    """Mixes the tokens of each sequence. Kinds are subclasses, and each is in `kinds.KINDS`."""

    supports: ClassVar[frozenset[Feature]] = frozenset()
    """documents: attention within documents (`data.document_mask`). context: parts of sequences
    (`parallel.context`, `split_sequences`). cache: generation (`make_cache`). dropout: of attention
    weights (`model.dropout`)."""
    has_logits: ClassVar[bool] = False
    """Whether it has logits, and so `largest_norms` and `shrunk_rows`."""

    def forward(
        self, hidden: Tensor, context: AttentionContext, cache: LayerCache | None = None
    ) -> Tensor:
        """hidden [b, s, hidden] → [b, s, hidden]. `cache`: the result of `make_cache`, to read and
        to extend."""
        raise NotImplementedError

    def split_sequences(self, exchange: Exchange, size: int, keeps_keys: bool) -> None:
        """Let `forward` process the parts of documents that this process has, one of `size`.
        `keeps_keys`: as for `kernels.chunks.chunk_attention`."""
        raise NotImplementedError

    def largest_norms(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        """The largest norm of a query, as it is multiplied with keys, and of a key: fp32 [2].
        Arguments as of `forward`."""
        raise NotImplementedError

    @classmethod
    def shrunk_rows(cls, config: ModelConfig, shrink: Tensor) -> dict[str, Tensor]:
        """`shrink` [heads] → by name of a parameter, what to multiply its first rows by [rows], so
        that the logits of each head are multiplied by its value."""
        raise NotImplementedError

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raises UserError for a model that this kind does not fit."""

    @classmethod
    def make_cache(
        cls, config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype, device: Any
    ) -> LayerCache:
        """An empty cache of one block, for `batch` rows of up to `capacity` tokens."""
        raise NotImplementedError

    @classmethod
    def flops(cls, config: ModelConfig, block: int) -> float:
        """Floating-point operations that training spends on one token of a full sequence in a
        block's attention, without its matrices of parameters."""
        raise NotImplementedError

    @classmethod
    def divided(cls, config: ModelConfig) -> dict[str, int]:
        """Numbers, by key, that the ranks of a tensor split must divide, besides `model.heads`."""
        return {}

    @classmethod
    def needs_rows(cls, config: ModelConfig) -> bool:
        """Whether `AttentionContext.documents` is also needed if each row is one document."""
        return False

    @classmethod
    def needs_mask(cls, config: ModelConfig, computed: Computed, dropout: float) -> bool:
        """Whether documents need `AttentionContext.mask`, a dense one."""
        return False

    @classmethod
    def uncompilable(cls, config: ModelConfig, computed: Computed) -> str | None:
        """Why blocks with this attention cannot be compiled, or None if they can."""
        return None

    @classmethod
    def kernel(cls, config: ModelConfig, computed: Computed) -> str:
        """The kernel in training, for the log."""
        return "plain torch"


class HeadAttention(Attention):
    """Attention by heads: projections to queries, keys and values, `attend`, and one back.

    `qkv` holds the rows of the query, key and value projections, in this order, and after them
    those of the output gate (`model.attention.output_gate`), which has the width of queries.
    """

    def __init__(self, config: ModelConfig, number: int = 0) -> None:
        """`number`: of the block, from 0."""
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.num_kv_heads
        self.head_size, self.value_size = config.head_dim, config.value_dim
        self._add_projections(config)
        inner = self.heads * self.value_size
        std = matrix_std(config, to_residual=True)
        self.out = Linear(inner, config.hidden, std, bias=config.has_out_bias, cut="rows")
        self.query_norm = self.key_norm = None
        if config.qk_norm != "none":
            is_full = config.qk_norm == "full"
            counts = (self.heads, self.kv_heads) if is_full else (1, 1)
            self.query_norm, self.key_norm = (
                make_rms_norm(config, count * self.head_size, is_full) for count in counts
            )

    def _add_projections(self, config: ModelConfig) -> None:
        inner, kv_inner = (count * self.head_size for count in (self.heads, self.kv_heads))
        self.qkv = Linear(
            config.hidden,
            [inner, kv_inner, kv_inner] + [inner] * config.attention.output_gate,
            matrix_std(config),
            bias=config.has_qkv_bias,
            cut="columns",
            head_rows=self.head_size,
        )

    def _project(self, hidden: Tensor, context: AttentionContext) -> tuple[Heads, Tensor | None]:
        """hidden [b, s, hidden] → queries, keys and values [b, s, heads, head_size], rotated, and
        the logits of the output gate [b, s, heads · head_size], if there is one."""
        rotary, (batch, length) = context.rotary, context.shape
        # With tensor parallelism `hidden` has some of the tokens, and the projection all of them.
        projected = self.qkv(hidden).view(batch, length, -1)
        parts = projected.split(self.qkv.widths, -1)
        query, key, value = (part.unflatten(-1, (-1, self.head_size)) for part in parts[:3])
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query, key = rotate_both(query, key, rotary)
        return (query, key, value), parts[3] if len(parts) > 3 else None

    def forward(
        self, hidden: Tensor, context: AttentionContext, cache: LayerCache | None = None
    ) -> Tensor:
        heads, gate = self._project(hidden, context)
        attended = self.attend(heads, context, cache)
        if self.value_size < self.head_size:
            attended = attended[..., : self.value_size]
        attended = attended.reshape(*context.shape, -1)
        output: Tensor = self.out(attended if gate is None else attended * gate.sigmoid())
        return output

    def attend(self, heads: Heads, context: AttentionContext, cache: LayerCache | None) -> Tensor:
        """query [b, s, heads, head_size], key and value [b, s, kv_heads, head_size] → the shape of
        query, or [b · s, heads, head_size]."""
        raise NotImplementedError
