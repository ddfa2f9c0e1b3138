"""MXFP4: blocks of 32 four-bit floating-point numbers with a common power of two.

Open Compute Project, OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
"""What the names of the two tensors of a matrix end with."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
"""Of the exponents."""


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [.., n, 16] with the first of two numbers in the low bits, and scales uint8
    [.., n] → the numbers bf16 [.., 32 · n], which has all of them exactly.

    Raises ValueError for other types or shapes.
    """
    types = {blocks.dtype, scales.dtype}
    if types != {torch.uint8} or blocks.shape != (*scales.shape, 16):
        found = f"{list(blocks.shape)} and {list(scales.shape)}"
        raise ValueError(f"blocks and scales {found} of {types}, not uint8 [.., 16] and [..]")
    numbers = torch.tensor([*_POSITIVE, *(-n for n in _POSITIVE)], dtype=torch.bfloat16)
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    exponents = scales.to(torch.int32) - _BIAS
    values = torch.ldexp(numbers[pairs.int()], exponents[..., None]).flatten(-2)
    return values.to(torch.bfloat16)
