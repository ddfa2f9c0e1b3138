"""Causal attention of some parts of each document, with the keys of whole documents.

The keys and values of the other parts come from an exchange, for example from other ranks. A part
attends to itself, causally, while they travel, and then to what is before it in its document,
without a mask; the two results are merged by the log-sums of their scores (Liu et al. 2023,
arXiv:2310.01889). The heads travel in pieces, so that one piece travels while there is attention
to another. Keys and values of others exist in one block at a time only: backward gets them again.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafrontier.model.kernels.blockwise import add_sinks_, sinks_backward
from megafrontier.model.kernels.exchanges import EXCHANGES, AttentionPart, Exchange
from megafrontier.model.kernels.flash import (
    Inputs,
    Keep,
    Scope,
    has_log_sums,
    kernel_of,
    kernel_sizes,
    returns_traced_shape,
)
from megafrontier.model.kernels.varlen import attend_documents, attend_documents_backward

QUERIES = 256
"""Of a block in attention with a mask, so that the mask is never as large as a sequence squared."""


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    dropout: float,
    sinks: Tensor | None = None,
    keep: Keep | None = None,
    *,
    exchange: int,
    size: int = 1,
    keeps_keys: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of this process's parts of documents: [1, n, heads, d] → [1, n, heads, d].

    query [1, n, heads, d] and key, value [1, n, kv_heads, d] are those of the process's tokens.
    documents: as for `Exchange`.
    exchange: the number that `register` returned.
    size: how many processes share the micro-batch, with equally many tokens each.
    keeps_keys: let backward have the keys and values that forward got, for blocks that are
        recomputed directly before it.
    sinks: [heads], which take part in the softmax.
    keep: is called with the log-sums.
    window, softcap: as for `blockwise.Rule`. With one of them, sinks or `keep`, dropout is 0.
    """
    query, key, value = (heads[0] for heads in (query, key, value))
    is_compiling = torch.compiler.is_compiling()
    has_rule = window > 0 or softcap > 0 or sinks is not None or keep is not None
    # A block is compiled only where there is a kernel (`uncompilable_attention`).
    if (is_compiling and dropout == 0) or has_log_sums(kernel_sizes(query, key), has_rule, dropout):
        # The compiler needs to know how many tokens are kept: at most those of the whole batch.
        kept = 0 if not keeps_keys else 1 if not is_compiling else size
        attended: Tensor
        attended, sums, _ = _attend(
            query, key, value, documents, exchange, kept, sinks, window, softcap
        )
        if keep is not None:
            keep(sums)
        return attended[None]
    found: Tensor = checkpoint(
        _attend_masked,
        *(query, key, value, documents, exchange, dropout),
        use_reentrant=False,
        preserve_rng_state=dropout > 0,
    )
    return found[None]


