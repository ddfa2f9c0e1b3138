"""The products of all experts of a block with their tokens, sorted by expert.

| product | where | cost |
|---|---|---|
| grouped | torch's grouped matrix product, on GPUs that have it for the type | no synchronization |
| padded | other GPUs, if the experts have about equally many tokens | one |
| loop | CPUs, and other GPUs if one expert has most tokens | one |
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
"""rows [n, columns] or [experts, most, columns], counts int64 [experts] and matrices [experts,
outputs, columns] → rows of outputs."""
ExpertMLPs = Callable[[Multiply, Tensor, Tensor], Tensor]
"""Both products of all experts and the activation between them, with a given `Multiply`: rows and
counts → rows of outputs."""
Product = Callable[[Tensor, Tensor, ExpertMLPs], Tensor]
"""tokens [n, hidden] sorted by expert, counts int64 [experts] and the experts → [n, hidden]."""

ALIGNMENT = 16
"""Bytes of which torch's grouped product needs a multiple in each row."""
PADDED_LIMIT = 2.0
"""The padded product may have this many times as many rows as there are tokens."""


def padded_product(tokens: Tensor, counts: Tensor, mlps: ExpertMLPs) -> Tensor:
    """`pad_product` to the most tokens of any expert; `loop_product` if that would be more than
    `PADDED_LIMIT` times the tokens."""
    most = int(counts.max())
    if most * len(counts) > PADDED_LIMIT * len(tokens):
        return loop_product(tokens, counts, mlps)
    return pad_product(tokens, counts, mlps, most)


def pad_product(tokens: Tensor, counts: Tensor, mlps: ExpertMLPs, most: int) -> Tensor:
    """A batched product of all experts, with the tokens of each padded to `most`."""
    experts = torch.repeat_interleave(counts, output_size=len(tokens))
    starts = counts.cumsum(0) - counts
    places = experts * most + torch.arange(len(tokens), device=tokens.device) - starts[experts]
    padded = tokens.new_zeros(len(counts) * most, tokens.shape[1]).index_copy(0, places, tokens)
    return mlps(_batched, padded.view(len(counts), most, -1), counts).flatten(0, 1)[places]


def loop_product(tokens: Tensor, counts: Tensor, mlps: ExpertMLPs) -> Tensor:
    """One expert after another."""
    return mlps(_loop, tokens, counts)


def grouped_product(tokens: Tensor, counts: Tensor, mlps: ExpertMLPs) -> Tensor:
    """torch's grouped matrix product, which reads the counts on the device."""
    return mlps(_grouped, tokens, counts)


def _loop(rows: Tensor, counts: Tensor, matrices: Tensor) -> Tensor:
    # unbind, because its backward stacks the gradients once. That of matrices[i] would fill a
    # tensor of the size of all experts.
    parts = zip(rows.split(counts.tolist()), matrices.unbind(), strict=True)
    return torch.cat([F.linear(part, one) for part, one in parts])


def _grouped(rows: Tensor, counts: Tensor, matrices: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices.transpose(1, 2), offs=_stops(counts))


def _batched(rows: Tensor, counts: Tensor, matrices: Tensor) -> Tensor:
    return torch.bmm(rows, matrices.transpose(1, 2))


def _stops(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def matrix_gradients(rows: Tensor, counts: Tensor, gradient: Tensor, grouped: bool) -> Tensor:
    """The gradients of matrices [experts, outputs, columns], of the gradient of a product.

    grouped: whether the product was torch's grouped one.
    """
    if rows.dim() == 3:
        return torch.bmm(gradient.transpose(1, 2), rows)
    if grouped and len(rows):
        return F.grouped_mm(gradient.t(), rows, offs=_stops(counts))
    parts = (values.split(counts.tolist()) for values in (gradient, rows))
    return torch.stack([by_outputs.t() @ part for by_outputs, part in zip(*parts, strict=True)])


def add_biases(rows: Tensor, counts: Tensor, biases: Tensor | None, grouped: bool) -> Tensor:
    """Rows of outputs as of `Multiply`, plus the bias of each one's expert [experts, outputs].

    grouped: whether the product was torch's grouped one.
    """
    if biases is None:
        return rows
    if rows.dim() == 3:
        return rows + biases[:, None]
    found: Tensor = _AddBiases.apply(rows, counts, biases, grouped)
    return found


class _AddBiases(torch.autograd.Function):
    """Backward sums by a product, because additions with atomics have any order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Tensor, biases: Tensor, grouped: bool) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.grouped = grouped
        if grouped:
            return rows + biases.repeat_interleave(counts, 0, output_size=len(rows))
        parts = zip(rows.split(counts.tolist()), biases, strict=True)
        return torch.cat([part + bias for part, bias in parts])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, Tensor, None]:
        (counts,), (gradient,) = ctx.saved_tensors, grad_outputs
        ones = gradient.new_ones(len(gradient), ALIGNMENT // gradient.itemsize)
        sums = matrix_gradients(ones, counts, gradient, ctx.grouped)
        return gradient, None, sums[..., 0], None


PRODUCTS: dict[str, Product] = {"cpu": loop_product}
"""Products by the type of device, for types whose devices are alike. A simulation adds its own."""


def choose_product(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> Product:
    """The product for tokens of this type on this device, found by a small trial. `sizes`: of
    rows, columns and activations of the experts."""
    return PRODUCTS.get(device.type) or _try_grouped(device, dtype, sizes)


@cache
def _try_grouped(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> Product:
    return grouped_product if _has_grouped(device, dtype, sizes) else padded_product


def _has_grouped(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """Whether torch's grouped matrix product and its backward work."""
    if any(size * dtype.itemsize % ALIGNMENT for size in sizes):
        return False
    try:
        with torch.enable_grad():
            values = torch.ones(32, 64, dtype=dtype, device=device, requires_grad=True)
            up = torch.ones(2, 64, 64, dtype=dtype, device=device, requires_grad=True)
            counts = torch.tensor([0, 32], device=device)
            out = _grouped(F.gelu(_grouped(values, counts, up)), counts, up)
            torch.autograd.grad(out, (values, up), torch.ones_like(out))
            return bool(out.isfinite().all())
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def describe_product(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> str:
    """The product of this device, type and sizes, in words."""
    product = choose_product(device, dtype, sizes)
    if product is grouped_product:
        return "torch's grouped matrix product"
    if product is loop_product:
        return "one product after another"
    return (
        "a padded batched product, or one after another if their tokens are very unequal, because "
        f"torch has no grouped matrix product for {dtype} and these sizes on this device"
    )
