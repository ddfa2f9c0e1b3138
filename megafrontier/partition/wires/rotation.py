"""The block Hadamard rotation: spreads an outlier over its block before it is quantised.

So the others of its block keep their bits (as SDP4Bit does, arXiv:2410.15526). The matrix is
Sylvester's, of 128 × 128 elements ±1, its rows in the order of their reversed bits: it is its own
inverse but for a factor either way, and kernels need not bring rows back into order, which would
move every value between threads twice more. A tail shorter than a block stays as it is.
"""

from functools import cache

import torch

ROTATION = 128
"""Elements that one rotation mixes; blocks of codes are whole multiples of it."""

THERE, BACK = 1 / 8, 1 / 16
"""Scales of the rotations. Powers of two, whose product is 1 / ROTATION: exact in any arithmetic
(TF32 would shorten 1/√128, and each rotation shrink the values)."""


def rotate(values: torch.Tensor) -> torch.Tensor:
    """[rows, n] of any float type, rotated: fp32 and √2 times as large; `rotate_back` undoes it."""
    return _multiply(values.float(), THERE)


def rotate_back(values: torch.Tensor) -> torch.Tensor:
    """The fp32 [rows, n] that `rotate` turned into `values`.

    Exact, and so the same bits on every device, for integers of up to 8 bits: their sums of 128
    fit into fp32 in whichever order a matrix product takes them, and they into TF32.
    """
    return _multiply(values, BACK)


def _multiply(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Each whole block of fp32 [rows, n] by Sylvester's matrix, scaled."""
    whole = values.shape[1] // ROTATION * ROTATION
    blocks = values[:, :whole].reshape(-1, ROTATION)
    # Into a place of our own: so no autocast around the caller computes it in fewer bits.
    turned = torch.mm(blocks, _sylvester(scale, values.device), out=torch.empty_like(blocks))
    turned = turned.view(values.shape[0], whole)
    return torch.cat([turned, values[:, whole:]], dim=1) if whole < values.shape[1] else turned


@cache
def _sylvester(scale: float, device: torch.device) -> torch.Tensor:
    """±`scale`: in row r and column c − where r with its bits reversed and c have an odd number of
    bits in common. Symmetric; its square is 128 · scale² times the identity."""
    matrix = torch.ones(1, 1, dtype=torch.float32)  # whatever the caller's default is
    while matrix.shape[0] < ROTATION:
        rows = torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)
        matrix = torch.stack(rows, 1).flatten(0, 1)
    return (matrix * scale).to(device)
