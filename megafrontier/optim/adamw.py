"""AdamW on flat fp32 shards, through torch's or apex's fused implementation."""

import importlib
from types import ModuleType
from typing import Any

import torch

from megafrontier.common.errors import UserError
from megafrontier.optim.base import ElementwiseOptimizer, SizeFactors
from megafrontier.parallel.param_spec import SizeRatio


class ShardedAdamW(ElementwiseOptimizer):
    """Decoupled weight decay (Loshchilov & Hutter 2019) over the engine's master shards."""

    name = "adamw"
    options = ("betas", "eps")
    state_names = ("exp_avg", "exp_avg_sq")

    @staticmethod
    def build(groups: list[dict[str, Any]], implementation: str) -> torch.optim.Optimizer:
        """torch's or apex's. Raises UserError without apex."""
        if implementation != "apex":
            return torch.optim.AdamW(groups, fused=implementation == "torch")
        if not torch.cuda.is_available():
            raise UserError("optimizer.fused: apex, but no accelerator is here; need torch or none")
        return find_apex().FusedAdam(groups, adam_w_mode=True)

    @classmethod
    def size_factors(cls, ratio: SizeRatio) -> SizeFactors:
        """Dey et al. 2025, arXiv:2505.01618, table 1 with alpha = 1."""
        width = 1.0 if ratio.role == "vector" else ratio.width
        # Gradients of routers do not become smaller with the width.
        gradient = (1.0 if ratio.role == "output" else 1 / ratio.width) / ratio.depth
        return SizeFactors(1 / width, gradient, width)

    def restore(self, steps: int) -> None:
        """As `UnitOptimizer.restore`."""
        for part, _, _ in self._parts:
            device = part.device if self.implementation == "torch" else "cpu"
            self.torch.state[part]["step"] = torch.tensor(float(steps), device=device)
        for group in self.torch.param_groups:
            group["step"] = steps  # apex counts here

    @property
    def steps(self) -> int:
        """Number of updates made. Waits for the device."""
        if self.implementation == "apex":
            return int(self.torch.param_groups[0]["step"])
        return int(self.torch.state[self._parts[0][0]]["step"].item())


def find_apex() -> ModuleType:
    """The optimizers module of NVIDIA's or ROCm's apex. Initializes no device, so that ranks may be
    forked later.

    Raises UserError if there is none.
    """
    try:
        return importlib.import_module("apex.optimizers")
    except ImportError as error:
        raise UserError(
            f"optimizer.fused: apex, but apex is not installed ({error}), need NVIDIA's or ROCm's, "
            "built from source (PyPI's is unrelated), or torch or none"
        ) from error
