"""The memory that a simulated rank would need."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

ROUNDING = {True: 512, False: 64}
"""Bytes to which torch rounds the size of a block up, on an accelerator and on a CPU."""


FEW = 2
"""Gradient shards: fewer than the units of the shallow models that a deep one is predicted from."""


class Peak(NamedTuple):
    """Bytes of all tensors, and of the gradient shards among them."""

    bytes: int = 0
    gradients: int = 0


class Memory:
    """Bytes of the tensors that are alive, and their peaks.

    peaks: while at most `FEW` gradient shards are held, and while more are. In backward,
        activations become fewer and gradients more, so the peak is near its begin or its end. Both
        grow by as much with each block.
    """

    def __init__(self, rounding: int) -> None:
        self.now = 0
        self.peaks = [Peak(), Peak()]
        self.gradients: Callable[[], Sequence[int]] = lambda: ()
        """Bytes of each gradient shard that is held now."""
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
                if self.now > min(self.peaks).bytes:
                    self._note()

    def restart(self) -> None:
        """Forget the peaks before now."""
        self.peaks = [Peak(), Peak()]
        self._note()

    def _note(self) -> None:
        shards = self.gradients()
        which = len(shards) > FEW
        self.peaks[which] = max(self.peaks[which], Peak(self.now, sum(shards)))

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
