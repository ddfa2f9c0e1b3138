"""The memory that a simulated rank would need."""

import weakref
from collections.abc import Callable, Iterable

import torch

ROUNDING = {True: 512, False: 64}
"""Bytes to which torch rounds the size of a block up, on an accelerator and on a CPU."""


class Memory:
    """Bytes of the tensors that are alive, and their peak."""

    def __init__(self, rounding: int) -> None:
        self.now = self.peak = 0
        self.gradients: Callable[[], int] = lambda: 0
        """Bytes of the gradient shards that are held now."""
        self.gradients_at_peak = 0
        self._rounding = rounding
        self.has_host_tensors = False
        self._alive: dict[int, int] = {}
        """Bytes by storage, 0 for those of the host."""

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of `tensors` that are new."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                size = -(-storage.nbytes() // self._rounding) * self._rounding
                self._alive[storage._cdata] = size
                weakref.finalize(storage, self._free, storage._cdata).atexit = False
                self.now += size
                if self.now > self.peak:
                    self.begin_peak()

    def begin_peak(self) -> None:
        """Take what is held now as the peak."""
        self.peak, self.gradients_at_peak = self.now, self.gradients()

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether `move_to_host` had the tensor's storage."""
        return self._alive.get(tensor.untyped_storage()._cdata) == 0

    def move_to_host(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count the storages of `tensors` no more. Returns their bytes."""
        moved = 0
        for tensor in tensors:
            self.add([tensor])
            key = tensor.untyped_storage()._cdata
            moved += self._alive[key]
            self.now -= self._alive[key]
            self._alive[key] = 0
            self.has_host_tensors = True
        return moved

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is counted already."""
        return tensor.untyped_storage()._cdata in self._alive
