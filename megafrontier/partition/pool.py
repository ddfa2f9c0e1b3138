"""Memory that units use in turns: a fixed number of full buffers for weights and for gradients.

Note on places. Autograd may save views of a parameter (a transposed weight, say) in forward and
reads them in backward. So a unit is gathered into the same buffer each time, whichever unit was
there in between; units that are gathered at the same time have different ones.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import cycle
from typing import Protocol

import torch

from megafrontier.partition.placement import Placement


class Owner(Protocol):
    """What uses a buffer for a while: a unit."""

    def release(self) -> None:
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
        with torch.inference_mode(False):  # it will serve training, whoever is the first to ask
            return torch.empty(self.numel, dtype=self._dtype, device=self._device)

    def take(self, owner: Owner) -> None:
        """Give the buffer to a unit. One that has been gathered into it, but runs later or goes on
        later (a block of several uses), is released, and gathered again when its turn comes."""
        if self._owner is not None and self._owner is not owner:
            self._owner.release()
        self._owner = owner


class Pool:
    """The buffers of one model's units: of their whole weights, and of their full gradients."""

    def __init__(self, whole: int, dtype: torch.dtype, device: torch.device) -> None:
        """`whole` is how many units, each following on the one before, are whole at a time."""
        self.dtype = dtype
        self.device = device
        self._buffers = [UnitBuffer(dtype, device) for _ in range(whole)]
        self._shared = cycle(self._buffers[:])
        self._gradients: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._gradient_numel = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers for weights, and of those made so far for gradients."""
        weights = sum(buffer.numel for buffer in self._buffers)
        return (weights + self._gradient_numel) * self.dtype.itemsize

    def next_buffer(self) -> UnitBuffer:
        """That of the next unit in the order in which they run."""
        return next(self._shared)

    def own_buffer(self) -> UnitBuffer:
        """One for a unit that shares with no other."""
        self._buffers.append(UnitBuffer(self.dtype, self.device))
        return self._buffers[-1]

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


def buffer_bytes(
    numels: Sequence[int], root: int, placement: Placement, itemsize: int, prefetch: int | None
) -> int:
    """Bytes of all buffers of a rank's pool after a step of several micro-batches, by the formula.

    `numels` are the elements of the units that take turns, in the order in which they run, `root`
    those of the unit that does not (0: none); `prefetch` units are gathered ahead, None without
    overlap: whole weights of one more are there, and gradients of two more.
    """
    ahead = min(prefetch or 0, max(len(numels) + bool(root) - 1, 0))
    weights = gradients = 0
    if placement.backward_weights:
        turns = range(min(ahead + 1, len(numels)))
        weights = root + sum(max(numels[first :: ahead + 1]) for first in turns)
    if placement.gradients:
        waiting = 1 if prefetch is None else ahead + 2
        sizes = Counter(numel for numel in (*numels, root) if numel)
        # So many may wait that a unit's next gradient is made while its last one does.
        again = waiting > sum(sizes.values()) > 1
        gradients = sum(numel * min(count + again, waiting) for numel, count in sizes.items())
    return (weights + gradients) * itemsize
