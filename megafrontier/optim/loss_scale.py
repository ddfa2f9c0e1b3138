"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018)."""

from dataclasses import dataclass

GROWTH_INTERVAL = 1000


@dataclass
class LossScale:
    """Factor on the loss: halved at an overflow, doubled after many good steps in a row.

    Disabled (other precisions) it stays 1.
    """

    scale: float
    enabled: bool
    good_steps: int = 0

    @classmethod
    def create(cls, precision: str, first: float) -> "LossScale":
        enabled = precision == "fp16"
        return cls(first if enabled else 1.0, enabled)

    def update(self, finite: bool) -> None:
        """Learn whether the step's gradients were finite."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps == GROWTH_INTERVAL:
            self.scale *= 2
            self.good_steps = 0

    def state(self) -> dict[str, float]:
        """What a checkpoint holds of it: nothing when disabled."""
        if not self.enabled:
            return {}
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's `state`; another precision starts afresh."""
        if self.enabled and state:
            self.scale, self.good_steps = state["scale"], int(state["good_steps"])
