"""A backward in two parts: gradients of inputs now, gradients of weights later.

The first part leaves out one matrix product of each linear layer, which is half of its backward. It
keeps the layer's input and the gradient of its output instead. All other parameters (norms, biases,
embeddings) get their gradients in the first part, and keep them until the second: so autograd's
hooks on parameters see one backward per micro-batch, the second part.

Note [Layers by number]
The blocks of a compiled model share one graph. Each layer therefore has its number in a tensor,
which is an input of the graph. As it requires a gradient, the compiler keeps the operator that
computes this gradient, the one that keeps the tensors.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge


@dataclass
class LateGradients:
    """What a backward of inputs leaves to the backward of weights."""

    copies: bool
    products: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """Number of a layer, its input, the gradient of its output."""
    others: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Parameters whose gradients are there."""


_keeping: list[LateGradients] = []


@torch.library.custom_op("megafrontier::keep_for_weight", mutates_args=())
def _keep_for_weight(inputs: Tensor, gradient: Tensor, number: Tensor) -> Tensor:
    """Keep what the gradient of a layer's matrix is made of. Returns the gradient of `number`."""
    late = _keeping[-1]
    if late.copies:  # compiled code reuses the memory
        inputs, gradient = inputs.clone(), gradient.clone()
    late.products.append((int(number.item()), inputs, gradient))
    return torch.zeros_like(number)


@_keep_for_weight.register_fake
def _(inputs: Tensor, gradient: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(number)


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
        by_number = _keep_for_weight(inputs, gradient, number)
        return gradient @ weight, None, by_bias, by_number


class SplitLinear(nn.Linear):
    """A linear layer whose matrix gets its gradient in `SplitBackward.weights`."""

    number: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """input [.., in_features] → [.., out_features]."""
        if not torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        output: Tensor = _WithoutWeight.apply(input, self.weight, self.bias, self.number)
        return output


class SplitBackward:
    """The backward of a model's parts, in two parts each."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], copies: bool) -> None:
        """Make all `nn.Linear` in `layers` leave their matrices to the second part.

        copies: the layers run in compiled code, which reuses the memory of what it passes on.
        """
        found = [m for layer in layers for m in layer.modules() if type(m) is nn.Linear]
        self._copies = copies
        self._matrices = [linear.weight for linear in found]
        self._numbers = [torch.tensor(float(i), requires_grad=True) for i in range(len(found))]
        for linear, number in zip(found, self._numbers, strict=True):
            linear.__class__ = SplitLinear
            linear.number = number
        self._places = {id(p): i for i, p in enumerate(model.parameters())}

    def inputs(
        self,
        result: Tensor | GradientEdge,
        gradient: Tensor | None,
        hidden: Tensor | None,
        parameters: Iterable[Tensor],
    ) -> tuple[Tensor | None, LateGradients]:
        """Backward from `result`, with its `gradient`, to `hidden`.

        Returns the gradient of `hidden`, if there is one, and what is left to do for `parameters`.
        """
        late = LateGradients(self._copies)
        matrices = set(map(id, self._matrices))
        others = [p for p in parameters if p.requires_grad and id(p) not in matrices]
        ends = [*others, *self._numbers, *([] if hidden is None else [hidden])]
        _keeping.append(late)
        try:
            found = torch.autograd.grad(result, ends, gradient, allow_unused=True)
        finally:
            _keeping.pop()
        late.others = [
            (parameter, found_gradient)
            for parameter, found_gradient in zip(others, found, strict=False)
            if found_gradient is not None
        ]
        return None if hidden is None else found[-1], late

    def weights(self, late: LateGradients) -> None:
        """Give the parameters their gradients, in the order of a backward, as autograd does."""
        makers: list[tuple[Tensor, Callable[[], Tensor]]] = [
            (self._matrices[number], _product(inputs, gradient))
            for number, inputs, gradient in late.products
        ]
        makers += [(parameter, _same(gradient)) for parameter, gradient in late.others]
        late.products, late.others = [], []  # each is freed as soon as it was used
        makers.sort(key=lambda maker: self._places[id(maker[0])])
        # Autograd runs the newest first.
        torch.autograd.backward([_Late.apply(parameter, make) for parameter, make in makers])


def _product(inputs: Tensor, gradient: Tensor) -> Callable[[], Tensor]:
    return lambda: gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)


def _same(gradient: Tensor) -> Callable[[], Tensor]:
    return lambda: gradient


class _Late(torch.autograd.Function):
    """A zero whose backward gives `parameter` the gradient that `make` computes."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        make, ctx.make = ctx.make, None
        return make(), None
