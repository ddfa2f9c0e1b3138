"""The kernels of softmax attention that return log-sums, as classes that say what they support.

| kernel | devices | windows | capped scores | sinks |
|---|---|---|---|---|
| `GPUFlash` | GPUs where torch has flash; meta | of documents, after a trial | no | after a trial |
| `CPUFlash` | CPU | no | no | yes |
| `Blockwise` | all | yes | yes | yes |

With log-sums, attention to several parts of the keys can be merged, and sinks can be added.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafrontier.model.kernels.blockwise import Rule, attend, attend_backward

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# The operators below torch.nn.attention.varlen, whose own signature differs between releases.
_gpu_forward = torch.ops.aten._flash_attention_forward
_gpu_backward = torch.ops.aten._flash_attention_backward

Sizes = tuple[torch.device, torch.dtype, int, int, int]
"""The device and type, the numbers of heads of queries and keys, and the size of a head."""
Heads = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The gradient of the result, query, key, value and result."""


Keep = Callable[[Tensor], object]
"""Is given the log-sums [heads, t] of attention."""


class Scope(NamedTuple):
    """Which keys queries attend to, and how.

    With documents, queries [t, heads, d] attend to the keys [t, kv_heads, d] of their document, and
    log-sums are [heads, t]. Otherwise all queries [b, q, heads, d] attend to the keys
    [b, k, kv_heads, d], and log-sums are [b, heads, q].
    """

    documents: Tensor | None = None
    """int32 [n + 1]: the start of each document in the t tokens, then t."""
    longest: int = 0
    """An upper bound of the documents' lengths."""
    is_causal: bool = True
    """The queries are the keys' own, and attend to none after them. Otherwise they are directly
    after the keys."""
    window: int = 0
    softcap: float = 0.0
    """As for `blockwise.Rule`."""


def keep_largest_(largest: Tensor, counted: Tensor | None, sums: Tensor) -> None:
    """Raise the values of `largest` fp32 [heads] to the largest log-sums in `sums` [heads, t], in
    place. `counted`: bool, of t tokens; None: all."""
    sums = sums.detach()
    if counted is not None:
        sums = sums.masked_fill(~counted.flatten(), -torch.inf)
    largest.copy_(torch.maximum(largest, sums.amax(-1)))


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
    kernel = kernel_of((device, dtype, heads, kv_heads, head_size), Scope(documents, 12))
    return kernel.forward((query, key, key), Scope(documents, 12))[1].shape == (heads, 16)


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


def kernel_sizes(query: Tensor, key: Tensor) -> Sizes:
    """Those of queries [.., heads, d] and keys [.., kv_heads, d]."""
    return query.device, query.dtype, query.shape[-2], key.shape[-2], query.shape[-1]


def has_log_sums(sizes: Sizes, has_rule: bool, dropout: float) -> bool:
    """Whether attention within documents and their parts needs no dense mask. Kernels with log-sums
    have no dropout, and fused ones do not support every type and head size. `Blockwise` is used for
    the rest only with a rule: windows, capped scores or sinks, which have no dropout."""
    return has_rule or (dropout == 0 and has_document_kernel(*sizes))


class LogSumKernel:
    """Softmax attention with the fp32 log-sums of its scores, and its gradients."""

    name: str
    """In the log."""

    def supports(self, sizes: Sizes, scope: Scope, has_sinks: bool) -> bool:
        """Whether it attends like this, and its log-sums allow to add sinks. `sizes`: as for
        `has_document_kernel`."""
        raise NotImplementedError

    def forward(self, heads: Heads, scope: Scope) -> tuple[Tensor, Tensor]:
        """The result, like query, and the log-sums."""
        raise NotImplementedError

    def backward(self, inputs: Inputs, sums: Tensor, scope: Scope) -> tuple[Tensor, ...]:
        """Gradients of query, key and value. Result and log-sums may be those of more keys; the
        gradients are then what these keys contribute."""
        raise NotImplementedError


class GPUFlash(LogSumKernel):
    """Flash attention (Dao et al. 2022, arXiv:2205.14135) of torch, on GPUs."""

    name = "flash"

    def supports(self, sizes: Sizes, scope: Scope, has_sinks: bool) -> bool:
        is_pair = scope.documents is None
        # A window of a pair would begin before the keys.
        if scope.softcap or (is_pair and scope.window):
            return False
        if sizes[0].type == "meta":  # where `plan` counts operations, documents have this kernel
            return not is_pair
        if sizes[0].type != "cuda" or not has_document_kernel(*sizes):
            return False
        has_window = not scope.window or has_window_kernel(*sizes)
        return has_window and (not has_sinks or returns_traced_shape(*sizes))

    def forward(self, heads: Heads, scope: Scope) -> tuple[Tensor, Tensor]:
        options = *self._lengths(*heads[:2], scope), 0.0, scope.is_causal, False
        attended, sums, *_ = _gpu_forward(*heads, *options, **_limits(scope.window))
        return attended, sums

    def backward(self, inputs: Inputs, sums: Tensor, scope: Scope) -> tuple[Tensor, ...]:
        lengths, unused = self._lengths(*inputs[1:3], scope), _no_dropout(sums.device)
        given = *inputs, sums.contiguous(), *lengths, 0.0, scope.is_causal, *unused
        return tuple(_gpu_backward(*given, **_limits(scope.window))[:3])

    def _lengths(self, query: Tensor, key: Tensor, scope: Scope) -> tuple[Any, Any, int, int]:
        if scope.documents is None:
            return None, None, query.shape[1], key.shape[1]
        return scope.documents, scope.documents, scope.longest, scope.longest


