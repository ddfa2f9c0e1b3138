"""Attention within each of several concatenated documents, without a mask.

With a dense mask, a kernel computes a score for every pair of tokens in a row, and no fused kernel
supports it well. Given the start of each document, a kernel computes only pairs within a document.
The operator is opaque to torch.compile, so it does not recompile for another number of documents.
"""

from typing import Any

import torch
from torch import Tensor

from megafrontier.model.kernels.blockwise import add_sinks_, sinks_backward
from megafrontier.model.kernels.flash import Keep, Scope, kernel_of, kernel_sizes


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    longest: int,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    keep: Keep | None = None,
) -> Tensor:
    """Causal attention within documents: [t, heads, d] → [t, heads, d].

    key, value [t, kv_heads, d] with kv_heads a divisor of heads. `documents` int32 [n + 1]: the
    start of each document in the t tokens, then t. `longest`: an upper bound of their lengths.
    `sinks` [heads] take part in the softmax. `window`, `softcap`: as for `Rule`. `keep`: is
    called with the log-sums.
    """
    attended: Tensor
    attended, sums = attend_documents(query, key, value, documents, longest, sinks, window, softcap)
    if keep is not None:
        keep(sums)
    return attended


@torch.library.custom_op("megafrontier::document_attention", mutates_args=())
def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    longest: int,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The result, and the fp32 log-sum-exp [heads, t] of the scores, for backward."""
    scope = Scope(documents, longest, True, window, softcap)
    kernel = kernel_of(kernel_sizes(query, key), scope, sinks is not None)
    attended, sums = kernel.forward((query, key, value), scope)
    if sinks is not None:
        add_sinks_(attended, sums, sinks)
    return attended, sums


@torch.library.custom_op("megafrontier::document_attention_backward", mutates_args=())
def attend_documents_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    sums: Tensor,
    documents: Tensor,
    longest: int,
    window: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    scope = Scope(documents, longest, True, window, softcap)
    kernel = kernel_of(kernel_sizes(query, key), scope, has_sinks)
    by_query, by_key, by_value = kernel.backward(
        (grad_output, query, key, value, attended), sums, scope
    )
    return by_query, by_key, by_value


@attend_documents.register_fake
def _(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.empty_like(query), sums


@attend_documents_backward.register_fake
def _(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, documents, ctx.longest, sinks, *ctx.rule = inputs
    ctx.save_for_backward(query, key, value, *output, documents, sinks)


def _differentiate(ctx: Any, grad_output: Tensor, _sums: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, attended, sums, documents, sinks = ctx.saved_tensors
    gradients = attend_documents_backward(
        *(grad_output, *tensors, attended, sums, documents, ctx.longest),
        *ctx.rule,
        sinks is not None,
    )
    by_sinks = None if sinks is None else sinks_backward(grad_output, attended, sums, sinks)
    return *gradients, None, None, by_sinks, None, None


attend_documents.register_autograd(_differentiate, setup_context=_save)

operator = torch.ops.megafrontier.document_attention.default
