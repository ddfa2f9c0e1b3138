"""A device stood for by waiting: blocks that take time, and no core meanwhile.

All ranks of the slow network share the machine's cores, so what sends and encodes takes them from
what computes; a GPU computes beside its host. With a block's time set, each block still computes
its (small) part, and waits as long as a device would take: once in forward, twice in backward.
Hooks, comm streams, codecs and messages are real and have the cores meanwhile.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from megafrontier.model.gpt import GPT

Wait = Callable[[float], object]


def occupy(model: GPT, block_seconds: float, wait: Wait = time.sleep) -> None:
    """Let each block's forward take that much longer, and its backward twice that; 0 is no time.
    `wait` waits for some seconds."""
    for block in model.blocks if block_seconds else ():
        # The instance's own: hooks that shard a block stay outside.
        block.forward = _taking(block.forward, block_seconds, wait)


def _taking(
    forward: Callable[..., torch.Tensor], seconds: float, wait: Wait
) -> Callable[..., torch.Tensor]:
    def slow(*arguments: Any, **named: Any) -> torch.Tensor:
        output: torch.Tensor = _Wait.apply(forward(*arguments, **named), seconds, wait)
        return output

    return slow


class _Wait(torch.autograd.Function):
    """At a block's output: its forward ends later, its backward begins with the wait, so that no
    gradient is there before the device would have it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, seconds: float, wait: Wait) -> torch.Tensor:
        ctx.seconds, ctx.wait = seconds, wait
        wait(seconds)
        return output.clone()  # itself would be a view, which cannot be sharded at

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        ctx.wait(2 * ctx.seconds)
        return gradients[0], None, None


_LIBRARY: list[torch.library.Library] = []


def occupy_products(flops_per_second: float) -> None:
    """Let every matrix product of this process take as long as a device of that speed would.

    For splits whose collectives run beside the products of one layer. Each product is computed, and
    the rest of its time is waited for.
    """
    library = torch.library.Library("aten", "IMPL")

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return compute(torch.mm, (left, right), None)

    def addmm(*tensors: torch.Tensor, **factors: float) -> torch.Tensor:
        return compute(torch.addmm, tensors, None, **factors)

    def addmm_(*tensors: torch.Tensor, **factors: float) -> torch.Tensor:
        return compute(torch.addmm, tensors, tensors[0], **factors)

    def compute(
        product: Callable[..., torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
        out: torch.Tensor | None,
        **factors: float,
    ) -> torch.Tensor:
        began, (left, right) = time.perf_counter(), tensors[-2:]
        if out is None:
            out = left.new_empty(left.shape[0], right.shape[1])
        product(*tensors, **factors, out=out)
        seconds = 2 * left.numel() * right.shape[1] / flops_per_second
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        return out

    for function in (mm, addmm, addmm_):
        library.impl(function.__name__, function, "CPU")
    _LIBRARY.append(library)  # with the library its functions would go
