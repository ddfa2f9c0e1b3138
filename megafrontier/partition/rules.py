"""How the parameters of a model become units: what says where their state lies."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.partition.placement import Placement, error_levels
from megafrontier.partition.wires.wire import Wires

GroupOf = Callable[[ParamSpec], tuple[str, int]]
"""The name of a parameter's optimizer, and the index of its group."""


@dataclass(frozen=True)
class UnitRules:
    """How the state of some parameters is sharded, computed with and sent."""

    hierarchy: Hierarchy
    placement: Placement
    wires: Wires
    dtype: torch.dtype
    error_feedback: bool = False
    is_offloaded: bool = False
    """Whether the optimizer's state lies on the host."""

    @property
    def feedback_levels(self) -> list[int]:
        """The levels whose gradient messages have error feedback."""
        if not self.error_feedback:
            return []
        return error_levels(self.placement, self.hierarchy.levels, self.wires)
