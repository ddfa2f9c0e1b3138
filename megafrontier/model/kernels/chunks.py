"""Causal attention of some chunks of each sequence, with the keys of whole sequences.

The keys and values of the other chunks come from an exchange, for example from other ranks. A chunk
attends to itself, causally, while they travel, and then to what is before it, without a mask; the
two results are merged by the log-sums of their scores (Liu et al. 2023, arXiv:2310.01889). With
documents, each document's part of a chunk does so. Whole keys and values exist in one block at a
time only: backward gets them again.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafrontier.model.kernels.varlen import (
    attend_pair,
    attend_pair_backward,
    has_document_kernel,
)
from megafrontier.model.positions import partial_mask

QUERIES = 256
"""Of a block in attention with a mask, so that the mask is never as large as a sequence squared."""


class Exchange(Protocol):
    """Gives a process's chunks the keys and values of the others."""

    @property
    def size(self) -> int:
        """How many processes share each sequence, with equally many tokens each."""
        ...

    def starts(self, length: int) -> Sequence[int]:
        """Where each of this process's chunks begins in a sequence of `length` tokens. All chunks
        are equally long."""
        ...

    def begin_gather(self, heads: Tensor) -> Callable[[], Tensor]:
        """Send the keys and values [b, n, heads, d] of this process's chunks. The result waits for
        those of whole sequences [b, s, heads, d]."""
        ...

    def reduce(self, heads: Tensor) -> Tensor:
        """The sums over all processes of this one's part [b, n, heads, d] of `heads` [b, s, heads,
        d]."""
        ...


_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
"""By number, because operators take no Python objects."""
_numbers = count()


def register(exchange: Exchange) -> int:
    """The number by which operators know an exchange. The caller keeps the exchange alive."""
    number = next(_numbers)
    _exchanges[number] = exchange
    return number


class _Part(NamedTuple):
    """The tokens of some rows' chunk that belong to one document, and what it has before them."""

    rows: slice
    tokens: slice
    """Among this process's tokens of a row."""
    past: slice
    """Among all tokens of a row, before the chunk."""


def _parts(documents: Tensor | None, query: Tensor, across: Exchange) -> list[_Part]:
    length = query.shape[1] * across.size
    starts = across.starts(length)
    size = query.shape[1] // len(starts)
    if documents is None:
        rows = slice(0, query.shape[0])
        return [
            _Part(rows, slice(number * size, (number + 1) * size), slice(0, start))
            for number, start in enumerate(starts)
        ]
    bounds = documents.tolist()
    return [part for n, start in enumerate(starts) for part in _cut(bounds, length, n, start, size)]


def _cut(bounds: Sequence[int], length: int, number: int, start: int, size: int) -> Iterator[_Part]:
    """The parts of documents in the `number`-th chunk [start, start + size) of each row."""
    offset = number * size - start
    for begin, end in pairwise(bounds):
        row = begin // length
        begin, end = begin - row * length, end - row * length
        first, last = max(begin, start), min(end, start + size)
        if first < last:
            tokens = slice(first + offset, last + offset)
            yield _Part(slice(row, row + 1), tokens, slice(begin, first))


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    dropout: float,
    *,
    exchange: int,
    keeps_keys: bool = False,
) -> Tensor:
    """Attention of this process's chunks: [b, n, heads, d] → [b, n, heads, d].

    query [b, n, heads, d] and key, value [b, n, kv_heads, d] are those of the chunks, in the order
    of `Exchange.starts`. `documents` int32 [m + 1], on the host: the start of each document in the
    b · s tokens of whole sequences (each row starts one), then b · s; None if a row is one.
    exchange: the number that `register` returned.
    keeps_keys: let backward have the whole keys and values that forward got, for blocks that are
        recomputed directly before it.
    """
    heads, kv_heads, width = query.shape[2], key.shape[2], query.shape[3]
    # A block is compiled only where there is a kernel (`uncompilable_attention`).
    has_kernel = torch.compiler.is_compiling() or has_document_kernel(
        query.device, query.dtype, heads, kv_heads, width
    )
    if dropout == 0 and has_kernel:
        attended: Tensor = _attend(query, key, value, documents, exchange, keeps_keys)[0]
        return attended
    found: Tensor = checkpoint(
        _attend_masked,
        *(query, key, value, documents, exchange, dropout),
        use_reentrant=False,
        preserve_rng_state=dropout > 0,
    )
    return found


