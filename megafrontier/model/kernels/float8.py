"""Matrix products in float8, forward and backward.

Weights and activations have 3 bits of mantissa (e4m3), gradients 2 and a wider range (e5m2):
Micikevicius et al. 2022, arXiv:2209.05433. Each tensor has one scale, which follows from its
largest magnitude when it is used, so there is no state from step to step, and the host waits for
nothing. Sums are fp32. Results, and what autograd saves, keep the type of the input.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

MULTIPLE = 16
"""Kernels need matrices whose sizes are multiples of this."""
TINY = 1e-30
"""A tensor with smaller values has the scale of this one."""


class Formats(NamedTuple):
    """The types in which a device multiplies; None: that of the tensors."""

    values: torch.dtype | None
    gradients: torch.dtype | None


PLAIN = Formats(None, None)
FORMATS = (
    Formats(torch.float8_e4m3fn, torch.float8_e5m2),
    Formats(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),  # AMD's MI300
)


class Scaled(NamedTuple):
    """values · scale, which stands for a matrix of the type `dtype`."""

    values: Tensor
    scale: Tensor
    dtype: torch.dtype

    def t(self) -> "Scaled":
        """The transposed matrix, in memory of its own: kernels read along rows."""
        return self._replace(values=self.values.t().contiguous())


def formats(float8: int | None) -> Formats:
    """The formats of a number in `FORMATS`. Operators take no others than numbers."""
    return PLAIN if float8 is None else FORMATS[float8]


def quantized(matrix: Tensor, dtype: torch.dtype | None) -> Tensor | Scaled:
    """The matrix in float8, or as it is without a type. If a value is not finite, all become
    NaN."""
    if dtype is None:
        return matrix
    largest = torch.finfo(dtype).max
    scale = matrix.abs().amax().float().clamp(min=TINY) / largest
    # Rounding could exceed the largest value, which most formats turn into NaN.
    values = (matrix.float() * scale.reciprocal()).clamp(-largest, largest).to(dtype)
    return Scaled(values, scale, matrix.dtype)


def product(left: Tensor | Scaled, right: Tensor | Scaled) -> Tensor:
    """left [m, k] and right [n, k], both quantized or both not → left · rightᵀ [m, n]."""
    if isinstance(left, Scaled) and isinstance(right, Scaled):
        values = left.values.contiguous(), right.values.contiguous().t()
        return torch._scaled_mm(*values, left.scale, right.scale, out_dtype=left.dtype)
    assert not isinstance(left, Scaled)
    assert not isinstance(right, Scaled)
    return left @ right.t()


def weight_gradient(gradient: Tensor, inputs: Tensor, float8: int | None) -> Tensor:
    """gradient [n, outputs] and inputs [n, inputs] → [outputs, inputs]."""
    used = formats(float8)
    return product(quantized(gradient, used.gradients).t(), quantized(inputs, used.values).t())


def float8_linear(inputs: Tensor, weight: Tensor, float8: int) -> Tensor:
    """inputs [.., k] and weight [outputs, k] → [.., outputs]."""
    result: Tensor = _Product.apply(inputs, weight, float8)
    return result


class _Product(torch.autograd.Function):
    """inputs · weightᵀ."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, float8: int) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.float8 = float8
        used = formats(float8)
        rows = quantized(inputs.flatten(0, -2), used.values)
        return product(rows, quantized(weight, used.values)).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        (gradient,) = grad_outputs
        used = formats(ctx.float8)
        rows = quantized(gradient.flatten(0, -2), used.gradients)
        by_inputs = product(rows, quantized(weight, used.values).t()).view_as(inputs)
        if not ctx.needs_input_grad[1]:
            return by_inputs, None, None
        by_weight = product(rows.t(), quantized(inputs.flatten(0, -2), used.values).t())
        return by_inputs, by_weight, None


def missing_float8(device: torch.device) -> str | None:
    """What `device` lacks to multiply in float8, or None. CPUs emulate it, slowly."""
    if device.type not in ("cpu", "cuda"):
        return f"no float8 products on {device.type}"
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        arch = getattr(found, "gcnArchName", "").split(":")[0]
        has_units = (
            arch.startswith(("gfx94", "gfx95", "gfx12"))
            if torch.version.hip
            else (found.major, found.minor) >= (8, 9)
        )
        if not has_units:
            return f"{arch or found.name} has no float8 matrix units"
    used = FORMATS[float8_of(device)]
    values = torch.ones(MULTIPLE, MULTIPLE, device=device, dtype=torch.bfloat16)
    try:
        made = product(quantized(values, used.gradients), quantized(values, used.values))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return (
            f"torch {torch.__version__} has no float8 products here ({str(error).splitlines()[0]})"
        )
    is_right = bool((made == MULTIPLE).all())
    return None if is_right else "wrong float8 products"


def float8_of(device: torch.device) -> int:
    """The number of the formats that a device with float8 multiplies in."""
    if device.type != "cuda" or torch.version.hip is None:
        return 0
    return int(torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94"))
