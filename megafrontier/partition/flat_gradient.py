"""The gradients of a unit's parameters, written one by one into one flat buffer."""

import torch

from megafrontier.partition.layout import Layout


class FlatGradient:
    """Knows which parameters have been written since `start`: the first time a gradient is copied
    over what is there, later it is added; so nothing has to be filled with zeros before."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._missing: set[int] = set()
        # By address: the buffers are few, always the same, and views cost as much as small copies.
        self._places: dict[int, list[torch.Tensor]] = {}
        self.start()

    def start(self) -> None:
        """What the buffer holds counts no more."""
        self._missing = set(range(len(self._layout.entries)))

    def put(self, whole: torch.Tensor, index: int, gradient: torch.Tensor) -> None:
        """Write the gradient of the `index`-th parameter into `whole` [numel]."""
        places = self._places.get(whole.data_ptr())
        if places is None:
            places = self._places[whole.data_ptr()] = self._layout.views(whole)
        if index in self._missing:
            self._missing.remove(index)
            places[index].copy_(gradient)
        else:
            places[index].add_(gradient)

    def complete(self, whole: torch.Tensor) -> None:
        """Zeros for the padding, and for parameters that got no gradient."""
        for index in self._missing:
            entry = self._layout.entries[index]
            whole[entry.offset : entry.offset + entry.numel] = 0
        last = self._layout.entries[-1]
        whole[last.offset + last.numel :] = 0
        self._missing.clear()
