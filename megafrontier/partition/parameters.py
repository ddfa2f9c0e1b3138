"""A unit's parameters: what the model's modules and autograd see of its flat weights."""

from collections.abc import Sequence

import torch
from torch import nn

from megafrontier.partition.layout import Layout


class Parameters:
    """nn.Parameters that are views of the whole weights while these are there.

    While they are away each is a NaN of its shape: so a stray read shows. What autograd has saved
    of it in forward is a view of memory in which another unit's weights may be by now, or later
    values of its own; by its version it knows, and refuses. That is even while the weights are
    there, odd while they are not, and goes up with each publication.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self.all = [
            nn.Parameter(torch.empty(0, dtype=dtype, device=device)) for _ in layout.entries
        ]
        self._views: list[torch.Tensor] = []
        self._are_shown = False
        self._publications = 0
        nan = torch.full((), float("nan"), dtype=dtype, device=device)
        self._nothing = [nan.expand(entry.shape) for entry in layout.entries]

    def show(self, full: torch.Tensor) -> None:
        """Be views of `full` [numel], the same in every call. Does nothing when they are."""
        if self._are_shown:
            return
        if not self._views:
            self._views = self._layout.views(full)
        self._point(self._views, 2 * self._publications)
        self._are_shown = True

    def hide(self) -> None:
        """Be nothing that could be computed with."""
        self._point(self._nothing, 2 * self._publications + 1)
        self._are_shown = False

    def renew(self, full: torch.Tensor | None) -> None:
        """Point the parameters at new values, which are in `full` already, or hide them. A backward
        through a graph from before this call is refused by autograd.

        Once a step each parameter is pointed at its place anew: a conversion of the model
        (`.half()`), or cuDNN for its recurrent layers, may have moved it, which would train it no
        more.
        """
        self._publications += 1
        if full is None:
            self.hide()
        else:
            self._are_shown = False
            self.show(full)

    def _point(self, tensors: Sequence[torch.Tensor], version: int) -> None:
        for parameter, tensor in zip(self.all, tensors, strict=True):
            parameter.data = tensor
        versions = (version,) * len(self.all)
        torch._C._autograd._unsafe_set_version_counter(tuple(self.all), versions)