@torch.library.custom_op("megafrontier::chunk_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    exchange: int,
    kept: int,
    sinks: Tensor | None,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the fp32 log-sum-exp [heads, n] of the scores, and for backward the keys and
    values of earlier tokens [pieces, p, 2 · kv_heads / pieces, d]: with `kept` 0 none, with more
    than 1 those of kept · n tokens, of which the last ones are not set."""
    across = EXCHANGES[exchange]
    pieces = _pieces(query, key, across)
    gathers = [
        across.begin_gather(torch.cat([key[:, at], value[:, at]], 1), documents) for _, at in pieces
    ]
    parts = across.parts(documents)
    bounds = across.bounds(documents)
    scope = Scope(window=window, softcap=softcap)
    attended, sums = _attend_selves(query, key, value, parts, bounds, scope)
    scope = scope._replace(is_causal=False)
    kernel, pasts = kernel_of(kernel_sizes(query, key), scope), []
    for (heads, _), gather in zip(pieces, gathers, strict=True):
        pasts.append(gather())
        keys, values = pasts[-1][None].chunk(2, 2)
        for tokens, past in _with_past(parts):
            pair = keys[:, past], values[:, past]
            found = kernel.forward((query[None, tokens, heads], *pair), scope)
            _merge_(attended[tokens, heads], sums[heads, tokens], found[0][0], found[1][0])
    if sinks is not None:
        add_sinks_(attended, sums, sinks)
    return attended, sums, _keep(pasts, kept, len(query))


def _keep(pasts: list[Tensor], kept: int, tokens: int) -> Tensor:
    if kept == 0:
        return pasts[0].new_empty(0)
    if kept == 1:
        return torch.stack(pasts)
    whole = pasts[0].new_empty(len(pasts), kept * tokens, *pasts[0].shape[1:])
    for piece, past in zip(whole, pasts, strict=True):
        piece[: len(past)] = past
    return whole


def _pieces(query: Tensor, key: Tensor, across: Exchange) -> list[tuple[slice, slice]]:
    """The heads of queries, and of keys and values, of each piece."""
    number = across.pieces(key.shape[1])
    sizes = query.shape[1] // number, key.shape[1] // number
    return [
        (slice(i * sizes[0], (i + 1) * sizes[0]), slice(i * sizes[1], (i + 1) * sizes[1]))
        for i in range(number)
    ]


def _with_past(parts: Sequence[AttentionPart]) -> list[AttentionPart]:
    return [part for part in parts if part.past.start < part.past.stop]


def _longest(parts: Sequence[AttentionPart]) -> int:
    return max(part.tokens.stop - part.tokens.start for part in parts)


def _attend_selves(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Sequence[AttentionPart],
    bounds: Tensor,
    scope: Scope,
) -> tuple[Tensor, Tensor]:
    """Attention of each part to itself, and its log-sums."""
    sizes = kernel_sizes(query, key)
    # One kernel attends within all parts, if it gives log-sums that can be merged.
    if returns_traced_shape(*sizes):
        rule = scope.window, scope.softcap
        return attend_documents(query, key, value, bounds, _longest(parts), None, *rule)
    attended = torch.empty_like(query)
    sums = query.new_empty((query.shape[1], len(query)), dtype=torch.float32)
    for at, _ in parts:
        heads = query[None, at], key[None, at], value[None, at]
        out, scores = kernel_of(sizes, scope).forward(heads, scope)
        attended[at], sums[:, at] = out[0], scores[0]
    return attended, sums


def _merge_(attended: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> None:
    """Merge attention [n, heads, d] to other keys, and its log-sums [heads, n], in place."""
    total = torch.logaddexp(sums, other_sums)
    own, others = ((s - total).exp().t()[..., None] for s in (sums, other_sums))
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
    kept: Tensor,
    documents: Tensor,
    exchange: int,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. `kept`: what `_attend` returned."""
    across = EXCHANGES[exchange]
    parts, bounds = across.parts(documents), across.bounds(documents)
    pieces = _pieces(query, key, across)
    gathers: list[Callable[[], Tensor]] = [
        partial(torch.select, kept, 0, i) for i in range(len(kept))
    ]
    if not len(kept):
        gathers = [
            across.begin_gather(torch.cat([key[:, at], value[:, at]], 1), documents)
            for _, at in pieces
        ]
    tensors = grad_output.contiguous(), query, key, value, attended
    own = _Backward(tensors, sums, parts, bounds, Scope(window=window, softcap=softcap))
    # One half under the gathers, the other one under the sums.
    half = 0 if len(kept) else len(parts) // 2
    own.add_selves(0, half)
    reductions = [
        across.begin_reduce(own.of_pasts(gather(), heads), documents, key.dtype)
        for (heads, _), gather in zip(pieces, gathers, strict=True)
    ]
    own.add_selves(half, len(parts))
    for (_, at), reduction in zip(pieces, reductions, strict=True):
        by_key, by_value = reduction().chunk(2, 1)
        own.by_key[:, at] += by_key
        own.by_value[:, at] += by_value
    return own.by_query, own.by_key, own.by_value


class _Backward:
    """The gradients of attention, added up over parts."""

    def __init__(
        self,
        inputs: Inputs,
        sums: Tensor,
        parts: Sequence[AttentionPart],
        bounds: Tensor,
        scope: Scope,
    ) -> None:
        """`scope`: of parts and themselves."""
        self._inputs, self._scope, self._sizes = inputs, scope, kernel_sizes(*inputs[1:3])
        _, query, key, value, _ = inputs
        self._sums, self._parts, self._bounds = sums, parts, bounds
        self.by_query = torch.zeros_like(query)
        self.by_key, self.by_value = torch.empty_like(key), torch.empty_like(value)

    def add_selves(self, first: int, last: int) -> None:
        """Add those of attention of the parts [first, last) to themselves."""
        parts = self._parts[first:last]
        if not parts:
            return
        if not returns_traced_shape(*self._sizes):
            for at, _ in parts:
                grad, q, k, v, out = (tensor[None, at] for tensor in self._inputs)
                sums = self._sums[None, :, at]
                kernel = kernel_of(self._sizes, self._scope)
                found = kernel.backward((grad, q, k, v, out), sums, self._scope)
                self._add(at, *(gradient[0] for gradient in found))
            return
        at = slice(parts[0].tokens.start, parts[-1].tokens.stop)
        grad, q, k, v, out = (tensor[at] for tensor in self._inputs)
        bounds = self._bounds[first : last + 1] - self._bounds[first]
        sums = self._sums[:, at].contiguous()
        rule = _longest(parts), self._scope.window, self._scope.softcap
        found = attend_documents_backward(grad, q, k, v, out, sums, bounds, *rule)
        self._add(at, *found)

    def _add(self, at: slice, by_query: Tensor, by_key: Tensor, by_value: Tensor) -> None:
        self.by_query[at] += by_query
        self.by_key[at], self.by_value[at] = by_key, by_value

    def of_pasts(self, past: Tensor, heads: slice) -> Tensor:
        """The gradients of the keys and values `past` of earlier tokens, fp32. Those of the
        queries' `heads` are added."""
        grad_output, query, _, _, attended = self._inputs
        keys, values = past[None].chunk(2, 2)
        total = torch.zeros_like(past, dtype=torch.float32)
        by_keys, by_values = total.chunk(2, 1)
        scope = self._scope._replace(is_causal=False)
        kernel = kernel_of(self._sizes, scope)
        for at, before in _with_past(self._parts):
            grad, q, out = (tensor[None, at, heads] for tensor in (grad_output, query, attended))
            pair, sums = (keys[:, before], values[:, before]), self._sums[None, heads, at]
            found = kernel.backward((grad, q, *pair, out), sums, scope)
            self.by_query[at, heads] += found[0][0]
            by_keys[before] += found[1][0]
            by_values[before] += found[2][0]
        return total


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    exchange: int,
    kept: int,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, kv_heads, width = key.shape
    pieces = EXCHANGES[exchange].pieces(kv_heads)
    shape = (pieces, tokens * kept, 2 * kv_heads // pieces, width) if kept else (0,)
    sums = query.new_empty((query.shape[1], tokens), dtype=torch.float32)
    return torch.empty_like(query), sums, key.new_empty(shape)


@_attend_backward.register_fake
def _(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, documents, ctx.exchange, _, sinks, *ctx.rule = inputs
    ctx.save_for_backward(query, key, value, *output, documents, sinks)


def _differentiate(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, attended, sums, kept, documents, sinks = ctx.saved_tensors
    results = attended, sums, kept, documents
    gradients = _attend_backward(grad_output, *tensors, *results, ctx.exchange, *ctx.rule)
    by_sinks = None if sinks is None else sinks_backward(grad_output, attended, sums, sinks)
    return *gradients, None, None, None, by_sinks, None, None


_attend.register_autograd(_differentiate, setup_context=_save)

operator = torch.ops.megafrontier.chunk_attention.default


class _Gather(torch.autograd.Function):
    """`Exchange.begin_gather` and, for the gradient, `Exchange.begin_reduce`."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, documents: Tensor, exchange: int) -> Tensor:
        ctx.documents, ctx.exchange = documents, exchange
        return EXCHANGES[exchange].begin_gather(heads, documents)()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        across, dtype = EXCHANGES[ctx.exchange], grad_outputs[0].dtype
        total = across.begin_reduce(grad_outputs[0].float(), ctx.documents, dtype)()
        return total.to(dtype), None, None


def _attend_masked(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, exchange: int, dropout: float
) -> Tensor:
    """`chunk_attention` for what kernels with log-sums cannot do, in blocks of queries."""
    heads = torch.cat([key, value], 1)
    past: Tensor = _Gather.apply(heads, documents, exchange)
    found = []
    for at, before in EXCHANGES[exchange].parts(documents):
        whole = torch.cat([past[before], heads[at]])
        whole = whole.repeat_interleave(query.shape[1] // key.shape[1], 1)
        found += list(_attend_blocks(query[at], whole, dropout))
    return torch.cat(found)


def _attend_blocks(query: Tensor, whole: Tensor, dropout: float) -> Iterator[Tensor]:
    """`_attend_block` of the queries of a part and what it has before them, in blocks."""
    stop = len(whole) - len(query)
    for block in query.split(QUERIES):
        stop += len(block)
        yield checkpoint(
            _attend_block,
            *(block, whole[:stop], dropout),
            use_reentrant=False,
            preserve_rng_state=dropout > 0,
        )


def _attend_block(query: Tensor, whole: Tensor, dropout: float) -> Tensor:
    """Attention of queries [q, heads, d] to keys and values [k, 2 · heads, d], which end with the
    last query's."""
    mask = torch.ones(len(query), len(whole), dtype=torch.bool, device=query.device)
    mask = mask.tril_(len(whole) - len(query))
    query, key, value = (heads.transpose(0, 1)[None] for heads in (query, *whole.chunk(2, 1)))
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return found[0].transpose(0, 1)
