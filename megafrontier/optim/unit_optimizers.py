"""The optimizers of an engine's units, by the configuration's groups."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.comm.streams import DONE, Stream, make_stream
from megafrontier.common.async_copy import AsyncHostCopy
from megafrontier.config import OptimizerConfig
from megafrontier.optim.adamw import ShardedAdamW
from megafrontier.optim.groups import EMA, STATES, OptimizerGroups
from megafrontier.optim.muon import ShardedMuon
from megafrontier.optim.sgd import ShardedSGD
from megafrontier.optim.sharded import MasterSlice, merge_slices
from megafrontier.optim.subspace import ShardedSubspace
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
Flags = Callable[[], Iterable[torch.Tensor]]
"""The divisor [] and the flag `skip` [] of a step, where the masters are."""


class UnitOptimizers:
    """The optimizers of an engine's trained units.

    Overlapped and offloaded units are updated one by one on a stream of their own, in the order of
    the next forward: offloaded ones in a thread of the host (Note [An offloaded step]).

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
        self._late = {i: unit for i, unit in enumerate(units) if unit.is_late}
        self._stream: Stream | None = None
        if self._late:
            unit = next(iter(self._late.values()))
            memory = unit.master.device if unit.host is None else unit.host.memory
            self._stream = make_stream("update", memory, is_urgent=False)
        self._kept: tuple[torch.Tensor, ...] = ()
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
            if indices[0] not in self._late:
                optimizer.step([gradients[i] for i in indices], lr, divisor, skip)
                self._update_averages(indices, skip)
        if self._stream is not None:
            self._start_updates(self._stream, gradients, lr, divisor, skip)

    def _update_averages(self, indices: Iterable[int], skip: torch.Tensor) -> None:
        if self._average:
            share = ((1 - self._ema_decay) * (1 - skip)).float()
            for i in indices:
                self._average[i].lerp_(self._masters[i], share)

    def _start_updates(
        self,
        stream: Stream,
        gradients: Sequence[torch.Tensor],
        lr: float,
        divisor: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """Hand the updates of the late units to the stream, first unit first."""
        # Until the next step, because the stream reads them while this one goes on.
        self._kept = divisor, skip
        read: Flags = lambda: (divisor, skip)  # noqa: E731
        if any(unit.host for unit in self._late.values()):
            # On the host they arrive after the gradients.
            read = AsyncHostCopy({"divisor": divisor.double(), "skip": skip.double()}).wait
        for optimizer, (i, *_) in self._parts:
            if (unit := self._late.get(i)) is not None:
                task = partial(self._update_late, optimizer, i, unit.host, gradients[i], lr, read)
                unit.updating = stream.run(task, DONE)

    def _update_late(
        self,
        optimizer: UnitOptimizer,
        index: int,
        host: HostShard | None,
        gradient: torch.Tensor,
        lr: float,
        read: Flags,
    ) -> None:
        divisor, skip = read()
        optimizer.step([gradient], lr, divisor, skip)
        self._update_averages([index], skip)
        if host is not None:
            host.round()

    @property
    def _counting(self) -> list[ShardedAdamW | ShardedSubspace]:
        counting = ShardedAdamW | ShardedSubspace
        return [part for part, _ in self._parts if isinstance(part, counting)]

    @property
    def steps(self) -> int:
        """Number of updates, which AdamW's bias correction needs; 0 without AdamW. Waits for
        the device, and for late updates."""
        for unit in self._late.values():
            unit.updating.wait()
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
    """The units by the name of their optimizer, and late ones each by itself."""
    found: dict[tuple[str, int | None], list[int]] = {}
    for i, unit in enumerate(units):
        key = unit.optimizer, i if unit.is_late else None
        found.setdefault(key, []).append(i)
    return [(name, indices) for (name, _), indices in found.items()]


def group_slices(
    units: Sequence[Unit], groups: OptimizerGroups
) -> list[tuple[int, list[MasterSlice]]]:
    """(group, slices of this rank's masters) of each group that has any, in the order of the
    groups. Padding belongs to the group without weight decay."""
    found: dict[int, list[MasterSlice]] = {}
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
        return ShardedMuon(units, groups.by_name, tensor)
    if name == "lsp":
        return ShardedSubspace(units, groups.by_name, config.subspace)
    masters, common = [unit.master for unit in units], ("lr_scale", "weight_decay")
    if name == "sgd":
        return ShardedSGD(masters, _param_groups(units, groups, *common, "momentum"))
    params = _param_groups(units, groups, *common, "betas", "eps")
    return ShardedAdamW(masters, params, config.fused)