@torch.library.custom_op("megafrontier::chunk_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    exchange: int,
    keeps_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the fp32 log-sum-exp [b, heads, n] of the scores, and with `keeps_keys` the
    gathered keys and values [b, s, 2 · kv_heads, d], for backward."""
    across = _exchanges[exchange]
    parts = _parts(documents, query, across)
    gathered = across.begin_gather(torch.cat([key, value], 2))
    attended = torch.empty_like(query)
    sums = _new_sums(query)
    for rows, tokens, _ in parts:
        at = rows, tokens
        attended[at], sums[rows, :, tokens] = attend_pair(query[at], key[at], value[at], True)
    whole = gathered()
    keys, values = whole.chunk(2, 2)
    for rows, tokens, past in parts:
        if past.start < past.stop:
            at, before = (rows, tokens), (rows, past)
            found = attend_pair(query[at], keys[before], values[before], False)
            _merge_(attended[at], sums[rows, :, tokens], *found)
    return attended, sums, (whole if keeps_keys else whole.new_empty(0))


def _merge_(attended: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> None:
    """Merge attention [b, n, heads, d] to other keys, and its log-sums [b, heads, n], in place."""
    total = torch.logaddexp(sums, other_sums)
    own, others = ((s - total).exp().transpose(1, 2)[..., None] for s in (sums, other_sums))
    attended.copy_(attended * own + other * others)
    sums.copy_(total)


@torch.library.custom_op("megafrontier::chunk_attention_backward", mutates_args=())
def _attend_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    sums: Tensor,
    whole: Tensor,
    documents: Tensor | None,
    exchange: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. `whole` has no element, or all keys and values."""
    across = _exchanges[exchange]
    parts = _parts(documents, query, across)
    gathered = None if whole.numel() else across.begin_gather(torch.cat([key, value], 2))
    by_query, by_own = torch.empty_like(query), torch.empty_like(torch.cat([key, value], 2))
    by_key, by_value = by_own.chunk(2, 2)
    tensors = grad_output, query, attended
    for rows, tokens, _ in parts:
        at = rows, tokens
        grad, q, out = (tensor[at] for tensor in tensors)
        found = attend_pair_backward(grad, q, key[at], value[at], out, sums[rows, :, tokens], True)
        by_query[at], by_key[at], by_value[at] = found
    whole = whole if gathered is None else gathered()
    keys, values = whole.chunk(2, 2)
    by_whole = torch.zeros_like(whole)
    by_keys, by_values = by_whole.chunk(2, 2)
    for rows, tokens, past in parts:
        if past.start < past.stop:
            at, before = (rows, tokens), (rows, past)
            grad, q, out = (tensor[at] for tensor in tensors)
            pair = keys[before], values[before]
            found = attend_pair_backward(grad, q, *pair, out, sums[rows, :, tokens], False)
            totals = by_query[at], by_keys[before], by_values[before]
            for total, part in zip(totals, found, strict=True):
                total += part
    by_own += across.reduce(by_whole)
    by_key, by_value = by_own.chunk(2, 2)
    return by_query, by_key.contiguous(), by_value.contiguous()


def _new_sums(query: Tensor) -> Tensor:
    batch, tokens, heads, _ = query.shape
    return query.new_empty((batch, heads, tokens), dtype=torch.float32)


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    exchange: int,
    keeps_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, kv_heads, width = key.shape
    length = tokens * _exchanges[exchange].size
    shape = (batch, length, 2 * kv_heads, width) if keeps_keys else (0,)
    return torch.empty_like(query), _new_sums(query), key.new_empty(shape)


@_attend_backward.register_fake
def _(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, documents, ctx.exchange, _ = inputs
    ctx.save_for_backward(*tensors, *output, documents)


def _differentiate(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _attend_backward(grad_output, *ctx.saved_tensors, ctx.exchange)
    return *gradients, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)

operator = torch.ops.megafrontier.chunk_attention.default


class _Gather(torch.autograd.Function):
    """`Exchange.begin_gather` and, for the gradient, `Exchange.reduce`."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, exchange: int) -> Tensor:
        ctx.exchange = exchange
        return _exchanges[exchange].begin_gather(heads)()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _exchanges[ctx.exchange].reduce(grad_outputs[0].contiguous()), None


def _attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    exchange: int,
    dropout: float,
) -> Tensor:
    """`chunk_attention` for what kernels with log-sums cannot do, in blocks of queries."""
    whole: Tensor = _Gather.apply(torch.cat([key, value], 2), exchange)
    keys, values = (
        heads.repeat_interleave(query.shape[2] // key.shape[2], 2) for heads in whole.chunk(2, 2)
    )
    length = whole.shape[1]
    starts = _exchanges[exchange].starts(length)
    found = []
    for start, chunk in zip(starts, query.chunk(len(starts), 1), strict=True):
        for block in chunk.split(QUERIES, 1):
            stop = start + block.shape[1]
            heads = block, keys[:, :stop], values[:, :stop]
            found.append(
                checkpoint(
                    _attend_block,
                    *(*heads, documents, start, length, dropout),
                    use_reentrant=False,
                    preserve_rng_state=dropout > 0,
                )
            )
            start = stop
    return torch.cat(found, 1)


def _attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    start: int,
    length: int,
    dropout: float,
) -> Tensor:
    """Attention of the queries from `start` on to keys and values that end with them."""
    batch, keys = key.shape[:2]
    mask = partial_mask(documents, batch, keys, start, length, query.device)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return found.transpose(1, 2)
