"""Find spikes: steps whose loss or gradient norm exceeds a multiple of its running median."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from megafrontier.common.async_copy import to_device
from megafrontier.config import TrainConfig

NAMES = ("losses", "norms")


class SpikeRule:
    """Compares each finite step with the `train.spike_window` steps before it. A factor of 0 turns
    the comparison off.

    The median ignores single spikes, so they may stay in the window; a loss that has risen for good
    is no longer a spike after half a window. Everything stays on the device, because the optimizer
    follows before the host has read the loss.
    """

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        factors = config.spike_loss, config.spike_grad_norm
        self.enabled = any(factors)
        self._factors = to_device([factor or math.inf for factor in factors], device)
        # float64 [2, window], newest last; NaN for steps that have not been made yet.
        shape = len(NAMES), config.spike_window
        self._window = torch.full(shape, math.nan, dtype=torch.float64, device=device)

    def detect(self, loss: torch.Tensor, norm: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
        """Whether a step with this loss (nats per token) and gradient norm is a spike: 1 or 0.

        All float64 []. A step that `is_bad` is no spike and does not enter the window. All ranks
        have the same bits and decide alike.
        """
        if not self.enabled:
            return torch.zeros_like(loss)
        step = torch.stack([loss, norm])
        is_beyond = (step > self._factors * self._medians()).any()
        shifted = torch.cat([self._window[:, 1:], step[:, None]], 1)
        self._window = torch.where(is_bad > 0, self._window, shifted)
        return is_beyond * (1 - is_bad)

    def _medians(self) -> torch.Tensor:
        """Medians [2]; infinite until the window is full."""
        length = self._window.shape[1]
        middle = self._window.sort(1).values[:, (length - 1) // 2 : length // 2 + 1].mean(1)
        return torch.where(self._window[:, 0].isnan(), math.inf, middle)

    def state_dict(self) -> dict[str, list[float]]:
        """What a checkpoint keeps: nothing if the rule is off."""
        if not self.enabled:
            return {}
        rows = self._window.tolist()
        return {
            name: [value for value in row if not math.isnan(value)]
            for name, row in zip(NAMES, rows, strict=True)
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state; if it is empty, start anew. A window of another
        length takes the newest steps."""
        for row, name in zip(self._window, NAMES, strict=True):
            values = state_dict.get(name, ())[-len(row) :]
            if values:
                row[-len(values) :] = torch.tensor(values, dtype=torch.float64)
