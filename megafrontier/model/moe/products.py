"""The products of all experts of a block with their tokens, sorted by expert.

| product | where | cost |
|---|---|---|
| grouped | torch's grouped matrix product, on GPUs that have it for the type | no synchronization |
| padded | other GPUs, if the experts have about equally many tokens | one |
| loop | CPUs, and other GPUs if one expert has most tokens | one |
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megafrontier.model.mlp import activate

Product = Callable[[Tensor, Tensor, Tensor, Tensor, str], Tensor]
"""tokens [n, hidden], counts int64 [experts], up [experts, rows, hidden], down [experts, hidden,
width] and the activation → [n, hidden]."""

ALIGNMENT = 16
"""Bytes of which torch's grouped product needs a multiple in each row."""
PADDED_LIMIT = 2.0
"""The padded product may have this many times as many rows as there are tokens."""


def loop_product(tokens: Tensor, counts: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
    """One expert after another."""
    # unbind, because its backward stacks the gradients once. That of up[i] would fill a tensor of
    # the size of all experts.
    parts = zip(tokens.split(counts.tolist()), up.unbind(), down.unbind(), strict=True)
    found = [F.linear(activate(F.linear(part, one), kind), two) for part, one, two in parts]
    return torch.cat(found)


def grouped_product(tokens: Tensor, counts: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
    """torch's grouped matrix product, which reads the counts on the device."""
    stops = counts.cumsum(0).to(torch.int32)
    raised = F.grouped_mm(tokens, up.transpose(1, 2), offs=stops)
    return F.grouped_mm(activate(raised, kind), down.transpose(1, 2), offs=stops)


def padded_product(tokens: Tensor, counts: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
    """A batched product of all experts, with the tokens of each padded to the most of any expert;
    `loop_product` if that would be more than `PADDED_LIMIT` times the tokens."""
    most = int(counts.max())
    if most * len(counts) > PADDED_LIMIT * len(tokens):
        return loop_product(tokens, counts, up, down, kind)
    experts = torch.repeat_interleave(counts, output_size=len(tokens))
    starts = counts.cumsum(0) - counts
    places = experts * most + torch.arange(len(tokens), device=tokens.device) - starts[experts]
    padded = tokens.new_zeros(len(counts) * most, tokens.shape[1]).index_copy(0, places, tokens)
    raised = torch.bmm(padded.view(len(counts), most, -1), up.transpose(1, 2))
    return torch.bmm(activate(raised, kind), down.transpose(1, 2)).flatten(0, 1)[places]


@cache
def choose_product(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> Product:
    """The product for tokens of this type on this device, found by a small trial. `sizes`: of
    rows, columns and activations of the experts."""
    if device.type == "cpu":
        return loop_product
    return grouped_product if _has_grouped(device, dtype, sizes) else padded_product


def _has_grouped(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """Whether torch's grouped matrix product and its backward work."""
    if any(size * dtype.itemsize % ALIGNMENT for size in sizes):
        return False
    try:
        with torch.enable_grad():
            values = torch.ones(32, 64, dtype=dtype, device=device, requires_grad=True)
            up = torch.ones(2, 64, 64, dtype=dtype, device=device, requires_grad=True)
            counts = torch.tensor([0, 32], device=device)
            out = grouped_product(values, counts, up, up, "gelu")
            torch.autograd.grad(out, (values, up), torch.ones_like(out))
            return bool(out.isfinite().all())
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def describe_product(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> str:
    """The product of this device, type and sizes, in words."""
    product = choose_product(device, dtype, sizes)
    if product is grouped_product:
        return "torch's grouped matrix product"
    if product is loop_product:
        return "one product after another"
    return (
        "a padded batched product, or one after another if their tokens are very unequal, because "
        f"torch has no grouped matrix product for {dtype} and these sizes on this device"
    )
