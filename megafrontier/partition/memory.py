"""The memory that a rank holds besides its state: a pool of unit buffers.

Note [Fixed buffers]
In forward, autograd may save views of a parameter, such as a transposed weight, and read them in
backward. So a unit is always gathered into the same buffer, even if another unit used the buffer in
between. Units that are unsharded at the same time have different buffers.
"""

from collections.abc import Hashable, Iterator
from functools import cached_property
from itertools import cycle
from typing import Protocol

import torch

from megafrontier.common.buffers import BufferPool, empty


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
