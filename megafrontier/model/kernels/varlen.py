"""Attention within each of several concatenated documents, without a mask.

With a dense mask, a kernel computes a score for every pair of tokens in a row, and no fused kernel
supports it well. Given the start of each document, a kernel computes only pairs within a document.
The operator is opaque to torch.compile, so it does not recompile for another number of documents.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megafrontier.model.kernels.blockwise import (
    Rule,
    add_sinks_,
    attend,
    attend_backward,
    sinks_backward,
)

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# The operators below torch.nn.attention.varlen, whose own signature differs between releases.
_gpu_forward = torch.ops.aten._flash_attention_forward
_gpu_backward = torch.ops.aten._flash_attention_backward


@cache
def has_document_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int
) -> bool:
    """Whether `document_attention` supports these: on a CPU always, on a GPU if flash does."""
    if device.type != "cuda":
        return device.type == "cpu"
    query, key = (
        torch.empty(1, n, 128, head_size, device=device, dtype=dtype, requires_grad=True)
        for n in (heads, kv_heads)
    )
    params = torch.backends.cuda.SDPAParams(query, key, key, None, 0.0, True, heads != kv_heads)
    # torch pads narrow heads for plain attention, but not for the kernel called here.
    return head_size % 8 == 0 and torch.backends.cuda.can_use_flash_attention(params)


@cache
def returns_traced_shape(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int
) -> bool:
    """Whether the kernel's log-sums have the shape [heads, t] that torch.compile is told to expect.
    ROCm's kernel has returned one padded row per document instead."""
    if device.type != "cuda":
        return True
    query, key = (
        torch.zeros(16, n, head_size, device=device, dtype=dtype) for n in (heads, kv_heads)
    )
    documents = torch.tensor([0, 4, 16], dtype=torch.int32, device=device)
    return attend_documents(query, key, key, documents, 12)[1].shape == (heads, 16)


def kernel_sizes(query: Tensor, key: Tensor) -> tuple[torch.device, torch.dtype, int, int, int]:
    """What `has_document_kernel` and its like ask for, of queries [.., heads, d] and keys
    [.., kv_heads, d]."""
    return query.device, query.dtype, query.shape[-2], key.shape[-2], query.shape[-1]


def _limits(window: int) -> dict[str, int]:
    """The window as arguments of the GPU's kernel."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _pair_rule(key: Tensor, is_causal: bool, window: int, softcap: float) -> Rule:
    """Queries are those of the keys, or directly after them."""
    return Rule(0 if is_causal else key.shape[1], window, softcap)


@cache
def has_window_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int
) -> bool:
    """Whether the kernel of a GPU has windows. A trial tells, because ROCm's may refuse them."""
    sizes = device, dtype, heads, kv_heads, head_size
    if device.type != "cuda" or not has_document_kernel(*sizes):
        return False
    waves = torch.arange(64 * heads * head_size, device=device).float().sin().to(dtype)
    query = waves.view(64, heads, head_size)
    key = query[:, :kv_heads].contiguous()
    documents, window = torch.tensor([0, 64], dtype=torch.int32, device=device), 8
    lengths = documents, documents, 64, 64
    try:
        out, sums, *_ = _gpu_forward(query, key, key, *lengths, 0.0, True, False, **_limits(window))
        unused = _no_dropout(device)
        found = _gpu_backward(
            *(query, query, key, key, out, sums, *lengths, 0.0, True, *unused), **_limits(window)
        )
    except RuntimeError:
        return False
    whole, one = Rule(0, window), (query[None], key[None], key[None])
    expected, expected_sums = attend(*one, whole)
    gradients = attend_backward(query[None], *one, expected, expected_sums, whole)
    pairs = zip((out, *found[:3]), (expected, *gradients), strict=True)
    return all(bool((a - b[0]).abs().max() < 0.1 * b.abs().max()) for a, b in pairs)


