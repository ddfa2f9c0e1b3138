"""The optimizers of an engine's units, by the configuration's groups."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.comm.streams import DONE, Stream, make_stream
from megafrontier.common.async_copy import AsyncHostCopy
from megafrontier.optim.base import FlatShards, UnitOptimizer
from megafrontier.optim.groups import EMA, OPTIMIZERS, OptimizerGroups
from megafrontier.partition.unit import Unit

UnitStates = dict[str, list[torch.Tensor | None]]


Elementwise = Callable[[type[UnitOptimizer], Sequence[torch.Tensor]], UnitOptimizer]
"""Makes what stands in for an optimizer of these masters."""
StepValues = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The divisor [] and the flag `skip` [] of a step, and the values for `Correct`."""
Correct = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Changes a unit's master in place after its update: (number of the unit, master, values)."""
Observe = Callable[[Sequence[int], Sequence[torch.Tensor]], None]
"""Is given the numbers of some units, and for each what its master has lost by an update."""


class UnitOptimizers:
    """The optimizers of an engine's trained units.

    Overlapped and offloaded units are updated one by one on a stream of their own, in the order of
    the next forward: offloaded ones in a thread of the host (Note [An offloaded step]). Units of an
    optimizer that may not update late are updated at once, offloaded ones by the calling thread.

    states: by torch's names, for each unit this rank's 1-D shard, or None if the unit's optimizer
        has no such state. `ema` is the average of the weights.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: OptimizerGroups,
        tensor: LevelCollectives | None = None,
        elementwise: Elementwise | None = None,
    ) -> None:
        """`tensor`: collectives over the ranks of a tensor split. `elementwise` takes the place of
        all optimizers that do not need whole matrices."""
        self._parts: list[tuple[UnitOptimizer, list[int]]] = []
        self.states: UnitStates = {}
        self._hosts = [unit.host for unit in units]
        self._late = {
            i: unit
            for i, unit in enumerate(units)
            if unit.is_late and OPTIMIZERS[unit.optimizer].may_update_late
        }
        self._stream: Stream | None = None
        if self._late:
            unit = next(iter(self._late.values()))
            memory = unit.master.device if unit.host is None else unit.host.memory
            self._stream = make_stream("update", memory, is_urgent=False)
        self._kept: tuple[torch.Tensor, ...] = ()
        self.correct: Correct | None = None
        """Called after each update of a unit, where and when it happens."""
        self.corrections: torch.Tensor | None = None
        """What `correct` gets in the next `step`, fp64. In a step that is skipped it gets ones."""
        self.observe: Observe | None = None
        """Called with the updates of the next `step`, where and when they happen. It costs a copy
        of the masters of the units that are updated at the same time."""
        for name, indices in _divided(units, self._late):
            members, kind = [units[i] for i in indices], OPTIMIZERS[name]
            if elementwise is None or kind.needs_whole_matrices:
                optimizer = kind.make(members, groups, tensor)
            else:
                optimizer = elementwise(kind, [unit.master for unit in members])
            self._parts.append((optimizer, indices))
            for state, held in optimizer.states.items():
                shards = self.states.setdefault(state, [None] * len(units))
                for i, shard in zip(indices, held, strict=True):
                    shards[i] = shard
        self._masters, self._ema_decay = [unit.master for unit in units], groups.config.ema
        self._average: list[torch.Tensor] = []
        self._is_averaging = False
        if groups.config.ema:
            self._average = [torch.zeros_like(master) for master in self._masters]
            self.states[EMA] = [*self._average]

    def step(
        self,
        gradients: FlatShards,
        lr: float,
        divisor: torch.Tensor,
        skip: torch.Tensor,
        decay_factor: float = 1.0,
    ) -> None:
        """`UnitOptimizer.step` of all units. `lr`: that of the schedule; a group's is its
        `lr_scale` times that. `decay_factor`: multiplies the groups' weight decay."""
        if not self._is_averaging:
            # Only now do the masters have their values: initial ones, or of a checkpoint.
            for average, master in zip(self._average, self._masters, strict=False):
                average.copy_(master)
            self._is_averaging = True
        corrections = skip.new_ones(0)
        if self.corrections is not None:
            corrections = torch.where(skip > 0, 1.0, self.corrections)
        values = divisor, skip, corrections
        read: Callable[[], StepValues] = lambda: values  # noqa: E731
        if any(self._hosts):
            # On the host they arrive after the gradients.
            names = ("divisor", "skip", "corrections")
            copied = {name: value.double() for name, value in zip(names, values, strict=True)}
            read = partial(_on_host, AsyncHostCopy(copied), values[2].shape)
        for optimizer, indices in self._parts:
            optimizer.decay_factor = decay_factor
            if indices[0] not in self._late:
                step = partial(optimizer.step, [gradients[i] for i in indices], lr)
                is_on_host = self._hosts[indices[0]] is not None
                self._update(step, indices, read() if is_on_host else values, self.observe)
        if self._stream is not None:
            # Until the next step, because the stream reads them while this one goes on.
            self._kept = values
            self._start_updates(self._stream, gradients, lr, read)

    def _update(
        self,
        step: Callable[[torch.Tensor, torch.Tensor], None],
        indices: Sequence[int],
        values: StepValues,
        observe: Observe | None,
    ) -> None:
        before = [self._masters[i].clone() for i in indices] if observe else []
        divisor, skip, corrections = values
        step(divisor, skip)
        if self.correct is not None:
            for i in indices:
                self.correct(i, self._masters[i], corrections)
        if observe:
            after = [self._masters[i] for i in indices]
            observe(indices, [old.sub_(new) for old, new in zip(before, after, strict=True)])
        self._update_averages(indices, skip)
        for i in indices:
            if (host := self._hosts[i]) is not None:
                host.round()

    def _update_averages(self, indices: Iterable[int], skip: torch.Tensor) -> None:
        if self._average:
            share = ((1 - self._ema_decay) * (1 - skip)).float()
            for i in indices:
                self._average[i].lerp_(self._masters[i], share)

    def _start_updates(
        self,
        stream: Stream,
        gradients: FlatShards,
        lr: float,
        read: Callable[[], StepValues],
    ) -> None:
        """Hand the updates of the late units to the stream, first unit first."""
        for optimizer, (i, *_) in self._parts:
            if (unit := self._late.get(i)) is not None:
                step = partial(optimizer.step, [gradients[i]], lr)
                task = partial(self._update_late, step, i, read, self.observe)
                unit.updating = stream.run(task, DONE)

    def _update_late(
        self,
        step: Callable[..., None],
        index: int,
        read: Callable[[], StepValues],
        observe: Observe | None,
    ) -> None:
        self._update(step, [index], read(), observe)

    @property
    def steps(self) -> int:
        """Number of updates, which AdamW's bias correction needs; 0 if no optimizer counts them.
        Waits for the device, and for late updates."""
        for unit in self._late.values():
            unit.updating.wait()
        return max((optimizer.steps for optimizer, _ in self._parts), default=0)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """States of other shapes than the parameters', by name."""
        return {k: v for optimizer, _ in self._parts for k, v in optimizer.buffers.items()}

    def restore(self, steps: int, has_average: bool = False) -> None:
        """Continue after `steps` updates. The `states` have been filled in place, the average only
        if `has_average`: otherwise it begins with the weights that there are."""
        self._is_averaging = has_average
        for optimizer, _ in self._parts:
            optimizer.restore(steps)


def _on_host(copy: AsyncHostCopy, shape: torch.Size) -> StepValues:
    divisor, skip, *_ = flat = copy.wait()
    return divisor, skip, flat[2:].view(shape)


def _divided(units: Sequence[Unit], late: Collection[int]) -> list[tuple[str, list[int]]]:
    """The units by the name of their optimizer, and late ones each by itself."""
    found: dict[tuple[str, int | None], list[int]] = {}
    for i, unit in enumerate(units):
        key = unit.optimizer, i if i in late else None
        found.setdefault(key, []).append(i)
    return [(name, indices) for (name, _), indices in found.items()]
