"""Layers whose matrices may get their gradients later than their inputs.

A pipeline with a zero-bubble schedule needs the gradients of inputs first (Qi et al.,
arXiv:2401.10241). A layer that has a number then leaves the gradients of its matrices out of its
backward, and keeps the tensors that they are made of.

Note [Layers by number]
The blocks of a compiled model share one graph. Each layer therefore has its number in a tensor,
which is an input of the graph. As it requires a gradient, the compiler keeps the operator that
computes this gradient, the one that keeps the tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


class LateWeights(nn.Module):
    """A module whose backward leaves its matrices out if `number` is set."""

    number: Tensor | None = None
    """Of this layer. An operator of the layer calls `keep_for_weights` with it in backward."""

    @property
    def late_matrices(self) -> list[Tensor]:
        """The parameters that get their gradients later."""
        raise NotImplementedError

    def start_gradients(self, *kept: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Begin what the gradients need from other ranks. `kept`: as in `keep_for_weights`.

        Returns the function that gives the gradients of `late_matrices`.
        """
        raise NotImplementedError


class OtherGradients:
    """The gradients of all other parameters, summed over the backwards of inputs since the last
    backward of weights.

    A sum, because the matrix of an embedding or a head may be as large as a stage's blocks.
    """

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor | None] = {}

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient. Sums are fp32."""
        total = self._sums.get(parameter)
        self._sums[parameter] = gradient if total is None else total.float() + gradient

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter that had a gradient in this step, and its sum, in the parameter's type."""
        found = [
            (parameter, parameter.new_zeros(()).expand(parameter.shape) if total is None else total)
            for parameter, total in self._sums.items()
        ]
        self._sums = dict.fromkeys(self._sums)
        return [(parameter, total.to(parameter.dtype)) for parameter, total in found]


@dataclass
class LateGradients:
    """What a backward of inputs leaves to the backward of weights."""

    others: OtherGradients
    """Of the same stage."""
    copies: bool
    """Whether kept tensors are copied. Compiled code reuses the memory of what it passes on."""
    products: list[tuple[int, list[Tensor]]] = field(default_factory=list)
    """Number of a layer, and what it keeps."""


_keeping: list[LateGradients] = []


@contextmanager
def keeping(late: LateGradients) -> Iterator[None]:
    """Keep what layers leave out of a backward in the body."""
    _keeping.append(late)
    try:
        yield
    finally:
        _keeping.pop()


@torch.library.custom_op("megafrontier::keep_for_weights", mutates_args=())
def keep_for_weights(kept: Sequence[Tensor], number: Tensor) -> Tensor:
    """Keep what the gradients of a layer's matrices are made of. Returns the gradient of
    `number`."""
    late = _keeping[-1]
    late.products.append((int(number.item()), [t.clone() if late.copies else t for t in kept]))
    return torch.zeros_like(number)


@keep_for_weights.register_fake
def _(kept: Sequence[Tensor], number: Tensor) -> Tensor:
    return torch.empty_like(number)