class CPUFlash(LogSumKernel):
    """Flash attention of torch on CPUs, of one document after another."""

    name = "flash"

    def supports(self, sizes: Sizes, scope: Scope, has_sinks: bool) -> bool:
        return sizes[0].type == "cpu" and not scope.window and not scope.softcap

    def forward(self, heads: Heads, scope: Scope) -> tuple[Tensor, Tensor]:
        if scope.documents is None:
            turned = (tensor.transpose(1, 2) for tensor in heads)
            attended, sums = _cpu_forward(*turned, is_causal=scope.is_causal)
            return attended.transpose(1, 2), sums
        query, key, value = heads
        attended = torch.empty_like(query)
        sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
        for at in _slices(scope.documents):
            pair = self.forward((query[None, at], key[None, at], value[None, at]), Scope())
            attended[at], sums[:, at] = (part[0] for part in pair)
        return attended, sums

    def backward(self, inputs: Inputs, sums: Tensor, scope: Scope) -> tuple[Tensor, ...]:
        if scope.documents is None:
            heads = (tensor.transpose(1, 2) for tensor in inputs)
            options = {"dropout_p": 0.0, "is_causal": scope.is_causal}
            gradients = _cpu_backward(*heads, sums.contiguous(), **options)
            return tuple(gradient.transpose(1, 2) for gradient in gradients)
        totals = tuple(torch.empty_like(tensor) for tensor in inputs[1:4])
        for at in _slices(scope.documents):
            grad, query, key, value, attended = (tensor[None, at] for tensor in inputs)
            pair = grad, query, key, value, attended
            parts = self.backward(pair, sums[None, :, at], Scope())
            for total, part in zip(totals, parts, strict=True):
                total[at] = part[0]
        return totals


class Blockwise(LogSumKernel):
    """Attention in plain torch (`blockwise.py`)."""

    name = "plain torch"

    def supports(self, sizes: Sizes, scope: Scope, has_sinks: bool) -> bool:
        return True

    def forward(self, heads: Heads, scope: Scope) -> tuple[Tensor, Tensor]:
        rule = self._rule(heads[1], scope)
        if scope.documents is None:
            return attend(*heads, rule)
        query, key, value = (tensor[None] for tensor in heads)
        attended, sums = attend(query, key, value, rule)
        return attended[0], sums[0]

    def backward(self, inputs: Inputs, sums: Tensor, scope: Scope) -> tuple[Tensor, ...]:
        rule = self._rule(inputs[2], scope)
        if scope.documents is None:
            return attend_backward(*inputs, sums, rule)
        grad, query, key, value, attended = (tensor[None] for tensor in inputs)
        gradients = attend_backward(grad, query, key, value, attended, sums[None], rule)
        return tuple(gradient[0] for gradient in gradients)

    def _rule(self, key: Tensor, scope: Scope) -> Rule:
        if scope.documents is None:
            return Rule(0 if scope.is_causal else key.shape[1], scope.window, scope.softcap)
        index = torch.arange(len(key), dtype=torch.int32, device=key.device)
        numbers = torch.searchsorted(scope.documents.to(key.device), index, right=True)
        longest = scope.longest
        return Rule(0, min(scope.window or longest, longest), scope.softcap, numbers)


KERNELS: tuple[LogSumKernel, ...] = (GPUFlash(), CPUFlash(), Blockwise())
"""The first that supports what is asked for is used."""


def kernel_of(sizes: Sizes, scope: Scope, has_sinks: bool = False) -> LogSumKernel:
    """The kernel for these. It is not for autograd."""
    return next(kernel for kernel in KERNELS if kernel.supports(sizes, scope, has_sinks))


def _limits(window: int) -> dict[str, int]:
    """The window as arguments of the GPU's kernel."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """The random state, which is not read without dropout, and what the kernel leaves unused."""
    state = torch.zeros(2, dtype=torch.uint64, device=device)
    return state, torch.empty(0, device=device)


def _slices(documents: Tensor) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(documents.tolist())]
