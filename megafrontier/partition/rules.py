"""How the state of parameters is sharded, computed with, sent and updated, and when it moves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from megafrontier.comm.streams import Policy
from megafrontier.comm.wires.wire import Wires
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.partition.placement import Placement

GroupOf = Callable[[ParamSpec], tuple[str, int]]
"""The name of a parameter's optimizer, and the index of its group."""
Update = Literal["at_once", "overlapped", "on_host"]
"""When and where masters are updated: after backward; under the next forward, beside the products;
or there too, but on the host, which holds masters and states of the optimizer."""


@dataclass(frozen=True)
class StateRules:
    """How the state of some parameters is sharded, computed with, sent and updated."""

    placement: Placement
    wires: Wires
    """Formats of messages on each level."""
    dtype: torch.dtype = torch.float32
    """Computing type of weights and gradients. Masters are fp32."""
    error_feedback: bool = False
    """Add the quantization errors of gradient messages to those of the next step. They are kept for
    the levels between gradients and optimizer state; if there is none, for the levels that every
    micro-batch is reduced over."""
    update: Update = "at_once"
    """`overlapped` needs `UnitOptimizers`."""
    measures_norms: bool = False
    """Whether the norms of a gradient are computed as soon as it is complete."""

    @classmethod
    def plain(
        cls, placement: Placement, levels: Levels, dtype: torch.dtype = torch.float32
    ) -> "StateRules":
        """The rules of a placement whose messages have the computing type."""
        return cls(placement, Wires.plain(len(levels.sizes), dtype), dtype)

    def feedback_levels(self, levels: Levels) -> list[int]:
        """The levels whose gradient messages have error feedback: those of the placement with
        quantized messages. Ranks keep the errors of these."""
        if not self.error_feedback:
            return []
        return [
            level
            for level in self.placement.on(levels).error_feedback_levels
            if levels.sizes[level] > 1 and self.wires.reduce[level].codec.is_quantized
        ]

    @property
    def default(self) -> "StateRules":
        """As of `Rules`: the same for all parameters."""
        return self

    def of(self, spec: ParamSpec) -> "StateRules":
        """As of `Rules`: the same for all parameters."""
        return self


class Rules(Protocol):
    """The rules of each parameter. Those of a block with the same rules form a unit."""

    @property
    def default(self) -> StateRules:
        """Those of parameters that no split cuts."""
        ...

    def of(self, spec: ParamSpec) -> StateRules:
        """Those of one parameter."""
        ...


class Overlap(NamedTuple):
    """When weights and gradients move beside the computation."""

    policy: Policy = "safe"
    """`none`; `safe`: one collective in flight; `full`: one on each level."""
    prefetch: int = 1
    """Units gathered ahead of the one that runs. None with the policy `none`."""
    check_order: bool = False
    """Compare the ranks' next operation before each collective, one level at a time. It is slow,
    and finds ranks that run different blocks."""
