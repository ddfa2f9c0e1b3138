"""How far two runs are apart, by parameter."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from megafrontier.certify.recorder import Part
from megafrontier.certify.runs import Tensors

FLOOR = 1e-3
"""A tensor's own largest element counts as the measure of its gap, but no less than this share of
the largest of all: biases of keys, for example, have a gradient of rounding alone."""


class Gap(NamedTuple):
    """The largest relative gap, and the parameter or number that has it."""

    value: float
    where: str

    def __str__(self) -> str:
        return f"{self.value:.1e} ({self.where})"


NONE = Gap(0.0, "")


def largest(gaps: Iterable[Gap]) -> Gap:
    """NaN is the largest of all."""
    return max(gaps, key=lambda gap: (gap.value != gap.value, gap.value), default=NONE)


def gap_of_numbers(found: Mapping[str, float], expected: Mapping[str, float]) -> Gap:
    """Of numbers by name. One that is missing on either side is infinitely far."""
    return largest(
        Gap(
            abs(found[name] - expected[name]) / max(abs(expected[name]), 1e-9)
            if name in found and name in expected
            else float("inf"),
            name,
        )
        for name in found.keys() | expected.keys()
    )


def gap_of_tensors(found: Tensors, expected: Tensors) -> Gap:
    """Of whole tensors by name: the largest difference of elements, in the tensor's largest one."""
    if found.keys() != expected.keys():
        return Gap(float("inf"), ", ".join(sorted(found.keys() ^ expected.keys())))
    floor = FLOOR * max((_largest(value) for value in expected.values()), default=0.0)
    gaps = []
    for name, value in expected.items():
        if found[name].shape != value.shape:
            return Gap(float("inf"), name)
        difference = _largest(found[name].double() - value.double())
        gaps.append(Gap(difference / max(_largest(value), floor, 1e-30), name))
    return largest(gaps)


def _largest(value: torch.Tensor) -> float:
    return value.abs().max().item() if value.numel() else 0.0


def assembled(parts: Iterable[Part], like: Tensors) -> tuple[Tensors, Gap]:
    """Whole flat tensors of all ranks' parts, and the largest gap between ranks that have the same
    elements. An element that no rank has is NaN.

    like: tensors of the global shapes.
    """
    whole = {name: torch.full((value.numel(),), torch.nan) for name, value in like.items()}
    between: list[Gap] = []
    for name, start, values in parts:
        place = whole[name][start : start + len(values)]
        difference = (place - values).abs().nan_to_num(0.0)
        if difference.any():
            between.append(Gap(_largest(difference) / max(_largest(values), 1e-30), name))
        place.copy_(values)
    return whole, largest(between)


def relative_error(found: Tensors, expected: Tensors) -> float:
    """The norm of the difference of all tensors, relative to the norm."""
    squares = [(found[n].double() - v.double()).square().sum() for n, v in expected.items()]
    norms = [v.double().square().sum() for v in expected.values()]
    return float(torch.stack(squares).sum().sqrt() / torch.stack(norms).sum().sqrt())
