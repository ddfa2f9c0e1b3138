"""The gradients of a unit's parameters, written one by one into one flat buffer."""

import torch

from megafrontier.partition.layout import Layout


class FlatGradient:
    """A parameter's first gradient since `start` overwrites what is there and later ones are added,
    so the buffer needs no filling with zeros."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.whole: torch.Tensor | None = None
        """What is written into, from `start` to `complete`."""
        self._places: list[torch.Tensor] = []
        self._missing: set[int] = set()
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
        """Write the gradient of the `index`-th parameter."""
        if index in self._missing:
            self._missing.remove(index)
            self._places[index].copy_(gradient)
        else:
            self._places[index].add_(gradient)

    def complete(self) -> torch.Tensor:
        """The buffer, with zeros for the padding and for parameters that got no gradient. The next
        one needs a start."""
        whole, self.whole = self.whole, None
        assert whole is not None
        for index in (*self._missing, -1):
            self._places[index].zero_()
        return whole
