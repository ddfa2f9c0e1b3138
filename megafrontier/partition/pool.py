"""Memory that units take in turns: a fixed number of full buffers for weights and for gradients.

Note on places. Autograd may save views of a parameter (a transposed weight, say) in forward and
reads them in backward. So a unit is gathered into the same memory each time, whoever was there in
between: it has a fixed seat, and units that are whole at the same time have different ones.
"""

from collections import defaultdict
from functools import cached_property
from itertools import cycle
from typing import Protocol

import torch


class Guest(Protocol):
    """Who sits on a seat: a unit."""

    def release(self) -> None:
        """Get up: the memory is another's now."""
        ...


class Seat:
    """Memory for the whole weights of one unit at a time, as large as the largest needs."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self.numel = 0
        self._guest: Guest | None = None

    def reserve(self, numel: int) -> None:
        """Say, before the first one sits down, that a unit of `numel` elements will."""
        self.numel = max(self.numel, numel)

    @cached_property
    def memory(self) -> torch.Tensor:
        """Elements [of the largest unit]."""
        with torch.inference_mode(False):  # it will serve training, whoever is the first to ask
            return torch.empty(self.numel, dtype=self._dtype, device=self._device)

    def take(self, guest: Guest) -> None:
        """Give the seat to a unit. One that has been gathered there, but runs later or goes on
        later (a block of several uses), gets up and is gathered again when its turn comes."""
        if self._guest is not None and self._guest is not guest:
            self._guest.release()
        self._guest = guest


class Pool:
    """The seats of one model's units, and the buffers of their full gradients."""

    def __init__(self, whole: int, dtype: torch.dtype, device: torch.device) -> None:
        """`whole` is how many units, each following on the one before, are whole at a time."""
        self.dtype = dtype
        self.device = device
        self._seats = [Seat(dtype, device) for _ in range(whole)]
        self._shared = cycle(self._seats[:])
        self._gradients: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._gradient_numel = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all seats and of the gradient buffers made so far, in use or not."""
        seats = sum(seat.numel for seat in self._seats)
        return (seats + self._gradient_numel) * self.dtype.itemsize

    def next_seat(self) -> Seat:
        """The seat of the next unit in the order in which they run."""
        return next(self._shared)

    def own_seat(self) -> Seat:
        """A seat for a unit that shares with no other."""
        self._seats.append(Seat(self.dtype, self.device))
        return self._seats[-1]

    def take_gradient(self, numel: int) -> torch.Tensor:
        """A buffer [numel] with anything in it."""
        free = self._gradients[numel]
        if free:
            return free.pop()
        self._gradient_numel += numel
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def give_gradient(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; the computation has waited for all that read it."""
        self._gradients[buffer.numel()].append(buffer)
