"""A backward in two parts: gradients of inputs now, gradients of weights later.

The first part leaves out one matrix product of each linear layer, which is half of its backward. It
keeps the layer's input and the gradient of its output instead (`model/recompute/deferred.py`). All
other parameters (norms, biases, embeddings) get their gradients in the first part, which are kept
until the second: so autograd's hooks on parameters see one backward per micro-batch, the second
part.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megafrontier.model.recompute.deferred import (
    DeferrableProduct,
    DeferredGradients,
    OtherGradients,
    keeping,
)


class SplitBackward:
    """The backward of a model's parts, in two parts each."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], copies: bool) -> None:
        """Make all products in `layers` leave their matrices to the second part.

        copies: the layers run in compiled code, which reuses the memory of what it passes on.
        """
        modules = (module for layer in layers for module in layer.modules())
        self._copies = copies
        self._products = [m for m in modules if isinstance(m, DeferrableProduct)]
        self._numbers = [
            torch.tensor(float(i), requires_grad=True) for i in range(len(self._products))
        ]
        for product, number in zip(self._products, self._numbers, strict=True):
            product.number = number
        self._places = {id(p): i for i, p in enumerate(model.parameters())}

    def inputs(
        self,
        result: Tensor | GradientEdge,
        gradient: Tensor | None,
        hidden: Tensor | None,
        parameters: Iterable[Tensor],
        others: OtherGradients,
    ) -> tuple[Tensor | None, DeferredGradients]:
        """Backward from `result`, with its `gradient`, to `hidden`.

        Returns the gradient of `hidden`, if there is one, and what is left to do for `parameters`.
        others: is given the gradients of those that are not left. One for each stage and step.
        """
        deferred = DeferredGradients(others, self._copies)
        matrices = {id(matrix) for product in self._products for matrix in product.matrices}
        whole = [p for p in parameters if p.requires_grad and id(p) not in matrices]
        ends = [*whole, *self._numbers, *([] if hidden is None else [hidden])]
        with keeping(deferred):
            found = torch.autograd.grad(result, ends, gradient, allow_unused=True)
        for parameter, found_gradient in zip(whole, found, strict=False):
            if found_gradient is not None:
                others.add(parameter, found_gradient)
        return None if hidden is None else found[-1], deferred

    def weights(self, deferred: DeferredGradients) -> None:
        """Give the parameters their gradients, in the order of a backward, as autograd does."""
        parts: list[tuple[list[Tensor], _Start]] = [
            (
                self._products[number].matrices,
                partial(self._products[number].start_gradients, *kept),
            )
            for number, kept in deferred.products
        ]
        parts += [([p], partial(_given, gradient)) for p, gradient in deferred.others.take()]
        deferred.products = []
        parts.sort(key=lambda part: self._places[id(part[0][0])])
        queue = _Queue([start for _, start in parts])
        # Autograd runs the newest first.
        ends = [_Deferred.apply(queue, *parameters) for parameters, _ in parts]
        del parts  # each is freed as soon as it was used
        torch.autograd.backward(ends)


_Start = Callable[[], Callable[[], Sequence[Tensor]]]


def _given(gradient: Tensor) -> Callable[[], Sequence[Tensor]]:
    return lambda: [gradient]


class _Queue:
    """Computes gradients, last first, while what the next ones need comes from other ranks."""

    def __init__(self, starts: list[_Start]) -> None:
        self._starts = starts
        self._start()

    def _start(self) -> None:
        self._finish = self._starts.pop()() if self._starts else None

    def next(self) -> Sequence[Tensor]:
        finish = self._finish
        assert finish is not None
        self._start()
        return finish()


class _Deferred(torch.autograd.Function):
    """A zero whose backward gives `parameters` the gradients that are next in `queue`."""

    @staticmethod
    def forward(ctx: Any, queue: _Queue, *parameters: Tensor) -> Tensor:
        ctx.queue = queue
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.queue.next()
