"""Products whose matrices may get their gradients later than their inputs.

A pipeline with a zero-bubble schedule needs the gradients of inputs first (Qi et al.,
arXiv:2401.10241). A product that has a number then leaves the gradients of its matrices out of its
backward, and keeps the tensors that they are made of.

Note [Layers by number]
The blocks of a compiled model share one graph. Each layer therefore has its number in a tensor,
which is an input of the graph. As it requires a gradient, the compiler keeps the operator that
computes this gradient, the one that keeps the tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class DeferrableProduct(nn.Module):
    """A product with matrices. Its backward leaves these out if `number` is set."""

    number: Tensor | None = None
    """Of this product, [] and fp32."""

    @property
    def matrices(self) -> list[Tensor]:
        """The parameters whose gradients may be deferred."""
        raise NotImplementedError

    def start_gradients(self, *kept: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Begin what the gradients need from other ranks. `kept`: the tensors that were given to
        `multiply`, and the gradient of its result.

        Returns the function that gives the gradients of `matrices`.
        """
        raise NotImplementedError

    def multiply(self, product: Callable[[list[Tensor]], Tensor], *kept: Tensor) -> Tensor:
        """`product` of the matrices. If their gradients are deferred, its backward keeps `kept`."""
        if self.number is None or not torch.is_grad_enabled():
            return product(self.matrices)
        # Without a matrix that requires a gradient, autograd leaves out the product for it.
        result = product([matrix.detach() for matrix in self.matrices])
        deferred: Tensor = _Keep.apply(result, self.number, *kept)
        return deferred


class _Keep(torch.autograd.Function):
    """A result as it is. Its backward keeps tensors and the gradient for a later backward."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, number: Tensor, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(number, *kept)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        number, *kept = ctx.saved_tensors
        gradient = grad_outputs[0].contiguous()
        by_number = keep_for_weights([*kept, gradient], number)
        return gradient, by_number, *[None] * len(kept)


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
        totals = [
            (parameter, parameter.new_zeros(()).expand(parameter.shape) if total is None else total)
            for parameter, total in self._sums.items()
        ]
        self._sums = dict.fromkeys(self._sums)
        return [(parameter, total.to(parameter.dtype)) for parameter, total in totals]


@dataclass
class DeferredGradients:
    """What a backward of inputs leaves to the backward of weights."""

    others: OtherGradients
    """Of the same stage."""
    copies: bool
    """Whether kept tensors are copied. Compiled code reuses the memory of what it passes on."""
    products: list[tuple[int, list[Tensor]]] = field(default_factory=list)
    """Number of a product, and what it keeps."""


_keeping: list[DeferredGradients] = []


@contextmanager
def keeping(deferred: DeferredGradients) -> Iterator[None]:
    """Keep what products leave out of a backward in the body."""
    _keeping.append(deferred)
    try:
        yield
    finally:
        _keeping.pop()


@torch.library.custom_op("megafrontier::keep_for_weights", mutates_args=())
def keep_for_weights(kept: Sequence[Tensor], number: Tensor) -> Tensor:
    """Keep what the gradients of a product's matrices are made of. Returns the gradient of
    `number`."""
    into = _keeping[-1]
    into.products.append((int(number.item()), [t.clone() if into.copies else t for t in kept]))
    return torch.zeros_like(number)


@keep_for_weights.register_fake
def _(kept: Sequence[Tensor], number: Tensor) -> Tensor:
    return torch.empty_like(number)
