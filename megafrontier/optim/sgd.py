"""SGD with momentum on flat fp32 shards, through torch's fused implementation."""

from typing import Any

import torch

from megafrontier.optim.base import ElementwiseOptimizer


class ShardedSGD(ElementwiseOptimizer):
    """torch's SGD with momentum over the engine's master shards. It adds weight decay to the
    gradient (no decoupling). A momentum of zeros begins as torch does."""

    name = "sgd"
    options = ("momentum",)
    state_names = ("momentum_buffer",)

    @staticmethod
    def build(groups: list[dict[str, Any]], implementation: str) -> torch.optim.Optimizer:
        """torch's, always fused."""
        return torch.optim.SGD(groups, fused=True)
