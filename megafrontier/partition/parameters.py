"""A unit's parameters: what the model's modules and autograd see of its flat weights."""

from collections.abc import Sequence

import torch
from torch import nn

from megafrontier.partition.layout import Layout

HERE, AWAY = 0, 1
"""Versions of a parameter, as autograd knows them."""


class Parameters:
    """nn.Parameters that are views of the whole weights while these are there.

    While they are away each is a NaN of its shape, and has another version: so a stray read shows.
    What autograd has saved of it in forward is a view of memory in which another unit's weights may
    be by now; by the version it knows, and refuses.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self.all = [
            nn.Parameter(torch.empty(0, dtype=dtype, device=device)) for _ in layout.entries
        ]
        self._views: list[torch.Tensor] = []
        nan = torch.full((), float("nan"), dtype=dtype, device=device)
        self._nothing = [nan.expand(entry.shape) for entry in layout.entries]

    def show(self, full: torch.Tensor) -> None:
        """Be views of `full` [numel], the same in every call."""
        if not self._views:
            entries = self._layout.entries
            self._views = [full[e.offset : e.offset + e.numel].view(e.shape) for e in entries]
        self._point(self._views, HERE)

    def hide(self) -> None:
        """Be nothing that could be computed with."""
        self._point(self._nothing, AWAY)

    def _point(self, tensors: Sequence[torch.Tensor], version: int) -> None:
        for parameter, tensor in zip(self.all, tensors, strict=True):
            parameter.data = tensor
        versions = (version,) * len(self.all)
        torch._C._autograd._unsafe_set_version_counter(tuple(self.all), versions)
