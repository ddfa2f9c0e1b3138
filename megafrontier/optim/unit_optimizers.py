"""The optimizers of an engine's units, by the configuration's groups."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megafrontier.config import OptimizerConfig
from megafrontier.optim.adamw import ShardedAdamW
from megafrontier.optim.groups import EMA, STATES, OptimizerGroups
from megafrontier.optim.muon import ShardedMuon
from megafrontier.optim.sgd import ShardedSGD
from megafrontier.optim.sharded import Slice, merge_slices
from megafrontier.partition.comm.collectives import LevelCollectives
from megafrontier.partition.unit import Unit

States = dict[str, list[torch.Tensor | None]]


class UnitOptimizer(Protocol):
    """Updates the masters of some units.

    states: by torch's names, one 1-D shard for each unit.
    """

    states: dict[str, list[torch.Tensor]]

    def step(
        self,
        gradients: Sequence[torch.Tensor],
        lr: float,
        divisor: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """Update the masters in place, or change nothing if `skip` [] is 1. The `gradients`, one
        1-D fp32 shard for each unit, are divided by `divisor` [] and overwritten."""
        ...


Elementwise = Callable[[str, Sequence[torch.Tensor]], UnitOptimizer]
"""Makes what updates single elements of masters, by the name of an optimizer."""


class UnitOptimizers:
    """The optimizers of an engine's trained units.

    states: by torch's names, for each unit this rank's 1-D shard, or None if the unit's optimizer
        has no such state. `ema` is the average of the weights.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: OptimizerGroups,
        config: OptimizerConfig,
        tensor: LevelCollectives | None = None,
        elementwise: Elementwise | None = None,
    ) -> None:
        """`tensor`: collectives over the ranks of a tensor split. Muon needs them. `elementwise`
        takes the place of AdamW and SGD."""
        self._parts: list[tuple[UnitOptimizer, list[int]]] = []
        self.states: States = {}
        for name in dict.fromkeys(unit.optimizer for unit in units):
            indices = [i for i, unit in enumerate(units) if unit.optimizer == name]
            own = [units[i] for i in indices]
            if elementwise is not None and name != "muon":
                optimizer = elementwise(name, [unit.master for unit in own])
            else:
                optimizer = _make(name, own, groups, config, tensor)
            self._parts.append((optimizer, indices))
            for state in STATES[name]:
                shards = self.states.setdefault(state, [None] * len(units))
                for i, shard in zip(indices, optimizer.states[state], strict=True):
                    shards[i] = shard
        self._masters, self._ema_decay = [unit.master for unit in units], config.ema
        self._average: list[torch.Tensor] = []
        self._is_averaging = False
        if config.ema:
            self._average = [torch.zeros_like(master) for master in self._masters]
            self.states[EMA] = [*self._average]

    def step(
        self,
        gradients: Sequence[torch.Tensor],
        lr: float,
        divisor: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """`UnitOptimizer.step` of all units. `lr`: that of the schedule; a group's is its
        `lr_scale` times that."""
        if not self._is_averaging:
            # Only now do the masters have their values: initial ones, or of a checkpoint.
            for average, master in zip(self._average, self._masters, strict=False):
                average.copy_(master)
            self._is_averaging = True
        for optimizer, indices in self._parts:
            optimizer.step([gradients[i] for i in indices], lr, divisor, skip)
        if self._average:
            share = ((1 - self._ema_decay) * (1 - skip)).float()
            for average, master in zip(self._average, self._masters, strict=True):
                average.lerp_(master, share)

    @property
    def _adamw(self) -> list[ShardedAdamW]:
        return [part for part, _ in self._parts if isinstance(part, ShardedAdamW)]

    @property
    def steps(self) -> int:
        """Number of AdamW's updates, which its bias correction needs; 0 without AdamW. Waits for
        the device."""
        return max((adamw.steps for adamw in self._adamw), default=0)

    def restore(self, steps: int, has_average: bool = False) -> None:
        """Continue after `steps` updates. The `states` have been filled in place, the average only
        if `has_average`: otherwise it begins with the weights that there are."""
        self._is_averaging = has_average
        for adamw in self._adamw:
            adamw.restore(steps)


def group_slices(units: Sequence[Unit], groups: OptimizerGroups) -> list[tuple[int, list[Slice]]]:
    """(group, slices of this rank's masters) of each group that has any, in the order of the
    groups. Padding belongs to the group without weight decay."""
    found: dict[int, list[Slice]] = {}
    for index, unit in enumerate(units):
        spans = [
            (e.offset, e.offset + e.numel, groups.numbers[unit.specs[e.name].name])
            for e in unit.layout.entries
        ]
        _, stop, last = spans[-1]
        spans.append((stop, unit.layout.numel, last | 1))
        for number, slices in merge_slices(spans, *unit.range).items():
            found.setdefault(number, []).extend((index, where) for where in slices)
    return sorted(found.items())


def _param_groups(
    units: Sequence[Unit], groups: OptimizerGroups, *keys: str
) -> list[dict[str, Any]]:
    """torch's param groups with these values, and slices of this rank's masters as parameters."""
    return [
        {"params": slices, **{key: getattr(groups.groups[number], key) for key in keys}}
        for number, slices in group_slices(units, groups)
    ]


def _make(
    name: str,
    units: Sequence[Unit],
    groups: OptimizerGroups,
    config: OptimizerConfig,
    tensor: LevelCollectives | None,
) -> UnitOptimizer:
    if name == "muon":
        of = {parameter: groups.groups[number] for parameter, number in groups.numbers.items()}
        return ShardedMuon(units, of, tensor)
    masters, common = [unit.master for unit in units], ("lr_scale", "weight_decay")
    if name == "sgd":
        return ShardedSGD(masters, _param_groups(units, groups, *common, "momentum"))
    params = _param_groups(units, groups, *common, "betas", "eps")
    return ShardedAdamW(masters, params, config.fused)
