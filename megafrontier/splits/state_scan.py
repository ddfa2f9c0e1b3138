"""The states before parts of documents, by a scan of affine maps, one level after the other.

A part of a document is an affine map of the state before it (`kernels.delta`). Parts that follow
each other are one map. On each level the ranks of a group exchange the maps of what they have, and
then have those of the whole group: first in a pair, then in a node, then over all nodes. Under
`documents.assign` a group has at most two such maps of a document that is cut into two parts for
each rank. So the bytes over a level depend neither on the length of a sequence nor on the number of
ranks inside the groups.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megafrontier.model.kernels.delta import Maps
from megafrontier.splits.documents import DocumentPart, assign, ranks_in_line
from megafrontier.splits.tokens import TokenGroup


class PartRun(NamedTuple):
    """The parts [first, stop) of a document."""

    document: int
    first: int
    stop: int


class ScanStep(NamedTuple):
    """An exchange over one level: the maps of which each member sends `room`, the last ones unused,
    and which of them, by place among all, follow each other in the runs of the group."""

    room: int
    runs: tuple[tuple[int, ...], ...]
    own: tuple[tuple[int, int], ...]
    """Of each part of this rank: its run in the group, and its place in it."""


@lru_cache(maxsize=64)
def cut_documents(bounds: tuple[int, ...], size: int) -> dict[int, list[DocumentPart]]:
    """The parts of each document that has more than one, in order. Arguments as of `assign`."""
    found: dict[int, list[DocumentPart]] = defaultdict(list)
    for part in assign(bounds, size).parts:
        found[part.document].append(part)
    return {document: parts for document, parts in found.items() if len(parts) > 1}


@lru_cache(maxsize=64)
def plan_scan(
    bounds: tuple[int, ...], sizes: tuple[int, ...], index: int, backwards: bool
) -> tuple[ScanStep, ...]:
    """The steps of the rank with this index, of which the first one is its own. `sizes`: of the
    levels; the other arguments are as for `assign` and `Exchange.scan`."""
    line = ranks_in_line(sizes)
    held: dict[int, list[PartRun]] = {place: [] for place in range(len(line))}
    for document, parts in cut_documents(bounds, len(line)).items():
        for i, part in enumerate(parts):
            number = len(parts) - 1 - i if backwards else i
            held[part.rank].append(PartRun(document, number, number + 1))
    place = line.index(index)
    own, steps = held[place], []
    for size in (1, *sizes):
        room, place = max(map(len, held.values())), place // size
        groups = [range(first, first + size) for first in range(0, len(held), size)]
        steps.append(_step([held[member] for member in groups[place]], room, own))
        held = {
            number: [run for run, _ in _joined([held[member] for member in group], room)]
            for number, group in enumerate(groups)
        }
    return tuple(steps)


def _step(members: Sequence[Sequence[PartRun]], room: int, own: Sequence[PartRun]) -> ScanStep:
    """The exchange of the members of a group, which hold these runs. `own`: the parts of a rank."""
    joined, places = _joined(members, room), {}
    for number, (_, sources) in enumerate(joined):
        for place, source in enumerate(sources):
            document, first, stop = members[source // room][source % room]
            places.update({(document, part): (number, place) for part in range(first, stop)})
    runs = tuple(tuple(sources) for _, sources in joined)
    return ScanStep(room, runs, tuple(places[part.document, part.first] for part in own))


def _joined(members: Sequence[Sequence[PartRun]], room: int) -> list[tuple[PartRun, list[int]]]:
    """The longest runs of all that members hold, and the places of what they consist of: member
    times `room` and its own place."""
    items = sorted(
        (run, member * room + slot)
        for member, runs in enumerate(members)
        for slot, run in enumerate(runs)
    )
    found: list[tuple[PartRun, list[int]]] = []
    for run, source in items:
        if found and found[-1][0].document == run.document and found[-1][0].stop == run.first:
            before, sources = found[-1]
            found[-1] = before._replace(stop=run.stop), [*sources, source]
        else:
            found.append((run, [source]))
    return found


def scan_states(group: TokenGroup, maps: Maps, bounds: tuple[int, ...], backwards: bool) -> Tensor:
    """`Exchange.scan` over the ranks of a group."""
    own, *steps = plan_scan(bounds, group.levels, group.index, backwards)
    before: list[Maps | None] = [None] * len(own.own)
    sources = [Maps(*(part[i] for part in maps)) for i in range(len(own.own))]
    runs = _advance(own, sources, before)
    for level, step in enumerate(steps):
        if group.levels[level] > 1:
            runs = _advance(step, _exchanged(group, level, step.room, runs, maps), before)
    zero = maps.summand.new_zeros(maps.summand.shape[1:])
    states = [zero if found is None else found.summand for found in before]
    return torch.stack(states) if states else zero[None][:0]


def _advance(step: ScanStep, sources: list[Maps], before: list[Maps | None]) -> list[Maps]:
    """The maps of the runs of a step. Adds to `before`, for each part of this rank, the maps that
    precede it in its run."""
    found = [
        [*accumulate((sources[i] for i in run), lambda first, second: second.after(first))]
        for run in step.runs
    ]
    for number, (run, place) in enumerate(step.own):
        if place:
            inner, earlier = before[number], found[run][place - 1]
            before[number] = earlier if inner is None else inner.after(earlier)
    return [maps[-1] for maps in found]


def _exchanged(
    group: TokenGroup, level: int, room: int, runs: list[Maps], like: Maps
) -> list[Maps]:
    """The maps of all members of a level's group. Ranks inside a member have the same maps: each
    sends a part of them over the level, and they gather the parts inside."""
    width = like.factor.shape[-1]
    inner, size = prod(group.levels[:level]), group.levels[level]
    shape = room, *like.summand.shape[1:-1], width + like.summand.shape[-1]
    count = prod(shape)
    sent = like.summand.new_zeros(-(-count // inner) * inner)
    for slot, maps in zip(sent[:count].view(shape), runs, strict=False):
        slot.copy_(torch.cat(maps, -1))
    # In the order of `gather_level`, the ranks of a member are those with the same first numbers.
    own = group.index // prod(group.levels[level:])
    parts = group.gather_level(sent.view(inner, -1)[own], level)
    whole = parts.view(inner, size, -1).transpose(0, 1).reshape(size, -1)[:, :count]
    slots = whole.reshape(size * room, *shape[1:])
    return [Maps(one[..., :width], one[..., width:]) for one in slots]
