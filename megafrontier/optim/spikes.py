"""Which steps are spikes: beyond a multiple of the running median of loss or gradient norm."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from megafrontier.common.async_copy import to_device
from megafrontier.config import TrainConfig

NAMES = ("losses", "norms")


class SpikeRule:
    """Judges each finite step by the last ones before it; a factor of 0 judges nothing.

    The median takes no notice of single spikes, so they need not be kept out of it; and a loss that
    has risen for good is no spike any more after half a window. All of it stays on the device, for
    the optimizer follows before the host has looked.
    """

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        factors = config.spike_loss, config.spike_grad_norm
        self.enabled = any(factors)
        self._factors = to_device([factor or math.inf for factor in factors], device)
        # float64 [2, window], the newest last; NaN where there has been no step yet.
        shape = len(NAMES), config.spike_window
        self._before = torch.full(shape, math.nan, dtype=torch.float64, device=device)

    def detect(self, loss: torch.Tensor, norm: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
        """1 where a step of this loss (nats per token) and gradient norm is a spike, else 0; all
        float64 []. One that `is_bad` is none, and nothing to judge by. All ranks have the same
        numbers to the bit, and come to the same verdict."""
        if not self.enabled:
            return torch.zeros_like(loss)
        step = torch.stack([loss, norm])
        is_beyond = (step > self._factors * self._usual()).any()
        shifted = torch.cat([self._before[:, 1:], step[:, None]], 1)
        self._before = torch.where(is_bad > 0, self._before, shifted)
        return is_beyond * (1 - is_bad)

    def _usual(self) -> torch.Tensor:
        """Medians [2]; infinite before there has been a whole window of steps."""
        window = self._before.shape[1]
        middle = self._before.sort(1).values[:, (window - 1) // 2 : window // 2 + 1].mean(1)
        return torch.where(self._before[:, 0].isnan(), math.inf, middle)

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint holds of it: nothing where it judges nothing."""
        if not self.enabled:
            return {}
        rows = self._before.tolist()
        return {
            name: [value for value in row if not math.isnan(value)]
            for name, row in zip(NAMES, rows, strict=True)
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's `state`; one without it starts afresh."""
        for row, name in zip(self._before, NAMES, strict=True):
            values = state.get(name, ())[-len(row) :]
            if values:
                row[-len(values) :] = torch.tensor(values, dtype=torch.float64)
