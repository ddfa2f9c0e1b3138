"""The gated delta rule over parts of documents, whose other parts other processes have.

A part of a document is an affine map of the state before it, whatever its length. Processes
exchange these maps (`Exchange.scan`); then each has the states before its parts. The last tokens
before a part, for a convolution, are such a state, too: a part shifts its own ones in.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megafrontier.common.async_copy import copy_async
from megafrontier.model.kernels.delta import (
    DeltaTokens,
    Maps,
    composed,
    convolve,
    delta_chunks,
    states_between,
)
from megafrontier.model.kernels.exchanges import EXCHANGES, Exchange

FromStates = Callable[[Tensor], Tensor]
"""Of this process's tokens, from the states fp32 [p, h, dk, dv] before its parts of documents that
are cut."""


def attend_parts(heads: DeltaTokens, documents: Tensor, exchange: Exchange) -> Tensor:
    """The results fp32 [1, n, h, dv] of this process's tokens, which are parts of documents."""
    found: Tensor = _OverParts.apply(_attention, documents, exchange.number, *heads)
    return found


def convolve_parts(tokens: Tensor, taps: Tensor, documents: Tensor, exchange: Exchange) -> Tensor:
    """`convolve` of this process's tokens [1, n, d], which are parts of documents."""
    found: Tensor = _OverParts.apply(_convolution, documents, exchange.number, tokens, taps)
    return found


class _OverParts(torch.autograd.Function):
    """The result of tokens, whose states are scanned over processes. Backward computes all but the
    states again, and scans their gradients backwards with the transposed maps.

    Every process with tokens of a micro-batch scans if a document is cut, also one without parts of
    it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        prepare: Callable[..., tuple[Maps, FromStates]],
        documents: Tensor,
        exchange: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.prepare, ctx.documents, ctx.exchange = prepare, documents, exchange
        across = EXCHANGES[exchange]
        maps, result = prepare(tensors, documents, across)
        states = across.scan(maps, documents) if across.has_cuts(documents) else maps.summand
        ctx.save_for_backward(states, *tensors)
        return result(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, *tensors = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        across = EXCHANGES[ctx.exchange]
        with torch.enable_grad():
            maps, result = ctx.prepare(tensors, ctx.documents, across)
            outputs = [(result(states), gradients[0])]
        if across.has_cuts(ctx.documents):
            by_maps = _scan_backwards(outputs[0], states, maps.factor, ctx.documents, across)
            # A process may have no map, and a factor may be a constant.
            pairs = zip(maps, by_maps, strict=True)
            outputs += [pair for pair in pairs if pair[0].requires_grad]
        found, given = zip(*outputs, strict=True)
        by_tensors = torch.autograd.grad(found, tensors, given, materialize_grads=True)
        return None, None, None, *by_tensors


def _scan_backwards(
    output: tuple[Tensor, Tensor],
    states: Tensor,
    factor: Tensor,
    documents: Tensor,
    across: Exchange,
) -> Maps:
    """The gradients of the maps, from a result and its gradient. Keeps the result's graph."""
    options = {"retain_graph": True, "materialize_grads": True}
    (by_states,) = torch.autograd.grad(output[0], states, output[1], **options)
    turned = Maps(factor.detach().mT, by_states)
    by_last = across.scan(turned, documents, backwards=True)
    return Maps(by_last @ states.detach().mT, by_last)


def _attention(
    tensors: Sequence[Tensor], documents: Tensor, across: Exchange
) -> tuple[Maps, FromStates]:
    """The map of each part of a cut document, and the results of the tokens' heads."""
    heads = DeltaTokens(*tensors)
    parts, cut = [part.tokens for part in across.parts(documents)], across.cut_parts(documents)
    chunks = [delta_chunks(heads.at(parts[i])) for i in cut]
    maps = [Maps(*(part[0] for part in composed(one.maps))) for one in chunks]

    def result(states: Tensor) -> Tensor:
        found = _attend_whole(heads, [at for i, at in enumerate(parts) if i not in cut])
        for i, one, state in zip(cut, chunks, states, strict=True):
            found[parts[i].start] = one.outputs(states_between(one.maps, state[None])[0])
        return torch.cat([found[start] for start in sorted(found)], 1)

    return _stacked(maps, (*heads.query.shape[2:], heads.value.shape[-1]), heads.query), result


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


def _convolution(
    tensors: Sequence[Tensor], documents: Tensor, across: Exchange
) -> tuple[Maps, FromStates]:
    """The map of the last tokens before each part of a cut document, and the convolved tokens."""
    tokens, taps = tensors[0][0], tensors[1]
    past, cut = taps.shape[1] - 1, across.cut_parts(documents)
    parts = [tokens[part.tokens] for part in across.parts(documents)]
    maps = [_shifting(parts[i], past) for i in cut]

    def result(states: Tensor) -> Tensor:
        before = [tokens.new_zeros(past, tokens.shape[1])] * len(parts)
        for i, state in zip(cut, states, strict=True):
            before[i] = state[0].to(tokens.dtype)
        pieces = [piece for pair in zip(before, parts, strict=True) for piece in pair]
        numbers, own = _places([len(part) for part in parts], past, tokens.device)
        return convolve(torch.cat(pieces)[None], taps, numbers).index_select(1, own)

    return _stacked(maps, (1, past, tokens.shape[1]), tokens), result


def _places(sizes: Sequence[int], past: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """If `past` tokens precede each part, the number of each token's part [1, m], and where the
    parts' tokens are [n]."""
    wide = torch.tensor(sizes) + past
    numbers = torch.repeat_interleave(torch.arange(len(sizes)), wide)
    starts = (wide.cumsum(0) - wide + past).tolist()
    own = [torch.arange(at, at + size) for at, size in zip(starts, sizes, strict=True)]
    return copy_async(numbers[None], device), copy_async(torch.cat(own), device)


def _shifting(tokens: Tensor, past: int) -> Maps:
    """The map of the last `past` tokens [1, past, d] before a part to those after it."""
    count = min(len(tokens), past)
    factor = torch.eye(past, device=tokens.device).roll(-count, 0)
    factor[past - count :] = 0
    summand = tokens.new_zeros(past, tokens.shape[1], dtype=torch.float32)
    summand[past - count :] = tokens[len(tokens) - count :]
    return Maps(factor[None], summand[None])


def _stacked(maps: Sequence[Maps], shape: tuple[int, ...], like: Tensor) -> Maps:
    """Maps [h, ..] of each part as one of [p, h, ..]. shape: (h, dk, dv)."""
    none, (heads, rows, columns) = like.flatten()[:0].detach().float(), shape
    factors = [none.view(0, heads, rows, rows), *(one.factor[None] for one in maps)]
    summands = [none.view(0, heads, rows, columns), *(one.summand[None] for one in maps)]
    return Maps(torch.cat(factors), torch.cat(summands))
