"""The global gradient norm over shards, and the factor that clips to it."""

from collections.abc import Sequence

import torch

from megafrontier.cluster.hierarchy import Hierarchy


def global_norm(
    gradients: Sequence[torch.Tensor], hierarchy: Hierarchy, depth: int
) -> torch.Tensor:
    """Euclidean norm, float64 [], of gradients whose 1-D shards lie cut through `depth` levels.

    The same bits on every rank.
    """
    return hierarchy.sum(square_sum(gradients).view(1), depth).sqrt()[0]


def square_sum(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of the squares, float64 [], of this rank's shards."""
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    return norms.double().square().sum()


def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """What to multiply gradients of global norm `norm` [] by; 1 when `largest` is 0 (no
    clipping)."""
    return (largest / (norm + 1e-6)).clamp(max=1) if largest > 0 else torch.ones_like(norm)
