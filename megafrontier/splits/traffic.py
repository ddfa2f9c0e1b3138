"""The bytes that tensor and expert parallelism send, by formula."""

from collections.abc import Iterator
from math import comb, prod
from typing import NamedTuple

import torch

from megafrontier.comm.wires.registry import CastCodec
from megafrontier.comm.wires.wire import UNCHANGED, WorkWires
from megafrontier.config import ModelConfig, MoEConfig
from megafrontier.model.moe.layer import has_experts
from megafrontier.model.recompute.checkpointing import RECOMPUTES_BLOCK, Modes, modes_of
from megafrontier.parallel.hierarchy import Levels
from megafrontier.splits.tokens import PIECES, cut_pieces


class _Move(NamedTuple):
    """A gather or a sum of all ranks' parts, of `rows` tokens of `width` elements each."""

    rows: int
    width: int
    in_pieces: bool = False
    is_exact: bool = False
    """Sent in fp32."""
    is_fp32: bool = False
    """Sent in fp32 over levels without a wire."""


def tensor_bytes(
    config: ModelConfig,
    levels: Levels,
    tokens: int,
    dtype: torch.dtype,
    wires: WorkWires = UNCHANGED,
    *,
    overlaps: bool,
    chunk_tokens: int,
    checkpointing: Modes = "none",
    late_weights: bool = False,
) -> list[int]:
    """Bytes that one rank sends over each level in forward and backward of a micro-batch.

    levels: of the tensor split. tokens: of the micro-batch, on one context rank. dtype: computing
        type. wires: as those of `apply_splits`. overlaps: whether there is overlap. chunk_tokens:
        `train.loss_chunk_tokens`. late_weights: whether gradients of matrices come later than those
        of inputs.
    """
    size = levels.ranks
    if size == 1:
        return [0] * len(levels.sizes)
    totals = [0] * len(levels.sizes)
    for move, times in _moves(config, size, tokens, chunk_tokens, checkpointing, late_weights):
        for rows in _rows(move, overlaps, not wires.is_exact):
            for level, count in enumerate(levels.sizes):
                codec = wires.codec(level, torch.float32 if move.is_fp32 else dtype)
                codec = CastCodec(torch.float32) if move.is_exact else codec
                shard = size * rows * move.width // prod(levels.sizes[: level + 1])
                totals[level] += times * (count - 1) * codec.message_bytes(shard)
    return totals


def _rows(move: _Move, overlaps: bool, has_wires: bool) -> list[int]:
    if not (move.in_pieces and overlaps and move.rows >= PIECES):
        return [move.rows]
    pieces = cut_pieces(move.rows, PIECES, move.width if has_wires else 0)
    return [piece.stop - piece.start for piece in pieces]


def _moves(
    config: ModelConfig,
    size: int,
    tokens: int,
    chunk_tokens: int,
    checkpointing: Modes,
    late_weights: bool,
) -> Iterator[tuple[_Move, int]]:
    """Each move, and how often it takes place."""
    rows, width = tokens // size, config.hidden
    whole, pieces = _Move(rows, width), _Move(rows, width, in_pieces=True)
    copies = max(1, size // config.num_kv_heads)
    latent = config.attention.latent
    # A latent of queries is gathered in place of the hidden state.
    queries = [pieces] if latent is None or latent.query is None else []
    heads = [_Move(tokens, config.head_dim // copies)] * (2 if copies > 1 else 0)
    if config.qk_norm == "full":  # sums of squares of queries, and of keys
        heads += [_Move(tokens, 1, is_fp32=True)] * 2
    if latent is not None:
        width = (latent.query or 0) + latent.key_value + latent.rope_size
        heads.append(_Move(rows, width))
    # A gather before and a sum after attention and MLP.
    forward = [*queries, *heads, pieces, pieces, pieces]
    # Of each sum a gather, and of each gather a sum; what it gave is gathered again for weights.
    backward = [pieces, pieces, whole, pieces, *heads]
    backward += [pieces, whole] if queries else []
    if late_weights:  # what the sums gathered, too
        backward += [whole, whole]
    for move in (*forward, *backward):
        yield move, config.trained_layers
    for mode in modes_of(checkpointing, config.trained_layers):
        for move in {"none": [], "selective": heads}.get(mode, forward):
            yield move, 1
    losses = 1 if config.prediction is None else 2
    yield whole, 4 * losses  # embedding and head
    for start in range(0, tokens, chunk_tokens):  # three numbers of each token, for its loss
        yield _Move(3, min(chunk_tokens, tokens - start), is_exact=True), losses


def distinct_share(moe: MoEConfig, experts: int) -> float:
    """The share of tokens that have any of `experts` neighbouring experts, if a router chooses
    its groups, and experts in them, with equal probability."""
    size, groups = moe.experts // moe.groups.number, moe.groups
    whole, part = divmod(experts, size)
    total, missed = size * groups.active, 0.0
    for parts in range(min(1, part) + 1):
        for wholes in range(groups.active - parts + 1):
            rest = groups.number - whole - min(1, part)
            ways = comb(whole, wholes) * comb(rest, groups.active - wholes - parts)
            chance = ways / comb(groups.number, groups.active)
            free = total - wholes * size - parts * part
            missed += chance * comb(max(free, 0), moe.active) / comb(total, moe.active)
    return 1 - missed


def token_bytes(
    config: ModelConfig,
    levels: Levels,
    tokens: int,
    dtype: torch.dtype,
    wires: WorkWires = UNCHANGED,
    checkpointing: Modes = "none",
) -> list[int]:
    """Bytes that one rank sends over each level in forward and backward of a micro-batch, in the
    mean, to ranks with other experts and back, if experts are chosen with equal probability.

    levels: of the expert split. tokens: that a rank has. dtype: computing type. wires: of tokens.
    Counts of tokens, which are small, come on top.
    """
    moe, found = config.moe, []
    if moe is None or levels.ranks == 1:
        return [0] * len(levels.sizes)
    beside = 4 * moe.active  # an expert, a weight or its gradient
    modes = modes_of(checkpointing, config.layers)[: config.layers]
    blocks = moe.blocks(config.layers)
    again = sum(m in RECOMPUTES_BLOCK and has_experts(config, i) for i, m in enumerate(modes))
    for level, (stride, size) in enumerate(zip(levels.strides, levels.sizes, strict=True)):
        groups = levels.ranks // stride
        rows = tokens * groups * distinct_share(moe, moe.experts // groups) * (size - 1) / size
        row = wires.codec(level, dtype).message_bytes(config.hidden)
        # There and back, and the gradients; those of weights go with the tokens'.
        each = (4 * blocks + 2 * again) * row + (3 * blocks + 2 * again) * beside
        found.append(round(rows * each))
    return found
