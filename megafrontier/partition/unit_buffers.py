"""Memory that units use in turns: a fixed number of full buffers for weights and for gradients.

Note on places. Autograd may save views of a parameter (a transposed weight, say) in forward and
reads them in backward. So a unit is gathered into the same buffer each time, whichever unit was
there in between; units that are gathered at the same time have different ones.
"""

from functools import cached_property
from itertools import cycle
from typing import Protocol

import torch

from megafrontier.common.buffers import BufferPool, empty


class Owner(Protocol):
    """What uses a buffer for a while: a unit."""

    def reshard(self) -> None:
        """Let go of it: another one needs it now."""
        ...


class UnitBuffer:
    """Memory for the whole weights of one unit at a time, as large as the largest needs."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self.numel = 0
        self._owner: Owner | None = None

    def reserve(self, numel: int) -> None:
        """Say, before the first one uses it, that a unit of `numel` elements will."""
        self.numel = max(self.numel, numel)

    @cached_property
    def memory(self) -> torch.Tensor:
        """Elements [of the largest unit]."""
        return empty(self.numel, self._dtype, self._device)

    def acquire(self, owner: Owner) -> None:
        """Give the buffer to a unit. One that has been gathered into it, but runs later or goes on
        later (a block of several uses), is released, and gathered again when its turn comes."""
        if self._owner is not None and self._owner is not owner:
            self._owner.reshard()
        self._owner = owner


class UnitBufferPool:
    """The buffers of one model's units: of their whole weights, and of their full gradients."""

    def __init__(self, whole: int, dtype: torch.dtype, device: torch.device) -> None:
        """`whole` is how many units, each following on the one before, are whole at a time."""
        self.dtype = dtype
        self.device = device
        self._buffers = [UnitBuffer(dtype, device) for _ in range(whole)]
        self._shared = cycle(self._buffers[:])
        self._gradients = BufferPool(device)

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers for weights, and of those made so far for gradients."""
        weights = sum(buffer.numel for buffer in self._buffers)
        return weights * self.dtype.itemsize + self._gradients.held_bytes

    def next_buffer(self) -> UnitBuffer:
        """That of the next unit in the order in which they run."""
        return next(self._shared)

    def own_buffer(self) -> UnitBuffer:
        """One for a unit that shares with no other."""
        self._buffers.append(UnitBuffer(self.dtype, self.device))
        return self._buffers[-1]

    def acquire_gradient(self, numel: int) -> torch.Tensor:
        """A buffer [numel] with anything in it."""
        return self._gradients.acquire(numel, self.dtype)

    def release_gradient(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; the computation has waited for all that read it."""
        self._gradients.release(buffer)
