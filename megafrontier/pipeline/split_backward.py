"""A backward in two parts: gradients of inputs now, gradients of weights later.

The first part leaves out one matrix product of each linear layer, which is half of its backward. It
keeps the layer's input and the gradient of its output instead (`model/late_weights.py`). All other
parameters (norms, biases, embeddings) get their gradients in the first part, which are kept until
the second: so autograd's hooks on parameters see one backward per micro-batch, the second part.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megafrontier.model.late_weights import (
    LateGradients,
    LateWeights,
    OtherGradients,
    keep_for_weights,
    keeping,
)


class _WithoutWeight(torch.autograd.Function):
    """F.linear. Its backward keeps what the gradient of the matrix is made of."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, number)
        ctx.has_bias = bias is not None
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, number = ctx.saved_tensors
        (gradient,) = grad_outputs
        by_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        by_number = keep_for_weights([inputs, gradient], number)
        return gradient @ weight, None, by_bias, by_number


class SplitLinear(nn.Linear, LateWeights):
    """A linear layer whose matrix gets its gradient in `SplitBackward.weights`."""

    def forward(self, input: Tensor) -> Tensor:
        """input [.., in_features] → [.., out_features]."""
        if not torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        output: Tensor = _WithoutWeight.apply(input, self.weight, self.bias, self.number)
        return output

    @property
    def late_matrices(self) -> list[Tensor]:
        return [self.weight]

    def start_gradients(self, *kept: Tensor) -> Callable[[], Sequence[Tensor]]:
        inputs, gradient = kept
        return lambda: [gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)]


class SplitBackward:
    """The backward of a model's parts, in two parts each."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], copies: bool) -> None:
        """Make all `nn.Linear` and `LateWeights` in `layers` leave their matrices to the second
        part.

        copies: the layers run in compiled code, which reuses the memory of what it passes on.
        """
        modules = [module for layer in layers for module in layer.modules()]
        for module in modules:
            if type(module) is nn.Linear:
                module.__class__ = SplitLinear
        self._copies = copies
        self._layers = [module for module in modules if isinstance(module, LateWeights)]
        self._numbers = [
            torch.tensor(float(i), requires_grad=True) for i in range(len(self._layers))
        ]
        for layer, number in zip(self._layers, self._numbers, strict=True):
            layer.number = number
        self._places = {id(p): i for i, p in enumerate(model.parameters())}

    def inputs(
        self,
        result: Tensor | GradientEdge,
        gradient: Tensor | None,
        hidden: Tensor | None,
        parameters: Iterable[Tensor],
        others: OtherGradients,
    ) -> tuple[Tensor | None, LateGradients]:
        """Backward from `result`, with its `gradient`, to `hidden`.

        Returns the gradient of `hidden`, if there is one, and what is left to do for `parameters`.
        others: is given the gradients of those that are not left. One for each stage and step.
        """
        late = LateGradients(others, self._copies)
        matrices = {id(matrix) for layer in self._layers for matrix in layer.late_matrices}
        whole = [p for p in parameters if p.requires_grad and id(p) not in matrices]
        ends = [*whole, *self._numbers, *([] if hidden is None else [hidden])]
        with keeping(late):
            found = torch.autograd.grad(result, ends, gradient, allow_unused=True)
        for parameter, found_gradient in zip(whole, found, strict=False):
            if found_gradient is not None:
                others.add(parameter, found_gradient)
        return None if hidden is None else found[-1], late

    def weights(self, late: LateGradients) -> None:
        """Give the parameters their gradients, in the order of a backward, as autograd does."""
        parts: list[tuple[list[Tensor], _Start]] = [
            (self._layers[number].late_matrices, self._starter(number, kept))
            for number, kept in late.products
        ]
        parts += [([parameter], partial(_given, made)) for parameter, made in late.others.take()]
        late.products = []
        parts.sort(key=lambda part: self._places[id(part[0][0])])
        queue = _Queue([start for _, start in parts])
        # Autograd runs the newest first.
        ends = [_Late.apply(queue, *parameters) for parameters, _ in parts]
        del parts  # each is freed as soon as it was used
        torch.autograd.backward(ends)

    def _starter(self, number: int, kept: list[Tensor]) -> "_Start":
        return partial(self._layers[number].start_gradients, *kept)


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


class _Late(torch.autograd.Function):
    """A zero whose backward gives `parameters` the gradients that are next in `queue`."""

    @staticmethod
    def forward(ctx: Any, queue: _Queue, *parameters: Tensor) -> Tensor:
        ctx.queue = queue
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.queue.next()
