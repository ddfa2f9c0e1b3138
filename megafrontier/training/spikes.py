"""Which steps are spikes: beyond a multiple of the running median of loss or gradient norm."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megafrontier.config import TrainConfig


@dataclass
class SpikeRule:
    """Judges each finite step by those before it; a factor of 0 judges nothing.

    The median takes no notice of single spikes, so they need not be kept out of it; and a loss that
    has risen for good is no spike any more after half a window.
    """

    loss_factor: float
    norm_factor: float
    losses: deque[float] = field(default_factory=deque)
    norms: deque[float] = field(default_factory=deque)

    @classmethod
    def create(cls, config: TrainConfig) -> "SpikeRule":
        window = config.spike_window
        factors = config.spike_loss, config.spike_grad_norm
        return cls(*factors, deque(maxlen=window), deque(maxlen=window))

    @property
    def enabled(self) -> bool:
        return bool(self.loss_factor or self.norm_factor)

    def judge(self, loss: float, norm: float) -> bool:
        """Whether a step of this loss (nats per token) and gradient norm is a spike. All ranks
        have the same numbers to the bit, and come to the same verdict."""
        is_spike = _is_beyond(loss, self.loss_factor, self.losses)
        is_spike |= _is_beyond(norm, self.norm_factor, self.norms)
        self.losses.append(loss)
        self.norms.append(norm)
        return is_spike

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint holds of it: nothing where it judges nothing."""
        if not self.enabled:
            return {}
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's `state`; one without it starts afresh."""
        self.losses.extend(state.get("losses", ()))
        self.norms.extend(state.get("norms", ()))


def _is_beyond(value: float, factor: float, before: deque[float]) -> bool:
    is_judged = factor > 0 and len(before) == before.maxlen
    return is_judged and value > factor * median(before)
