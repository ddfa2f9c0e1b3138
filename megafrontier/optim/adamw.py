"""AdamW on flat fp32 shards, through torch's or apex's fused implementation."""

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from megafrontier.common.errors import UserError
from megafrontier.optim.groups import STATES
from megafrontier.optim.sharded import ScaledOptimizer


class ShardedAdamW(ScaledOptimizer):
    """Decoupled weight decay (Loshchilov & Hutter 2019) over the engine's master shards."""

    def __init__(
        self,
        masters: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
        implementation: str,
    ) -> None:
        """`groups`: as in `ShardedOptimizer`, with the other arguments of torch's AdamW.
        `implementation`: a value of `optimizer.fused`."""
        super().__init__(masters, groups, partial(_build, implementation=implementation))
        self._implementation = implementation
        self.flatten(*STATES["adamw"])
        self.restore(0)

    def restore(self, steps: int) -> None:
        """Continue after `steps` updates. The moments in `states` have been filled in place."""
        for part, _, _ in self._parts:
            device = part.device if self._implementation == "torch" else "cpu"
            self.torch.state[part]["step"] = torch.tensor(float(steps), device=device)
        for group in self.torch.param_groups:
            group["step"] = steps  # apex counts here

    @property
    def steps(self) -> int:
        """Number of updates made. Waits for the device."""
        if self._implementation == "apex":
            return int(self.torch.param_groups[0]["step"])
        return int(self.torch.state[self._parts[0][0]]["step"].item())


def _build(groups: list[dict[str, Any]], implementation: str) -> torch.optim.Optimizer:
    if implementation == "apex":
        if not torch.cuda.is_available():
            raise UserError("optimizer.fused: apex, but no accelerator is here; need torch or none")
        return find_apex().FusedAdam(groups, adam_w_mode=True)
    return torch.optim.AdamW(groups, fused=implementation == "torch")


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
