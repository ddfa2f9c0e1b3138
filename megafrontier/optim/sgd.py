"""SGD with momentum on flat fp32 shards, through torch's fused implementation."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megafrontier.optim.groups import STATES
from megafrontier.optim.sharded import ScaledOptimizer


class ShardedSGD(ScaledOptimizer):
    """torch's SGD with momentum over the engine's master shards. It adds weight decay to the
    gradient (no decoupling)."""

    def __init__(
        self, masters: Sequence[torch.Tensor], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """`groups`: as in `ShardedOptimizer`, with the other arguments of torch's SGD."""
        super().__init__(masters, groups, _build)
        self.flatten(*STATES["sgd"])  # a momentum of zeros begins as torch does


def _build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, fused=True)
