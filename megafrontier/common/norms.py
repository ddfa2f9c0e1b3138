"""Norms of long tensors, exact enough on a CPU."""

import torch

ROW = 1 << 16
"""Elements that are summed in fp32. On a CPU torch adds one square after the other, and once the
sum is large, small squares no longer change it: the norm of 20M elements comes out 0.1 % too
small."""
Norms = tuple[torch.Tensor, torch.Tensor]


class KnownNorms:
    """The norms of a tensor, computed where it was written. They hold until it changes."""

    def __init__(self) -> None:
        self._norms: Norms | None = None
        self._version = -1

    def keep(self, norms: Norms | None, tensor: torch.Tensor) -> None:
        """Keep the norms of what `tensor` holds now."""
        self._norms, self._version = norms, tensor._version

    def of(self, tensor: torch.Tensor) -> Norms | None:
        """The norms, or None if `tensor` has changed since then."""
        return self._norms if tensor._version == self._version else None


def row_norms(tensor: torch.Tensor) -> Norms:
    """Norms of the rows of `ROW` elements of a 1-D tensor, and of the rest."""
    rows = tensor.numel() // ROW
    full = tensor[: rows * ROW].view(rows, ROW)
    rest = tensor[rows * ROW :]
    return torch.linalg.vector_norm(full, dim=1), torch.linalg.vector_norm(rest).view(1)
