"""What a rank holds beside its state, by formula: the buffers of units, and those of messages."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from megafrontier.parallel.hierarchy import Levels
from megafrontier.partition.comm.delta import delta_levels
from megafrontier.partition.comm.streams import Policy
from megafrontier.partition.placement import Placement
from megafrontier.partition.wires.wire import Wire, Wires

Need = tuple[int, str, int]
"""(level, purpose, bytes) of `Workspace` that a crossing takes."""


def unit_buffer_bytes(
    numels: Sequence[int], root: int, placement: Placement, itemsize: int, prefetch: int | None
) -> int:
    """Bytes of all buffers of a rank's pool (`pool.py`) after a step of several micro-batches.

    `numels` are the elements of the units that take turns, in the order in which they run, `root`
    those of the unit that does not (0: none); `prefetch` units are gathered ahead, None without
    overlap: whole weights of one more are there, and gradients of two more. The root's gradient is
    taken to come in the whole of a backward; where it comes last, and is as long as a block's, it
    has the buffer of one.
    """
    ahead = min(prefetch or 0, max(len(numels) + bool(root) - 1, 0))
    weights = gradients = 0
    if placement.backward_weights:
        turns = range(min(ahead + 1, len(numels)))
        weights = root + sum(max(numels[first :: ahead + 1]) for first in turns)
    if placement.gradients:
        waiting = 1 if prefetch is None else ahead + 2
        sizes = Counter(numels)
        gradients = root + sum(numel * min(count, waiting) for numel, count in sizes.items())
    return (weights + gradients) * itemsize


@dataclass(frozen=True)
class MessageBuffers:
    """Where the messages of all levels stand, by formula: those of one crossing at a time on each
    lane (`Workspace`), and those of changes on their way from one level to the next (`BufferPool`).

    `placement` is `Placement.on` the levels, `dtype` the computing type.
    """

    placement: Placement
    levels: Levels
    wires: Wires
    dtype: torch.dtype
    policy: Policy
    prefetch: int

    def held_bytes(self, numels: Sequence[int]) -> int:
        """Bytes after a step of units of so many elements, in the order in which they run."""
        largest: dict[tuple[int, str], int] = {}
        for level, purpose, size in self._needs(max(numels)):
            key = (level if self.policy == "full" else 0), purpose
            largest[key] = max(largest.get(key, 0), size)
        return sum(largest.values()) + self._passed_on(numels)

    def _needs(self, numel: int) -> Iterator[Need]:
        """Of all crossings of a unit of `numel` elements."""
        placement, changes = self.placement, self._changes
        yield from self._difference(numel, changes)
        dtype = self.dtype if placement.gradients else torch.float32
        for level, size in enumerate(self.levels.sizes):
            if size == 1:
                continue
            piece = numel // prod(self.levels.sizes[: level + 1])
            if level < placement.optimizer and level not in changes:
                yield from self._gather(level, self.wires.gather[level], piece, self.dtype)
            yield from self._reduce(level, piece, dtype)
            dtype = torch.float32
            if level >= placement.optimizer:  # the sum comes back
                yield from self._gather(level, self.wires.reduce[level], piece, dtype)

    @property
    def _changes(self) -> list[int]:
        start, stop = self.placement.optimizer, self.placement.backward_weights
        return delta_levels(self.wires, self.levels.sizes, start, stop)

    def _difference(self, numel: int, changes: Sequence[int]) -> Iterator[Need]:
        own = numel // prod(self.levels.sizes[: self.placement.optimizer])
        came_by: Wire | None = None
        for level in reversed(changes):
            wire = self.wires.gather[level]
            rows = prod(self.levels.sizes[level + 1 : self.placement.optimizer])
            if came_by is None or came_by.codec != wire.codec:
                yield level, "change", 4 * own * rows
                yield level, "sent", wire.codec.message_bytes(own) * rows
            if came_by is None and self.dtype is not torch.float32:
                yield level, "rounded", own * self.dtype.itemsize
            if level == changes[0]:
                size = rows * self.levels.sizes[level]
                yield level, "received", wire.codec.message_bytes(own) * size
            came_by = wire

    def _gather(self, level: int, wire: Wire, piece: int, dtype: torch.dtype) -> Iterator[Need]:
        if wire.codec.dtype is not dtype:
            yield level, "sent", wire.codec.message_bytes(piece)
            yield level, "received", wire.codec.message_bytes(piece) * self.levels.sizes[level]

    def _reduce(self, level: int, piece: int, dtype: torch.dtype) -> Iterator[Need]:
        wire, size = self.wires.reduce[level], self.levels.sizes[level]
        rows = size - wire.codec.is_quantized
        yield level, "received", wire.codec.message_bytes(piece) * rows
        if wire.codec.dtype is not dtype:
            yield level, "sent", wire.codec.message_bytes(piece) * rows
        if wire.codec.is_quantized and dtype is not torch.float32:
            yield level, "own", piece * dtype.itemsize

    def _passed_on(self, numels: Sequence[int]) -> int:
        """Of as many units of each size as are published at a time."""
        window = {"none": 1, "safe": self.prefetch + 1, "full": 2 * self.prefetch + 2}[self.policy]
        most: Counter[int] = Counter()
        for first in range(len(numels)):
            most |= Counter(numels[first : first + window])
        sizes, whole = self.levels.sizes, self.placement.optimizer
        owners = prod(sizes[:whole])
        return sum(
            count
            * self.wires.gather[level].codec.message_bytes(numel // owners)
            * prod(sizes[level:whole])
            for numel, count in most.items()
            for level in self._changes[1:]
        )
