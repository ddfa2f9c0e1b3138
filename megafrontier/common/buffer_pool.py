"""Buffers that are handed out and come back."""

from collections import defaultdict

import torch


class BufferPool:
    """Buffers by type and size; of each as many are made as are out at a time."""

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        """`pinned`: of a host, and locked in its memory, for copies beside the computation."""
        self._device, self._pinned = device, pinned
        self._free: defaultdict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
        self.held_bytes = 0
        """Bytes of all buffers made so far."""

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer [numel] with anything in it."""
        free = self._free[dtype, numel]
        if free:
            return free.pop()
        self.held_bytes += numel * dtype.itemsize
        return empty(numel, dtype, self._device, self._pinned)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer [numel] back; what comes next waits for all that use it."""
        self._free[buffer.dtype, buffer.numel()].append(buffer)


def empty(
    numel: int, dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> torch.Tensor:
    """Memory that serves training, too, though an evaluation may be the first to ask."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
