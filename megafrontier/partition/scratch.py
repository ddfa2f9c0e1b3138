"""Memory that messages use in turns, the same in every step."""

from collections import defaultdict
from math import prod

import torch


class Scratch:
    """What one lane's tasks need for no longer than they run: one place for each purpose, as large
    as the largest task wants it.

    Tasks of a lane run one after another (on a device, on one stream), so none can find another's
    there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[str, torch.Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of all places."""
        return sum(place.numel() for place in list(self._places.values()))

    def take(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with anything in it, until the next task asks for the same purpose."""
        size = prod(shape) * dtype.itemsize
        place = self._places.get(purpose)
        if place is None or place.numel() < size:
            place = None
            self._places.pop(purpose, None)  # before there is a larger one: both need not fit
            self._places[purpose] = place = empty(size, torch.uint8, self._device)
        return place[:size].view(dtype).view(shape)


class Shelf:
    """Buffers that are handed out and come back, by type and size; of each as many are made as are
    out at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: defaultdict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
        self.held_bytes = 0
        """Bytes of all buffers made so far."""

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer [numel] with anything in it."""
        free = self._free[dtype, numel]
        if free:
            return free.pop()
        self.held_bytes += numel * dtype.itemsize
        return empty(numel, dtype, self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; the computation has waited for all that use it."""
        self._free[buffer.dtype, buffer.numel()].append(buffer)


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that serves training, too, though an evaluation may be the first to ask."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device=device)
