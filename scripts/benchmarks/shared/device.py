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
