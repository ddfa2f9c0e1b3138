"""Gated activations, whose backward writes the gradients of gate and up into one tensor.

Autograd would make two tensors and copy them into a third.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
SLOPE, LIMIT = 1.702, 7.0
"""Of `clipped`."""


def gated(raised: Tensor, activation: str) -> Tensor:
    """activation(gate) · up: [.., 2 · width], gate and up side by side → [.., width]. `activation`:
    "silu", or "gelu" with torch's `approximate` after it ("gelu none", "gelu tanh")."""
    found: Tensor = _Gated.apply(raised, activation)
    return found


def clipped(raised: Tensor) -> Tensor:
    """(up + 1) · gate · sigmoid(1.702 · gate), with the gate at most 7 and up between -7 and 7:
    [.., 2 · width], gate and up side by side → [.., width]. As in gpt-oss (OpenAI 2025,
    arXiv:2508.10925)."""
    found: Tensor = _Clipped.apply(raised)
    return found


class _Clipped(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, raised: Tensor) -> Tensor:
        ctx.save_for_backward(raised)
        gate, up = raised.chunk(2, -1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * (gate * (SLOPE * gate).sigmoid())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (raised,), (grad_output,) = ctx.saved_tensors, grad_outputs
        gate, up = raised.chunk(2, -1)
        low, near = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        share = (SLOPE * low).sigmoid()
        slope = share * (1 + SLOPE * low * (1 - share))
        by_gate = torch.where(gate <= LIMIT, grad_output * (near + 1) * slope, 0)
        by_up = torch.where(up.abs() <= LIMIT, grad_output * low * share, 0)
        return join_halves(by_gate, by_up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raised: Tensor, activation: str) -> Tensor:
        gate, up = raised.chunk(2, -1)
        activated = _activated(gate, activation)
        ctx.save_for_backward(raised, activated)
        ctx.activation = activation
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (raised, activated), (grad_output,) = ctx.saved_tensors, grad_outputs
        gate, up = raised.chunk(2, -1)
        by_activated = grad_output * up
        if torch.compiler.is_compiling():
            by_gate = _by_gate(by_activated, gate, ctx.activation)
            return join_halves(by_gate, grad_output * activated), None
        gradient = torch.empty_like(raised)
        first, second = gradient.chunk(2, -1)
        _by_gate(by_activated, gate, ctx.activation, grad_input=first)
        torch.mul(grad_output, activated, out=second)
        return gradient, None


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate=activation.removeprefix("gelu "))


def _by_gate(by_activated: Tensor, gate: Tensor, activation: str, **options: Any) -> Tensor:
    """The gradient of the gate, of that of what it is activated to."""
    if activation == "silu":
        found: Tensor = _aten.silu_backward(by_activated, gate, **options)
    else:
        approximate = activation.removeprefix("gelu ")
        found = _aten.gelu_backward(by_activated, gate, approximate=approximate, **options)
    return found


@torch.library.custom_op("megafrontier::join_halves", mutates_args=())
def join_halves(first: Tensor, second: Tensor) -> Tensor:
    """[.., width] twice → [.., 2 · width]. The compiler computes each half where it belongs
    (`recompute.compile`)."""
    return torch.cat([first, second], -1)


@join_halves.register_fake
def _(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second], -1)
