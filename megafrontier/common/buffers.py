"""Buffers that are used again in every step, so that training allocates nothing after the first."""

from collections import defaultdict
from math import prod

import torch


class BufferPool:
    """Buffers by type and size. A new one is made only if all of that kind are in use."""

    def __init__(self, device: torch.device, pinned: bool = False, keeps: bool = True) -> None:
        """`pinned`: page-locked host memory, for copies that run beside the computation. `keeps`:
        a released buffer is kept for the next use; otherwise it is freed."""
        self._device, self._pinned, self.keeps = device, pinned, keeps
        self._free: defaultdict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
        self.held_bytes = 0
        """Bytes of all buffers made so far and not freed."""

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer [numel] with undefined contents."""
        free = self._free[dtype, numel]
        if free:
            return free.pop()
        self.held_bytes += numel * dtype.itemsize
        return empty(numel, dtype, self._device, self._pinned)

    def release(self, buffer: torch.Tensor) -> None:
        """Return a buffer [numel]. The next user must run after everything that still reads it."""
        if self.keeps:
            self._free[buffer.dtype, buffer.numel()].append(buffer)
        else:
            self.held_bytes -= buffer.nbytes


class Workspace:
    """Temporary memory of the tasks of one stream: one buffer per purpose, as large as needed.

    Tasks of a stream run one after another, so no task overwrites the data of another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in list(self._buffers.values()))

    def get(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with undefined contents, valid until the next call with the same purpose."""
        size = prod(shape) * dtype.itemsize
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.numel() < size:
            buffer = None
            # Free the old buffer first: both may not fit.
            self._buffers.pop(purpose, None)
            self._buffers[purpose] = buffer = empty(size, torch.uint8, self._device)
        return buffer[:size].view(dtype).view(shape)


def empty(
    numel: int, dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> torch.Tensor:
    """Uninitialised memory that autograd can use, even if the first caller is in inference mode."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
