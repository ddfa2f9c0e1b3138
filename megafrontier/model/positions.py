"""What tokens need to know about each other's places: positions, rotary tables, masks.

All are computed once per micro-batch from a few integers and shared by every block. They are no
buffers of the model, so that it can be built on the meta device and moved freely.
"""

import torch
from torch import Tensor

from megafrontier.config import RotaryScalingConfig

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine, each fp32 [b or 1, s, rotary_size / 2]."""


def document_positions(documents: Tensor, batch: int, length: int) -> Tensor:
    """Positions [b, s] that begin at 0 with each document; without waiting for the device.

    `documents` int32 [n + 1]: where each begins in the b · s tokens, and b · s at the end.
    """
    index = torch.arange(batch * length, dtype=torch.int32, device=documents.device)
    return (index - documents[_numbers(documents, index)]).view(batch, length)


def document_mask(documents: Tensor, batch: int, length: int) -> Tensor:
    """Who may attend to whom, boolean [b, 1, s, s] (query, key): the past of its own document.

    `documents` as for `document_positions`.
    """
    index = torch.arange(batch * length, dtype=torch.int32, device=documents.device)
    number = _numbers(documents, index).view(batch, length)
    same = number[:, :, None] == number[:, None, :]
    return same.tril_()[:, None]


def _numbers(documents: Tensor, index: Tensor) -> Tensor:
    """Number of the document that holds each token of `index` [t]."""
    return torch.searchsorted(documents, index, right=True) - 1


def cached_mask(past: int, new: int, device: torch.device) -> Tensor | None:
    """Boolean [new, past + new] (query, key) for `new` tokens that follow `past` cached ones.

    None where the kernel's own rule does: one token sees everything, no past is plain causal.
    """
    if past == 0 or new == 1:
        return None
    return torch.ones(new, past + new, dtype=torch.bool, device=device).tril_(past)


def rotary_tables(
    positions: Tensor, rotary_size: int, base: float, scaling: RotaryScalingConfig | None = None
) -> Rotary:
    """Cosine and sine of the angles position · base^(-2i / rotary_size), fp32 [b, s, size / 2].

    `positions` [b, s]. Su et al. 2021, arXiv:2104.09864, equation 15. fp32 whatever the model's
    type: in bf16 neighbouring positions beyond 256 would get the same angle.
    """
    exponents = torch.arange(0, rotary_size, 2, device=positions.device).float() / rotary_size
    frequencies = 1.0 / base**exponents
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles = positions[..., None].float() * frequencies
    return angles.cos(), angles.sin()


def _scaled(frequencies: Tensor, scaling: RotaryScalingConfig) -> Tensor:
    """Radians a token [size / 2], low ones divided by the factor, as Llama 3.1 has it (its
    config.json's rope_type llama3)."""
    turns = scaling.original_length * frequencies / (2 * torch.pi)
    span = scaling.high_frequency - scaling.low_frequency
    kept = ((turns - scaling.low_frequency) / span).clamp(0, 1)
    return frequencies * ((1 - kept) / scaling.factor + kept)


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Turn the first dimensions of each head [b, s, heads, head_size] by its position's angles.

    Dimension i is paired with i + rotary_size / 2, the convention of GPT-NeoX and of Llama in
    `transformers`; the dimensions beyond rotary_size pass through. Returns the type it was given.
    """
    cos, sin = (table[:, :, None] for table in rotary)
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin]
    rest = heads[..., 2 * half :]
    return torch.cat([part.to(heads.dtype) for part in (*turned, rest)], dim=-1)
