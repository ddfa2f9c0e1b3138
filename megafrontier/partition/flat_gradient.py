"""The gradients of a unit's parameters, written into one flat buffer."""

import torch

from megafrontier.partition.layout import Layout

TOGETHER = 1 << 25
"""Bytes of gradients that wait to be written in one call: on a GPU a block's are written in half
the device's time and a quarter of the host's. Few enough that their memory does not count."""


class FlatGradient:
    """A parameter's first gradient since `start` overwrites what is there and later ones are added,
    so the buffer needs no filling with zeros."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.whole: torch.Tensor | None = None
        """What is written into, from `start` to `complete`."""
        self._places: list[torch.Tensor] = []
        self._missing: set[int] = set()
        self._waiting: dict[int, torch.Tensor] = {}
        self._waiting_bytes = 0
        # By address: the buffers are few, always the same, and views cost as much as small copies.
        self._views: dict[int, list[torch.Tensor]] = {}

    def start(self, whole: torch.Tensor) -> None:
        """Write into `whole` [numel] from here on; what it holds does not count."""
        address = whole.data_ptr()
        if address not in self._views:
            padding = whole[self._layout.padding_within(0, self._layout.numel)]
            self._views[address] = [*self._layout.views(whole), padding]  # which is at -1, then
        self.whole, self._places = whole, self._views[address]
        self._missing = set(range(len(self._layout.entries)))

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of the `index`-th parameter, to be written soon: it may not change."""
        if index in self._waiting:
            self.write()
        self._waiting[index] = gradient
        self._waiting_bytes += gradient.nbytes
        if self._waiting_bytes > TOGETHER:
            self.write()

    def write(self) -> None:
        """Write all that was put, and keep nothing of it."""
        first = [index for index in self._waiting if index in self._missing]
        later = [index for index in self._waiting if index not in self._missing]
        for each, indices in ((torch._foreach_copy_, first), (torch._foreach_add_, later)):
            if indices:
                each([self._places[i] for i in indices], [self._waiting[i] for i in indices])
        self._missing.difference_update(first)
        self._waiting.clear()
        self._waiting_bytes = 0

    def complete(self) -> torch.Tensor:
        """The buffer, with zeros for the padding and for parameters that got no gradient. The next
        one needs a start."""
        self.write()
        whole, self.whole = self.whole, None
        assert whole is not None
        for index in (*self._missing, -1):
            self._places[index].zero_()
        return whole
