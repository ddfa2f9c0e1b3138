"""AdamW on flat fp32 shards, through torch's or apex's fused implementation."""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from megafrontier.common.errors import UserError
from megafrontier.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """Decoupled weight decay (Loshchilov & Hutter 2019) over the engine's master shards.

    Each shard is split at its element of `decay_stops`: decayed parameters come before it, the
    others after it. Both parts and their moments are views, so that a shard's moments are
    contiguous like the shard itself.
    """

    def __init__(
        self,
        masters: Sequence[torch.Tensor],
        decay_stops: Sequence[int],
        config: OptimizerConfig,
    ) -> None:
        self._implementation = config.fused
        self.moments = {name: [torch.zeros_like(m) for m in masters] for name in MOMENTS}
        """First and second moments by torch's names, one 1-D shard for each master."""
        self._parts: list[tuple[torch.Tensor, int, slice]] = []
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": decay} for decay in (config.weight_decay, 0.0)
        ]
        for index, (master, stop) in enumerate(zip(masters, decay_stops, strict=True)):
            for group, part in zip(groups, (slice(0, stop), slice(stop, None)), strict=True):
                if master[part].numel():
                    self._parts.append((master[part], index, part))
                    group["params"].append(self._parts[-1][0])
        self._optimizer: Any = _build([group for group in groups if group["params"]], config)
        self.restore(0)

    def restore(self, steps: int) -> None:
        """Continue after `steps` updates. The moments have been filled in place."""
        # The optimizer gets our views as its state, so that it allocates no state itself.
        for part, index, where in self._parts:
            state = self._optimizer.state[part]
            device = part.device if self._implementation == "torch" else "cpu"
            state["step"] = torch.tensor(float(steps), device=device)
            for name in MOMENTS:
                state[name] = self.moments[name][index][where]
        for group in self._optimizer.param_groups:
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
        if self._implementation == "torch":
            self._optimizer.grad_scale, self._optimizer.found_inf = divisor.float(), skip.float()
        elif skip.item():
            return
        else:
            torch._foreach_div_(list(gradients), divisor.item())
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for part, index, where in self._parts:
            part.grad = gradients[index][where]
        self._optimizer.step()
        for part, _, _ in self._parts:
            part.grad = None

    @property
    def steps(self) -> int:
        """Number of updates made. Waits for the device."""
        if self._implementation == "apex":
            return int(self._optimizer.param_groups[0]["step"])
        return int(self._optimizer.state[self._parts[0][0]]["step"].item())


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
