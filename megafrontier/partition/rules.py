"""How the parameters of a model become units: what says where their state lies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megafrontier.comm.wires.wire import Wires
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.partition.placement import Placement, error_levels

GroupOf = Callable[[ParamSpec], tuple[str, int]]
"""The name of a parameter's optimizer, and the index of its group."""
Update = Literal["at_once", "overlapped", "on_host"]
"""When and where masters are updated: after backward; under the next forward, beside the products;
or there too, but on the host, which holds masters and states of the optimizer."""


@dataclass(frozen=True)
class UnitRules:
    """How the state of some parameters is sharded, computed with and sent."""

    hierarchy: Hierarchy
    placement: Placement
    wires: Wires
    dtype: torch.dtype
    error_feedback: bool = False
    update: Update = "at_once"
    measures_norms: bool = False
    """Whether the norms of a gradient are computed as soon as it is complete."""

    @property
    def feedback_levels(self) -> list[int]:
        """The levels whose gradient messages have error feedback."""
        if not self.error_feedback:
            return []
        return error_levels(self.placement, self.hierarchy.levels, self.wires)
