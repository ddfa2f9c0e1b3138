"""The memory that a rank holds beside its state: a pool of unit buffers, and formulas of its size.

Note [Fixed buffers]
In forward, autograd may save views of a parameter, such as a transposed weight, and read them in
backward. So a unit is always gathered into the same buffer, even if another unit used the buffer in
between. Units that are unsharded at the same time have different buffers.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from math import prod
from typing import Protocol

import torch

from megafrontier.comm.delta import delta_levels
from megafrontier.comm.streams import Policy
from megafrontier.comm.wires.wire import Wire, Wires
from megafrontier.common.buffers import BufferPool, empty
from megafrontier.parallel.hierarchy import Levels
from megafrontier.partition.placement import Placement


class BufferOwner(Protocol):
    """A unit that uses a buffer for a while."""

    def reshard(self) -> None:
        """Stop using the buffer, because another owner acquires it."""
        ...


class UnitBuffer:
    """Memory for the unsharded weights of one unit at a time, as large as the largest unit."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.numel = 0
        self._owner: BufferOwner | None = None

    def reserve(self, numel: int) -> None:
        """Make the buffer at least `numel` elements long. Call it before the first use."""
        self.numel = max(self.numel, numel)

    @cached_property
    def memory(self) -> torch.Tensor:
        """The buffer [numel]."""
        return empty(self.numel, self.dtype, self.device)

    def acquire(self, owner: BufferOwner) -> None:
        """Give the buffer to a unit, and reshard the unit that had it. The latter was prefetched
        too early, or its block runs again later, and it is gathered again then."""
        if self._owner is not None and self._owner is not owner:
            self._owner.reshard()
        self._owner = owner


