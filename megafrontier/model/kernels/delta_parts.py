"""The gated delta rule over parts of documents, whose other parts other processes have.

A part of a document is an affine map of the state before it, whatever its length. Processes
exchange these maps (`Exchange.scan`); then each has the states before its parts. The last tokens
before a part, for a convolution, are such a state, too: a part shifts its own ones in.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megafrontier.common.async_copy import copy_async
from megafrontier.model.kernels.delta import (
    DeltaTokens,
    Maps,
    composed,
    delta_chunks,
    states_between,
)
from megafrontier.model.kernels.exchanges import EXCHANGES, Exchange


def with_past_tokens(
    tokens: Tensor, past: int, documents: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens [n, d] of this process, each part after `past` tokens of its document, zeros if it
    has fewer: [m, d]; the number of each one's part; and where the tokens are among them [n]."""
    parts = [tokens[part.tokens] for part in exchange.parts(documents)]
    before = [tokens.new_zeros(past, tokens.shape[1])] * len(parts)
    if exchange.has_cuts(documents):
        cut = exchange.cut_parts(documents)
        maps = [_shifting(parts[i], past) for i in cut]
        found = _scanned(maps, (1, past, tokens.shape[1]), tokens, documents, exchange)
        for i, state in zip(cut, found, strict=True):
            before[i] = state[0].to(tokens.dtype)
        if not cut:
            before[0] = before[0] + found.sum().to(tokens.dtype)
    pieces = [piece for pair in zip(before, parts, strict=True) for piece in pair]
    sizes = torch.tensor([past + len(part) for part in parts])
    numbers = torch.repeat_interleave(torch.arange(len(parts)), sizes)
    starts = (sizes.cumsum(0) - sizes + past).tolist()
    own = [torch.arange(at, at + len(part)) for at, part in zip(starts, parts, strict=True)]
    numbers, where = (copy_async(one, tokens.device) for one in (numbers, torch.cat(own)))
    return torch.cat(pieces), numbers, where


def _shifting(tokens: Tensor, past: int) -> Maps:
    """The map of the last `past` tokens [1, past, d] before a part to those after it."""
    count = min(len(tokens), past)
    factor = torch.eye(past, device=tokens.device).roll(-count, 0)
    factor[past - count :] = 0
    summand = tokens.new_zeros(past, tokens.shape[1], dtype=torch.float32)
    summand[past - count :] = tokens[len(tokens) - count :]
    return Maps(factor[None], summand[None])


def attend_parts(heads: DeltaTokens, documents: Tensor, exchange: Exchange) -> Tensor:
    """The results fp32 [1, n, h, dv] of this process's tokens, which are parts of documents."""
    parts = [part.tokens for part in exchange.parts(documents)]
    cut = exchange.cut_parts(documents)
    found = _attend_whole(heads, [at for i, at in enumerate(parts) if i not in cut])
    chunks = [delta_chunks(heads.at(parts[i])) for i in cut]
    if exchange.has_cuts(documents):
        maps = [Maps(*(part[0] for part in composed(one.maps))) for one in chunks]
        shape = (*heads.query.shape[2:], heads.value.shape[-1])
        states = _scanned(maps, shape, heads.value, documents, exchange)
        for i, one, state in zip(cut, chunks, states, strict=True):
            found[parts[i].start] = one.outputs(states_between(one.maps, state[None])[0])
        if not cut:
            start = next(iter(found))
            found[start] = found[start] + states.sum()
    return torch.cat([found[start] for start in sorted(found)], 1)


def _attend_whole(heads: DeltaTokens, parts: Sequence[slice]) -> dict[int, Tensor]:
    """The results of the parts that are whole documents, by their starts."""
    if not parts:
        return {}
    sizes = [at.stop - at.start for at in parts]
    rows = DeltaTokens(*(torch.cat([part[:, at] for at in parts], 1) for part in heads))
    numbers = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(sizes))
    chunks = delta_chunks(rows, copy_async(numbers[None], rows.query.device))
    attended = chunks.outputs(states_between(chunks.maps, None)[0])
    return {at.start: one for at, one in zip(parts, attended.split(sizes, 1), strict=True)}


def _scanned(
    maps: Sequence[Maps],
    shape: tuple[int, ...],
    source: Tensor,
    documents: Tensor,
    exchange: Exchange,
) -> Tensor:
    """The states fp32 [p, h, dk, dv] before parts of cut documents. shape: (h, dk, dv). source: a
    tensor that needs a gradient where the maps do: backward exchanges gradients also if this
    process has no such part, and then uses the result all the same."""
    none, (heads, rows, columns) = source.flatten()[:0].float(), shape
    factors = [none.view(0, heads, rows, rows), *(one.factor[None] for one in maps)]
    summands = [none.view(0, heads, rows, columns), *(one.summand[None] for one in maps)]
    given = torch.cat(factors), torch.cat(summands), documents, exchange.number
    states: Tensor = _Scan.apply(*given)
    return states


class _Scan(torch.autograd.Function):
    """`Exchange.scan`, whose gradient is a scan backwards with the transposed maps."""

    @staticmethod
    def forward(
        ctx: Any, factor: Tensor, summand: Tensor, documents: Tensor, exchange: int
    ) -> Tensor:
        ctx.documents, ctx.exchange = documents, exchange
        states = EXCHANGES[exchange].scan(Maps(factor, summand), documents)
        ctx.save_for_backward(factor, states)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        factor, states = ctx.saved_tensors
        maps = Maps(factor.mT, gradients[0])
        by_last = EXCHANGES[ctx.exchange].scan(maps, ctx.documents, backwards=True)
        return by_last @ states.mT, by_last, None, None
