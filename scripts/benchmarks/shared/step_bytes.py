"""The bytes of weights and gradients that a step sends, by formula: what counts are compared with.

How often a step gathers each unit follows from the hooks' rules, which are replayed here.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megafrontier.comm.wires.wire import Wires
from megafrontier.partition import Engine
from megafrontier.partition.memory import UnitBuffer
from megafrontier.partition.modules.hook_points import BlockPart, HookPoint
from megafrontier.partition.unit import Unit
from megafrontier.planner.estimate import state_bytes


class Pass(NamedTuple):
    """One forward or backward of a part of the model, by the part's number."""

    part: int
    is_forward: bool


def step_bytes(
    engine: Engine,
    micro_batches: int,
    wires: Wires | None = None,
    passes: Iterable[Pass] | None = None,
) -> list[int]:
    """Bytes of weights and gradients that a rank sends over each level of the machine in an
    optimizer step, with the units' wires or with `wires`.

    passes: the forwards and backwards of the parts of the model, in their order; default: a
        forward and a backward of all for each micro-batch.
    """
    passes = passes or [Pass(0, True), Pass(0, False)] * micro_batches
    gathers = _count_gathers(engine._hooks.parts, passes)
    totals = [0] * engine.units[0].hierarchy.machine_levels
    for unit in engine.units:
        over, sent = unit.hierarchy, wires or unit.wires
        if wires is not None and over.crossed is not None:
            sent = wires.extended(over.crossed)
        numel, placement, count = unit.layout.numel, unit.placement, gathers[unit]
        found = state_bytes(numel, placement, over.levels, sent, micro_batches, count)
        for level, number in enumerate(found):
            totals[over.machine_level(level)] += number
    return totals


def _count_gathers(parts: Sequence[BlockPart], passes: Iterable[Pass]) -> Counter[Unit]:
    """How often a step of these passes gathers each unit: whenever a unit runs or is prefetched and
    is not unsharded."""
    gathers: Counter[Unit] = Counter()
    owners: dict[UnitBuffer, Unit] = {}
    unsharded: set[Unit] = set()

    def unshard(point: HookPoint) -> None:
        for unit in point.units:
            if unit in unsharded:
                continue
            gathers[unit] += 1
            unsharded.add(unit)
            if not unit.is_persistent:
                before = owners.get(unit.buffer)
                if before is not None and before is not unit:
                    unsharded.discard(before)
                owners[unit.buffer] = unit

    for number, is_forward in passes:
        part = parts[number]
        kept = part.kept_after_forward if is_forward else part.kept_after_backward
        for point in part.forward if is_forward else part.backward:
            if point.is_root and not is_forward:  # it runs around the others
                continue
            for other in (point, *part.after(point, not is_forward)):
                unshard(other)
            if point not in kept:
                unsharded.difference_update(point.units)
    return gathers