def attend_pair(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention [b, q, heads, d] of queries [b, q, heads, d] to keys and values [b, k, kv_heads,
    d], and the fp32 log-sum-exp [b, heads, q] of the scores. Not for autograd. The queries are the
    keys' own if `is_causal`, else directly after them. `window`, `softcap`: as for `Rule`."""
    if window or softcap or not has_document_kernel(*kernel_sizes(query, key)):
        return attend(query, key, value, _pair_rule(key, is_causal, window, softcap))
    if query.is_cuda:
        lengths = None, None, query.shape[1], key.shape[1]
        attended, sums, *_ = _gpu_forward(query, key, value, *lengths, 0.0, is_causal, False)
        return attended, sums
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    attended, sums = _cpu_forward(*heads, is_causal=is_causal)
    return attended.transpose(1, 2), sums


def attend_pair_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    sums: Tensor,
    is_causal: bool,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value of `attend_pair`. `attended` and `sums` may be those of
    more keys; the gradients are then what these keys contribute."""
    tensors = grad_output, query, key, value, attended
    sums = sums.contiguous()
    if window or softcap or not has_document_kernel(*kernel_sizes(query, key)):
        return attend_backward(*tensors, sums, _pair_rule(key, is_causal, window, softcap))
    if query.is_cuda:
        lengths = None, None, query.shape[1], key.shape[1]
        found = _gpu_backward(*tensors, sums, *lengths, 0.0, is_causal, *_no_dropout(query.device))
        return tuple(found[:3])
    heads = (tensor.transpose(1, 2) for tensor in tensors)
    found = _cpu_backward(*heads, sums, dropout_p=0.0, is_causal=is_causal)
    return tuple(gradient.transpose(1, 2) for gradient in found)


def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """The random state, which is not read without dropout, and what the kernel leaves unused."""
    state = torch.zeros(2, dtype=torch.uint64, device=device)
    return state, torch.empty(0, device=device)


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    longest: int,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention within documents: [t, heads, d] → [t, heads, d].

    key, value [t, kv_heads, d] with kv_heads a divisor of heads. `documents` int32 [n + 1]: the
    start of each document in the t tokens, then t. `longest`: an upper bound of their lengths.
    `sinks` [heads] take part in the softmax. `window`, `softcap`: as for `Rule`.
    """
    attended: Tensor = attend_documents(
        query, key, value, documents, longest, sinks, window, softcap
    )[0]
    return attended


def _document_rule(
    query: Tensor, documents: Tensor, longest: int, window: int, softcap: float
) -> Rule:
    index = torch.arange(len(query), dtype=torch.int32, device=query.device)
    numbers = torch.searchsorted(documents.to(query.device), index, right=True)
    return Rule(0, min(window or longest, longest), softcap, numbers)


def _on_gpu(query: Tensor) -> bool:
    """Whether kernels for GPUs run. On meta, where `plan` counts operations, they do."""
    return query.is_cuda or query.is_meta


def _is_plain(query: Tensor, key: Tensor, window: int, softcap: float, has_sinks: bool) -> bool:
    """Whether no kernel attends within documents like this. The one for CPUs has no window."""
    if softcap or (window and not _on_gpu(query)):
        return True
    if query.is_meta:
        return False
    sizes = kernel_sizes(query, key)
    if not has_document_kernel(*sizes) or (window and not has_window_kernel(*sizes)):
        return True
    return has_sinks and not returns_traced_shape(*sizes)


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
    if _is_plain(query, key, window, softcap, sinks is not None):
        rule = _document_rule(query, documents, longest, window, softcap)
        pair = attend(query[None], key[None], value[None], rule)
        attended, sums = (found[0] for found in pair)
    elif _on_gpu(query):
        lengths = documents, documents, longest, longest
        attended, sums, *_ = _gpu_forward(
            query, key, value, *lengths, 0.0, True, False, **_limits(window)
        )
    else:
        attended = torch.empty_like(query)
        sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
        for document in _slices(documents):
            q, k, v = (tensor[None, document] for tensor in (query, key, value))
            pair = attend_pair(q, k, v, True)
            attended[document], sums[:, document] = (found[0] for found in pair)
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
    tensors = grad_output, query, key, value, attended
    if _is_plain(query, key, window, softcap, has_sinks):
        rule = _document_rule(query, documents, longest, window, softcap)
        grad, q, k, v, out = (tensor[None] for tensor in tensors)
        gradients = attend_backward(grad, q, k, v, out, sums[None], rule)
        return gradients[0][0], gradients[1][0], gradients[2][0]
    if _on_gpu(query):
        lengths = documents, documents, longest, longest
        unused = _no_dropout(query.device)
        found = _gpu_backward(*tensors, sums, *lengths, 0.0, True, *unused, **_limits(window))
        return found[0], found[1], found[2]
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for document in _slices(documents):
        grad, q, k, v, out = (tensor[None, document] for tensor in tensors)
        parts = attend_pair_backward(grad, q, k, v, out, sums[None, :, document], True)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient[document] = part[0]
    return gradients


def _slices(documents: Tensor) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(documents.tolist())]


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
