"""AdamW on flat fp32 shards, through torch's or apex's fused implementation."""

import importlib
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from megafrontier.common.errors import UserError
from megafrontier.config import OptimizerConfig
from megafrontier.optim.sharded import ShardedOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW(ShardedOptimizer):
    """Decoupled weight decay (Loshchilov & Hutter 2019) over the engine's master shards.

    Each shard is split at its element of `decay_stops`: decayed parameters come before it, the
    others after it.
    """

    def __init__(
        self,
        masters: Sequence[torch.Tensor],
        decay_stops: Sequence[int],
        config: OptimizerConfig,
    ) -> None:
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": decay} for decay in (config.weight_decay, 0.0)
        ]
        for index, (master, stop) in enumerate(zip(masters, decay_stops, strict=True)):
            for group, part in zip(groups, (slice(0, stop), slice(stop, None)), strict=True):
                if master[part].numel():
                    group["params"].append((index, part))
        used = [group for group in groups if group["params"]]
        super().__init__(masters, used, partial(_build, config=config))
        self._implementation = config.fused
        self.flatten(*MOMENTS)
        self.restore(0)

    def restore(self, steps: int) -> None:
        """Continue after `steps` updates. The moments in `states` have been filled in place."""
        for part, _, _ in self._parts:
            device = part.device if self._implementation == "torch" else "cpu"
            self.torch.state[part]["step"] = torch.tensor(float(steps), device=device)
        for group in self.torch.param_groups:
            group["step"] = steps  # apex counts here

    def step(
        self,
        gradients: Sequence[torch.Tensor],
        lr: float,
        divisor: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """Update the masters in place, or change nothing if `skip` [] is 1.

        gradients: one 1-D fp32 shard for each master. They are overwritten.
        divisor: [], what the gradients are divided by.

        torch's fused kernel reads both on the device. With the others the host waits for it.
        """
        optimizer: Any = self.torch
        if self._implementation == "torch":
            optimizer.grad_scale, optimizer.found_inf = divisor.float(), skip.float()
        elif skip.item():
            return
        else:
            torch._foreach_div_(list(gradients), divisor.item())
        for group in optimizer.param_groups:
            group["lr"] = lr
        self.update(gradients)

    @property
    def steps(self) -> int:
        """Number of updates made. Waits for the device."""
        if self._implementation == "apex":
            return int(self.torch.param_groups[0]["step"])
        return int(self.torch.state[self._parts[0][0]]["step"].item())


def _build(groups: list[dict[str, object]], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas = (config.betas[0], config.betas[1])
    if config.fused == "apex":
        if not torch.cuda.is_available():
            raise UserError("optimizer.fused: apex, but no accelerator is here; need torch or none")
        fused_adam = find_apex().FusedAdam
        return fused_adam(groups, lr=config.lr, betas=betas, eps=config.eps, adam_w_mode=True)
    fused = config.fused == "torch"
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)


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
