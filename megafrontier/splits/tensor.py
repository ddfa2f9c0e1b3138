"""Tensor and sequence parallelism of a GPT, applied from outside.

Each rank of the split has some heads, some columns of the MLP and some rows of the vocabulary.
Between the matrices it has some of the tokens: they are gathered before a matrix that is cut by its
output, and summed and cut again after one that is cut by its input (Shoeybi et al. 2019,
arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198). Norms, biases after a sum, and
positions are whole on each rank, which sees some of their tokens.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.common.errors import UserError
from megafrontier.config import ModelConfig
from megafrontier.model.attention.base import HeadAttention
from megafrontier.model.attention.latent import LatentAttention
from megafrontier.model.attention.softmax import SoftmaxAttention
from megafrontier.model.block import Block
from megafrontier.model.gpt import GPT, Embedding, Head
from megafrontier.model.kernels.lookup import FP32GradEmbedding
from megafrontier.model.loss import IGNORE_INDEX, ChunkLosses
from megafrontier.model.mlp import MLP
from megafrontier.model.moe.layer import MoE
from megafrontier.model.scaling import scaled
from megafrontier.parallel.mesh import DATA_PARALLEL
from megafrontier.parallel.param_spec import set_spec, spec_of
from megafrontier.splits.layers import (
    ColumnLinear,
    Cutter,
    DividedHeadsNorm,
    GatherTokens,
    QKVLinear,
    RowLinear,
    cut_rows,
)
from megafrontier.splits.tokens import TokenGroup, reduce_tokens


def check_tensor_split(config: ModelConfig, size: int, key: str = "parallel.tensor") -> None:
    """Raises UserError for a model that `size` ranks cannot divide."""
    counts = {
        "model.heads": config.heads,
        "the width of keys (model.kv_heads)": config.num_kv_heads * config.head_dim,
        **_mlp_widths(config),
        "the padded vocabulary (model.vocab_multiple)": config.padded_vocab_size,
    }
    for name, count in counts.items():
        if count % size:
            fits = ", ".join(str(n) for n in range(1, count + 1) if not count % n)
            raise UserError(f"{key}: {size}, does not divide {name} ({count}), need one of {fits}")
    kv_heads = config.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise UserError(
            f"{key}: {size}, need a divisor or a multiple of model.kv_heads ({kv_heads})"
        )


def _mlp_widths(config: ModelConfig) -> dict[str, int]:
    """The widths of MLPs that are cut. Experts are not."""
    moe, found = config.moe, {}
    if moe is None or moe.every > 1 or moe.first:
        found["model.ffn_hidden"] = config.mlp_hidden
    if moe is not None and moe.shared_experts:
        width = moe.ffn_hidden or config.mlp_hidden
        found["the width of model.moe.shared_experts"] = moe.shared_experts * width
    return found


def split_tensors(model: GPT, index: int, size: int) -> TokenGroup:
    """Cut the matrices of a GPT, which may be on the meta device, for the `index`-th of `size`
    ranks.

    Call it before `shard`, and connect the result to the engine after that. The model's forward
    then takes the whole micro-batch on each tensor rank and returns the same loss on each. Raises
    UserError as `check_tensor_split` does.
    """
    check_tensor_split(model.config, size)
    group = TokenGroup(index, size)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    cutter = Cutter(group, names)
    if hasattr(model, "embedding"):
        model.add_module("embedding", SplitEmbedding(model.embedding, cutter))
    for block in model.trained_blocks():
        _split_block(block, cutter)
    if hasattr(model, "head"):
        _split_head(model.head, cutter)
    _move_to_root(model.parameters())
    return group


def _move_to_root(parameters: Iterable[nn.Parameter]) -> None:
    """Move the norms, biases and routers that each tensor rank has whole to the root's unit. They
    are few, and in units of their own each block would have more and tiny messages."""
    for parameter in parameters:
        spec = spec_of("", parameter)
        is_small = len(spec.shape) == 1 or spec.kind == "router"
        if spec.axes == DATA_PARALLEL and is_small:
            set_spec(parameter, replace(spec, in_root=True))


def _split_block(block: Block, cutter: Cutter) -> None:
    attention, size = block.attention, cutter.group.size
    assert isinstance(attention, HeadAttention)
    copies = max(1, size // attention.kv_heads)
    if isinstance(attention, LatentAttention):
        _split_latents(attention, cutter)
    else:
        attention.add_module("qkv", QKVLinear(attention.qkv, attention.widths, copies, cutter))
    attention.add_module("out", RowLinear(attention.out, cutter))
    if attention.query_norm is not None and attention.key_norm is not None:
        _split_norms(attention, copies, cutter.group)
    if isinstance(attention, SoftmaxAttention) and attention.sinks is not None:
        attention.sinks = cutter.cut(attention.sinks, 0, 0, attention.heads)
    attention.heads //= size
    attention.kv_heads = max(1, attention.kv_heads // size)
    if not isinstance(attention, LatentAttention):
        kv_width = attention.kv_heads * attention.head_size
        attention.widths = [attention.heads * attention.head_size, kv_width, kv_width]
    # Experts stay whole: each rank routes the tokens that it has between the matrices.
    if isinstance(block.mlp, MoE):
        block.mlp.part = cutter.group.part
    mlp = block.mlp.shared if isinstance(block.mlp, MoE) else block.mlp
    if mlp is not None:
        _split_mlp(mlp, cutter)


def _split_latents(attention: LatentAttention, cutter: Cutter) -> None:
    """Cut what expands the latents by heads. A rank makes the latents of the tokens that it has,
    and the ranks exchange these, because they are narrow."""
    attention.add_module("gather", GatherTokens(cutter))
    attention.add_module("key_value_up", cut_rows(attention.key_value_up, cutter))
    query_up = attention.query_up
    own = (
        ColumnLinear(query_up, [query_up.out_features], cutter)
        if attention.query_down is None
        else cut_rows(query_up, cutter)
    )
    attention.add_module("query_up", own)


def _split_norms(attention: HeadAttention, copies: int, group: TokenGroup) -> None:
    """Divide norms of all queries and of all keys. Those of single heads are the same on each
    rank."""
    for name, heads, shared in (
        ("query_norm", attention.heads, 1),
        ("key_norm", attention.kv_heads, copies),
    ):
        norm, size = attention.get_submodule(name), attention.head_size
        assert isinstance(norm, nn.RMSNorm)
        if norm.normalized_shape[0] != size:
            own = max(1, heads // group.size) * size
            first = group.index // shared * own
            attention.add_module(name, DividedHeadsNorm(norm, first, own, shared, group))


def _split_mlp(mlp: MLP, cutter: Cutter) -> None:
    width = mlp.down.in_features
    parts = mlp.up.out_features // width  # with a gate, it and up
    mlp.add_module("up", ColumnLinear(mlp.up, [width] * parts, cutter))
    mlp.add_module("down", RowLinear(mlp.down, cutter))


class SplitEmbedding(nn.Module):
    """An embedding whose rows are cut: tokens [b, s] → this rank's part [1, b · s / size, h]."""

    def __init__(self, whole: Embedding, cutter: Cutter) -> None:
        super().__init__()
        self.group, self.dropout, self.multiplier = cutter.group, whole.dropout, whole.multiplier
        self.tokens = _cut_rows(whole.tokens, cutter)
        self.start = cutter.group.index * self.tokens.num_embeddings
        if hasattr(whole, "positions"):
            self.positions = whole.positions

    def forward(
        self, tokens: Tensor, positions: Tensor, with_next: bool | Tensor = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        given = [with_next] if isinstance(with_next, Tensor) else []
        ids = torch.cat([tokens, *given], 1).flatten() - self.start
        is_here = (ids >= 0) & (ids < self.tokens.num_embeddings)
        found = self.tokens(ids.where(is_here, 0)) * is_here[:, None]
        if with_next is False:
            return self._of_tokens(found, positions, tokens)
        own, following = found.chunk(2) if given else (found, found.roll(-1, 0))
        hidden = self._of_tokens(own, positions, tokens)
        return hidden, self._of_tokens(following, positions, tokens)

    def _of_tokens(self, found: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        hidden = reduce_tokens(found, self.group.number)
        if hasattr(self, "positions"):
            hidden = hidden + self.positions(self.group.part(positions.expand_as(tokens).flatten()))
        return F.dropout(scaled(hidden, self.multiplier), self.dropout, self.training)[None]


def _cut_rows(whole: nn.Embedding, cutter: Cutter) -> FP32GradEmbedding:
    rows, width = whole.weight.shape
    part = FP32GradEmbedding(rows // cutter.group.size, width, device="meta")
    part.weight = cutter.cut(whole.weight, 0, 0, rows)
    return part


def _split_head(head: Head, cutter: Cutter) -> None:
    """Cut the rows of a head: the loss needs no logits of the whole vocabulary."""
    head.gather = GatherTokens(cutter)
    head.chunk_losses = partial(_chunk_losses, cutter.group)
    head.chunk_scores = partial(_chunk_scores, cutter.group)
    if hasattr(head, "output"):
        head.output = cut_rows(head.output, cutter)


def _chunk_losses(
    group: TokenGroup,
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    scale: float,
    with_gradient: bool,
    z_loss: float,
) -> ChunkLosses:
    """`loss.chunk_losses` of logits [c, rows] of which this rank has some columns: the loss over
    all columns, and the gradient of these."""
    start = group.index * logits.shape[1]
    values = logits.float()
    values[:, max(0, vocab_size - start) :] = -torch.inf
    ids = targets - start
    is_here = (ids >= 0) & (ids < logits.shape[1])
    ids = ids.where(is_here, 0)[:, None]
    most = values.amax(1).clamp(min=torch.finfo(torch.float32).min)  # all may be padding
    total = (values - most[:, None]).exp().sum(1)
    target = values.gather(1, ids)[:, 0].where(is_here, 0.0)
    numbers = torch.stack([most, total, target])
    maxima, totals, found = group.gather(numbers[None], is_exact=True).unbind(1)
    most = maxima.amax(0)
    total = (totals * (maxima - most).exp()).sum(0)
    log_z, has_loss = total.log() + most, targets != IGNORE_INDEX
    loss = (log_z - found.sum(0)).where(has_loss, 0.0).sum()
    if not with_gradient:
        return ChunkLosses(loss, None, None)
    gradient = (values - most[:, None]).exp_() / total[:, None]
    squares = None
    if z_loss:
        gradient *= (1 + 2 * z_loss * log_z)[:, None]
        squares = log_z.where(has_loss, 0.0).square().sum()
    gradient.scatter_add_(1, ids, -is_here[:, None].float())
    gradient = (gradient if scale == 1 else gradient.mul_(scale)).to(logits.dtype)
    return ChunkLosses(loss, gradient, squares)


def _chunk_scores(group: TokenGroup, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """`scores.chunk_scores` of logits [c, rows] of which this rank has some columns."""
    start = group.index * logits.shape[1]
    values = logits.float()
    values[:, max(0, vocab_size - start) :] = torch.finfo(torch.float32).min
    ids = targets - start
    is_here = (ids >= 0) & (ids < logits.shape[1])
    target = values.gather(1, ids.where(is_here, 0)[:, None])[:, 0].where(is_here, 0.0)
    most, best = values.max(1)
    numbers = torch.stack([most, values.logsumexp(1), target, (best + start).float()])
    maxima, sums, found, ids = group.gather(numbers[None], is_exact=True).unbind(1)
    likeliest = ids.gather(0, maxima.argmax(0, keepdim=True))[0]
    return torch.stack([found.sum(0) - sums.logsumexp(0), likeliest], 1).double()
