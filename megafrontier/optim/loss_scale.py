"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018)."""

import math
from collections.abc import Mapping

import torch

GROWTH_INTERVAL = 1000
MIN_SCALE = 2.0**-24
"""Far below 1, for gradients are sums over tokens."""


def is_scale_overflow(loss_scale: float, loss: float | None) -> bool:
    """Whether a lower scale is all that a step with non-finite gradients asks for, as many in a row
    do at the start of a run in fp16. `loss_scale` is that of the next step, 0 without one, and does
    not fall where it is infinite; `loss` None where it was not finite."""
    can_fall = MIN_SCALE < loss_scale < math.inf
    return can_fall and loss is not None and math.isfinite(loss)


class LossScale:
    """Factor on the loss: halved at an overflow, doubled after many good steps in a row.

    Disabled (other precisions) it stays 1. It lives on the device, for the next step needs it
    before the host has looked at this one.
    """

    def __init__(self, precision: str, first: float, device: torch.device) -> None:
        self.enabled = precision == "fp16"
        self.scale = torch.tensor(first if self.enabled else 1.0, device=device)
        self._good_steps = torch.tensor(0.0, device=device)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that backward is to begin with."""
        return loss * self.scale if self.enabled else loss

    def update(self, is_bad: torch.Tensor) -> None:
        """Learn whether the step's gradients were not finite: 1 or 0, []."""
        if not self.enabled:
            return
        good = self._good_steps + 1
        is_due = good == GROWTH_INTERVAL
        grown = torch.where(is_due, self.scale * 2, self.scale)
        halved = (self.scale / 2).clamp(min=MIN_SCALE)
        self.scale = torch.where(is_bad > 0, halved, grown)
        self._good_steps = torch.where((is_bad > 0) | is_due, 0.0, good)

    def state(self) -> dict[str, float]:
        """What a checkpoint holds of it: nothing when disabled."""
        if not self.enabled:
            return {}
        return {"scale": self.scale.item(), "good_steps": int(self._good_steps.item())}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint's `state`; another precision starts afresh."""
        if self.enabled and state:
            self.scale.fill_(state["scale"])
            self._good_steps.fill_(state["good_steps"])
