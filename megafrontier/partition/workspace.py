"""Memory that messages use in turns, the same in every step."""

from math import prod

import torch

from megafrontier.common.buffer_pool import empty


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
