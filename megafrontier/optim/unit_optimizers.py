"""The optimizers of an engine's units, by the configuration's groups."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from megafrontier.common.async_copy import AsyncHostCopy
from megafrontier.config import OptimizerConfig
from megafrontier.optim.adamw import ShardedAdamW
from megafrontier.optim.groups import EMA, STATES, OptimizerGroups
from megafrontier.optim.muon import ShardedMuon
from megafrontier.optim.sgd import ShardedSGD
from megafrontier.optim.sharded import Slice, merge_slices
from megafrontier.optim.subspace import ShardedSubspace
from megafrontier.partition.comm.collectives import LevelCollectives
from megafrontier.partition.comm.streams import DONE, Stream, make_stream
from megafrontier.partition.offload import HostShard
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

    Offloaded units are updated one by one in a thread (Note [An offloaded step]).

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
        self._hosts = {i: unit.host for i, unit in enumerate(units) if unit.host is not None}
        self._thread: Stream | None = None
        if self._hosts:
            self._thread = make_stream("update", next(iter(self._hosts.values())).memory)
        for name, indices in _divided(units):
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
            if indices[0] not in self._hosts:
                optimizer.step([gradients[i] for i in indices], lr, divisor, skip)
                self._update_averages(indices, skip)
        if self._thread is not None:
            self._start_updates(self._thread, gradients, lr, divisor, skip)

    def _update_averages(self, indices: Iterable[int], skip: torch.Tensor) -> None:
        if self._average:
            share = ((1 - self._ema_decay) * (1 - skip)).float()
            for i in indices:
                self._average[i].lerp_(self._masters[i], share)

    def _start_updates(
        self,
        thread: Stream,
        gradients: Sequence[torch.Tensor],
        lr: float,
        divisor: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """Hand the updates of offloaded units to the thread, first unit first."""
        # It is on the host after the gradients.
        numbers = AsyncHostCopy({"divisor": divisor.double(), "skip": skip.double()})
        for optimizer, (i, *_) in self._parts:
            if (host := self._hosts.get(i)) is not None:
                task = partial(self._update_on_host, optimizer, i, host, gradients[i], lr, numbers)
                host.update = thread.run(task, DONE)

    def _update_on_host(
        self,
        optimizer: UnitOptimizer,
        index: int,
        host: HostShard,
        gradient: torch.Tensor,
        lr: float,
        numbers: AsyncHostCopy,
    ) -> None:
        divisor, skip = numbers.wait()
        optimizer.step([gradient], lr, divisor, skip)
        self._update_averages([index], skip)
        host.round()

    @property
    def _counting(self) -> list[ShardedAdamW | ShardedSubspace]:
        counting = ShardedAdamW | ShardedSubspace
        return [part for part, _ in self._parts if isinstance(part, counting)]

    @property
    def steps(self) -> int:
        """Number of updates, which AdamW's bias correction needs; 0 without AdamW. Waits for
        the device, and for updates on the host."""
        for host in self._hosts.values():
            host.update.wait()
        return max((optimizer.steps for optimizer in self._counting), default=0)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """States of other shapes than the parameters', by name."""
        found: dict[str, torch.Tensor] = {}
        for optimizer, _ in self._parts:
            if isinstance(optimizer, ShardedSubspace):
                found |= optimizer.buffers
        return found

    def restore(self, steps: int, has_average: bool = False) -> None:
        """Continue after `steps` updates. The `states` have been filled in place, the average only
        if `has_average`: otherwise it begins with the weights that there are."""
        self._is_averaging = has_average
        for optimizer in self._counting:
            optimizer.restore(steps)


def _divided(units: Sequence[Unit]) -> list[tuple[str, list[int]]]:
    """The units by the name of their optimizer, and offloaded ones each by itself."""
    found: dict[tuple[str, int | None], list[int]] = {}
    for i, unit in enumerate(units):
        key = unit.optimizer, None if unit.host is None else i
        found.setdefault(key, []).append(i)
    return [(name, indices) for (name, _), indices in found.items()]


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
    of = {parameter: groups.groups[number] for parameter, number in groups.numbers.items()}
    if name == "muon":
        return ShardedMuon(units, of, tensor)
    if name == "lsp":
        return ShardedSubspace(units, of, config.subspace)
    masters, common = [unit.master for unit in units], ("lr_scale", "weight_decay")
    if name == "sgd":
        return ShardedSGD(masters, _param_groups(units, groups, *common, "momentum"))
    params = _param_groups(units, groups, *common, "betas", "eps")
    return ShardedAdamW(masters, params, config.fused)
