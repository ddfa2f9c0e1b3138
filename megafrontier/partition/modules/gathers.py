"""How often a step gathers each unit, by the hooks' rules, and the bytes that follow from it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megafrontier.comm.wires.wire import Wires
from megafrontier.partition.memory import UnitBuffer
from megafrontier.partition.modules.hook_points import BlockPart, HookPoint
from megafrontier.partition.placement import traffic_bytes
from megafrontier.partition.unit import Unit


class Pass(NamedTuple):
    """One forward or backward of a part of the model, by the part's number."""

    part: int
    is_forward: bool


def plain_passes(micro_batches: int) -> list[Pass]:
    """Those of a step of a whole model: a forward and a backward for each micro-batch."""
    return [Pass(0, is_forward) for _ in range(micro_batches) for is_forward in (True, False)]


def count_gathers(parts: Sequence[BlockPart], passes: Iterable[Pass]) -> Counter[Unit]:
    """How often a step of these passes gathers each unit: whenever a unit runs or is prefetched and
    is not unsharded."""
    replay = _Replay()
    for number, is_forward in passes:
        part = parts[number]
        order = part.forward if is_forward else part.backward
        kept = part.kept_after_forward if is_forward else part.kept_after_backward
        for point in order:
            if point.is_root and not is_forward:  # it runs around the others
                continue
            for other in (point, *part.after(point, not is_forward)):
                replay.unshard(other)
            if point not in kept:
                replay.reshard(point)
    return replay.gathers


def sum_traffic(
    units: Sequence[Unit],
    parts: Sequence[BlockPart],
    passes: Iterable[Pass],
    micro_batches: int,
    wires: Wires | None,
) -> list[int]:
    """Bytes of the units' weights and gradients that a rank sends over each of the machine's levels
    in a step of these passes, with the units' wires or with `wires`."""
    gathers = count_gathers(parts, passes)
    totals = [0] * units[0].hierarchy.machine_levels
    for unit in units:
        over, sent = unit.hierarchy, wires or unit.wires
        if wires is not None and over.crossed is not None:
            sent = wires.extended(over.crossed)
        numel, placement, count = unit.layout.numel, unit.placement, gathers[unit]
        found = traffic_bytes(numel, placement, over.levels, sent, micro_batches, count)
        for level, number in enumerate(found):
            totals[over.machine_level(level)] += number
    return totals


class _Replay:
    """Which units are unsharded, and whose buffer each is."""

    def __init__(self) -> None:
        self.gathers: Counter[Unit] = Counter()
        self._owners: dict[UnitBuffer, Unit] = {}
        self._unsharded: set[Unit] = set()

    def unshard(self, point: HookPoint) -> None:
        for unit in point.units:
            if unit in self._unsharded:
                continue
            self.gathers[unit] += 1
            self._unsharded.add(unit)
            if not unit.is_persistent:
                before = self._owners.get(unit.buffer)
                if before is not None and before is not unit:
                    self._unsharded.discard(before)
                self._owners[unit.buffer] = unit

    def reshard(self, point: HookPoint) -> None:
        self._unsharded.difference_update(point.units)
