"""Positions, rotary tables and masks.

They are computed once per micro-batch and shared by every block. They are not buffers of the model,
so that it can be built on the meta device and moved freely.
"""

from math import ceil, floor, log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from megafrontier.config import RotaryScalingConfig
from megafrontier.model.scaling import scaled


class Rotary(NamedTuple):
    """The tables of rotary positions, fp32."""

    cosines: Tensor
    """[b or 1, s, rotary_size / 2]."""
    sines: Tensor
    """Negated sines, and sines [b or 1, s, 2, rotary_size / 2]."""
    growth: Tensor | None = None
    """Factor of queries [b or 1, s, 1, 1]. None: 1."""


class AttentionContext(NamedTuple):
    """How the tokens of a micro-batch attend to each other, the same in every block.

    With neither mask nor documents, attention is causal, and a single token attends to the whole
    cache.
    """

    rotary: Rotary | None
    mask: Tensor | None
    """Boolean, broadcast to [b, heads, s, keys]."""
    documents: Tensor | None
    """int32 [n + 1]: the start of each document in the b · s tokens, then b · s. With a mask, too,
    some kinds of attention use it and the others these."""
    shape: tuple[int, int]
    """(b, s) of the tokens."""
    counted: Tensor | None = None
    """Boolean [b, s]: the tokens that routers count, in their losses and statistics, and attention
    in its largest log-sums. None: all.
    With tensor parallelism it has the tokens of all tensor ranks."""


def row_documents(batch: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """The documents if each of `batch` rows of `length` tokens is one."""
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def document_positions(documents: Tensor, batch: int, length: int) -> Tensor:
    """Positions [b, s] that restart at 0 in each document. Does not wait for the device.

    `documents` int32 [n + 1]: the start of each document in the b · s tokens, then b · s.
    """
    index = torch.arange(batch * length, dtype=torch.int32, device=documents.device)
    return index.view(batch, length) - documents[document_numbers(documents, batch, length)]


def followed_tokens(tokens: Tensor, documents: Tensor | None, padding: Tensor | None) -> Tensor:
    """Return which of the tokens [b, s] have a next token in their row and document, and are not
    padding: boolean [b, s]. `documents` as for `document_positions`, on any device."""
    followed = torch.ones_like(tokens, dtype=torch.bool) if padding is None else ~padding
    followed[:, -1] = False
    if documents is not None:
        starts = documents.to(tokens.device, non_blocking=True)
        followed.view(-1)[starts[1:].long() - 1] = False
    return followed


def document_mask(documents: Tensor, batch: int, length: int) -> Tensor:
    """Boolean mask [b, 1, s, s] (query, key): a token attends to the past of its own document.

    `documents` as for `document_positions`.
    """
    number = document_numbers(documents, batch, length)
    same = number[:, :, None] == number[:, None, :]
    return same.tril_()[:, None]


def document_numbers(documents: Tensor, batch: int, length: int) -> Tensor:
    """The number of each token's document [b, s]. `documents` as for `document_positions`."""
    index = torch.arange(batch * length, dtype=torch.int32, device=documents.device)
    return (torch.searchsorted(documents, index, right=True) - 1).view(batch, length)


def cached_mask(past: int, new: int, device: torch.device) -> Tensor | None:
    """Boolean mask [new, past + new] (query, key) for `new` tokens after `past` cached ones.

    None if attention needs no mask: one token attends to everything, and without a cache the
    kernel's causal mode does.
    """
    if past == 0 or new == 1:
        return None
    return torch.ones(new, past + new, dtype=torch.bool, device=device).tril_(past)


def rotary_tables(
    positions: Tensor, rotary_size: int, base: float, scaling: RotaryScalingConfig | None = None
) -> Rotary:
    """Cosines and sines of the angles position · base^(-2i / rotary_size).

    `positions` [b, s]. Su et al. 2021, arXiv:2104.09864, equation 15. Always fp32, because in bf16
    neighbouring positions above 256 would have the same angle.
    """
    exponents = torch.arange(0, rotary_size, 2, device=positions.device).float() / rotary_size
    frequencies, factor = 1.0 / base**exponents, 1.0
    if scaling is not None:
        frequencies = _SCALED[scaling.kind](frequencies, scaling, base)
        factor = _attention_factor(scaling)
    angles = positions[..., None].float() * frequencies
    sines = scaled(angles.sin(), factor)
    tables = scaled(angles.cos(), factor), torch.stack([-sines, sines], -2)
    return Rotary(*tables, _growth(positions, scaling))


def _growth(positions: Tensor, scaling: RotaryScalingConfig | None) -> Tensor | None:
    """`Rotary.growth`: as in transformers' Ministral 3, and Llama 4."""
    if scaling is None or not scaling.query_growth:
        return None
    lengths = torch.floor(positions.float() / scaling.original_length)
    return 1 + scaling.query_growth * lengths.log1p()[..., None, None]


def _llama3(frequencies: Tensor, scaling: RotaryScalingConfig, base: float) -> Tensor:
    """Radians per token [size / 2], with low ones divided by the factor, as in Llama 3.1 (rope_type
    llama3 of its config.json)."""
    turns = scaling.original_length * frequencies / (2 * torch.pi)
    span = scaling.kept_above - scaling.low_frequency
    kept = ((turns - scaling.low_frequency) / span).clamp(0, 1)
    return frequencies * ((1 - kept) / scaling.factor + kept)


def _yarn(frequencies: Tensor, scaling: RotaryScalingConfig, base: float) -> Tensor:
    """As `_llama3`, but interpolated by the number of the frequency: Peng et al. 2023,
    arXiv:2309.00071, section 3.2. Its code rounds the bounds outwards (`truncate`)."""
    half = len(frequencies)

    def number(turns: float) -> float:
        """The fractional number of the frequency with so many turns."""
        return half * log(scaling.original_length / (turns * 2 * pi)) / log(base)

    first, last = number(scaling.kept_above), number(scaling.low_frequency)
    if scaling.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    index = torch.arange(half, device=frequencies.device).float()
    divided = ((index - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies * (divided / scaling.factor + 1 - divided)


def _linear(frequencies: Tensor, scaling: RotaryScalingConfig, base: float) -> Tensor:
    """Chen et al. 2023, arXiv:2306.15595."""
    return frequencies / scaling.factor


_SCALED = {"llama3": _llama3, "yarn": _yarn, "linear": _linear}


def _attention_factor(scaling: RotaryScalingConfig) -> float:
    """Of rotated queries and keys."""
    if scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * log(scaling.factor) + 1


def rotate_both(query: Tensor, key: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """`rotate` queries and keys [b, s, heads, head_size]. Queries also grow."""
    query, key = rotate(query, rotary), rotate(key, rotary)
    return query if rotary.growth is None else query * rotary.growth.to(query.dtype), key


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the first dimensions of each head [b, s, heads, head_size] by its position's angles.

    Dimension i is paired with i + rotary_size / 2, the convention of GPT-NeoX and of Llama in
    `transformers`. Dimensions from rotary_size on stay. The result has the type of `heads`.
    """
    cosines, sines, _ = rotary
    half = cosines.shape[-1]
    # No slices of the two halves: their backward would fill and add tensors of the whole size.
    pairs = heads[..., : 2 * half].unflatten(-1, (2, half))
    turned = pairs * cosines[:, :, None, None] + pairs.flip(-2) * sines[:, :, None]
    turned = turned.to(heads.dtype).flatten(-2)
    rest = heads[..., 2 * half :]
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