class UnitBufferPool:
    """The buffers of one model's units, for unsharded weights and for full gradients."""

    def __init__(self, count: int, device: torch.device) -> None:
        """`count`: how many successive units are unsharded at the same time."""
        self.device = device
        self.gradients = BufferPool(device)
        """Full gradients."""
        # The allocator of an accelerator hands the memory of freed shards to activations. A CPU's
        # system would clear every page of new memory.
        self.shards = BufferPool(device, keeps=device.type == "cpu")
        """Gradient shards, from a unit's first backward in a step to its update."""
        self._count = count
        self._buffers: list[UnitBuffer] = []
        self._rings: dict[Hashable, Iterator[UnitBuffer]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers for weights, and of the buffers for full gradients made so far."""
        weights = sum(buffer.numel * buffer.dtype.itemsize for buffer in self._buffers)
        return weights + self.gradients.held_bytes

    def next_buffer(self, place: Hashable, dtype: torch.dtype) -> UnitBuffer:
        """The buffer of the next unit, in the order in which units run. Units at different places
        are unsharded at the same time, such as those of a block and of a block inside it."""
        if (place, dtype) not in self._rings:
            buffers = [UnitBuffer(dtype, self.device) for _ in range(self._count)]
            self._buffers += buffers
            self._rings[place, dtype] = cycle(buffers)
        return next(self._rings[place, dtype])

    def own_buffer(self, dtype: torch.dtype) -> UnitBuffer:
        """A buffer for a unit that shares with no other."""
        self._buffers.append(UnitBuffer(dtype, self.device))
        return self._buffers[-1]


def unit_buffer_bytes(
    numels: Sequence[int], root: int, placement: Placement, itemsize: int, prefetch: int | None
) -> int:
    """Bytes of a rank's `UnitBufferPool` after a step of several micro-batches.

    numels: elements of each block's unit, in the order in which they run.
    root: elements of the root unit, 0 if there is none. Its gradient is taken to be in use during
        all of backward. (If it comes last and is as long as a block's, it reuses that buffer.)
    prefetch: units gathered ahead, None without overlap. One more unit is unsharded than that, and
        two more full gradients exist.
    """
    ahead = min(prefetch or 0, max(len(numels) + bool(root) - 1, 0))
    weights = gradients = 0
    if not placement.is_persistent:
        buffers = range(min(ahead + 1, len(numels)))
        weights = root + sum(max(numels[first :: ahead + 1]) for first in buffers)
    if placement.gradients:
        waiting = 1 if prefetch is None else ahead + 2
        sizes = Counter(numels)
        gradients = root + sum(numel * min(count, waiting) for numel, count in sizes.items())
    return (weights + gradients) * itemsize


@dataclass(frozen=True)
class MessageBuffers:
    """Predicts the memory of messages: each stream's `Workspace`, and the `BufferPool` of deltas
    that are passed on to another level.

    `placement` is `Placement.on` the levels, `dtype` the computing type.
    """

    placement: Placement
    levels: Levels
    wires: Wires
    dtype: torch.dtype
    policy: Policy
    prefetch: int

    def held_bytes(self, numels: Sequence[int]) -> int:
        """Bytes after a step of units of `numels` elements, in the order in which they run."""
        largest: dict[tuple[int, str], int] = {}
        for level, purpose, size in self._workspaces(max(numels)):
            key = (level if self.policy == "full" else 0), purpose
            largest[key] = max(largest.get(key, 0), size)
        return sum(largest.values()) + self._passed_on(numels)

    def _workspaces(self, numel: int) -> Iterator[tuple[int, str, int]]:
        """(level, purpose, bytes) of all collectives of a unit of `numel` elements."""
        placement, deltas = self.placement, self._delta_levels
        yield from self._delta(numel, deltas)
        dtype = self.dtype if placement.gradients else torch.float32
        for level, size in enumerate(self.levels.sizes):
            if size == 1:
                continue
            shard = numel // prod(self.levels.sizes[: level + 1])
            if level < placement.optimizer and level not in deltas:
                yield from self._gather(level, self.wires.gather[level], shard, self.dtype)
            yield from self._reduce(level, shard, dtype)
            dtype = torch.float32
            if level >= placement.optimizer:  # the sum comes back to all replicas
                yield from self._gather(level, self.wires.reduce[level], shard, dtype)

    @property
    def _delta_levels(self) -> list[int]:
        start, stop = self.placement.optimizer, self.placement.backward_weights
        return delta_levels(self.wires, self.levels.sizes, start, stop)

    def _delta(self, numel: int, deltas: Sequence[int]) -> Iterator[tuple[int, str, int]]:
        own = numel // prod(self.levels.sizes[: self.placement.optimizer])
        previous: Wire | None = None
        for level in reversed(deltas):
            wire = self.wires.gather[level]
            rows = prod(self.levels.sizes[level + 1 : self.placement.optimizer])
            if previous is None or previous.codec != wire.codec:
                yield level, "change", 4 * own * rows
                yield level, "sent", wire.codec.message_bytes(own) * rows
            if previous is None and self.dtype is not torch.float32:
                yield level, "rounded", own * self.dtype.itemsize
            if level == deltas[0]:
                size = rows * self.levels.sizes[level]
                yield level, "received", wire.codec.message_bytes(own) * size
            previous = wire

    def _gather(
        self, level: int, wire: Wire, shard: int, dtype: torch.dtype
    ) -> Iterator[tuple[int, str, int]]:
        if not wire.codec.sends_unchanged(dtype):
            yield level, "sent", wire.codec.message_bytes(shard)
            yield level, "received", wire.codec.message_bytes(shard) * self.levels.sizes[level]

    def _reduce(self, level: int, shard: int, dtype: torch.dtype) -> Iterator[tuple[int, str, int]]:
        wire, size = self.wires.reduce[level], self.levels.sizes[level]
        rows = size - wire.codec.is_quantized
        yield level, "received", wire.codec.message_bytes(shard) * rows
        if not wire.codec.sends_unchanged(dtype):
            yield level, "sent", wire.codec.message_bytes(shard) * rows
        if wire.codec.is_quantized and dtype is not torch.float32:
            yield level, "own", shard * dtype.itemsize

    def _passed_on(self, numels: Sequence[int]) -> int:
        """For each size of unit, as many buffers as units of that size are published at a time."""
        window = {"none": 1, "safe": self.prefetch + 1, "full": 2 * self.prefetch + 2}[self.policy]
        most: Counter[int] = Counter()
        for first in range(len(numels)):
            most |= Counter(numels[first : first + window])
        sizes, depth = self.levels.sizes, self.placement.optimizer
        owners = prod(sizes[:depth])
        return sum(
            count
            * self.wires.gather[level].codec.message_bytes(numel // owners)
            * prod(sizes[level:depth])
            for numel, count in most.items()
            for level in self._delta_levels[1:]
        )
