"""The global gradient norm over shards, and the factor that clips to it."""

from collections.abc import Sequence

import torch

from megafrontier.parallel.hierarchy import Hierarchy

ROW = 1 << 16
"""Elements that are summed in fp32. On a CPU torch adds one square after another, and to a long sum
the next one adds nothing: the norm of 20M elements comes out 0.1 % too small, that of fewer by
less."""


def global_norm(
    gradients: Sequence[torch.Tensor], hierarchy: Hierarchy, depth: int
) -> torch.Tensor:
    """Euclidean norm, float64 [], of gradients whose 1-D shards lie cut through `depth` levels.

    The same bits on every rank.
    """
    squares = square_sum(gradients).view(1)
    if not hierarchy.is_first_replica(depth):
        squares = torch.zeros_like(squares)  # each shard counts once
    return hierarchy.world.sum(squares).sqrt()[0]


def square_sum(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of the squares, float64 [], of this rank's 1-D shards."""
    norms = torch.cat([norm for gradient in gradients for norm in _row_norms(gradient)])
    return norms.double().square().sum()


def _row_norms(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of the rows of `ROW` elements, and of what is left over."""
    rows = gradient.numel() // ROW
    whole = gradient[: rows * ROW].view(rows, ROW)
    rest = gradient[rows * ROW :]
    return torch.linalg.vector_norm(whole, dim=1), torch.linalg.vector_norm(rest).view(1)


def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """What to multiply gradients of global norm `norm` [] by; 1 when `largest` is 0 (no
    clipping)."""
    return (largest / (norm + 1e-6)).clamp(max=1) if largest > 0 else torch.ones_like(norm)
