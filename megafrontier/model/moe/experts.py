"""The experts of a block, and their matrix products over tokens sorted by expert."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megafrontier.config import ModelConfig, MoEConfig
from megafrontier.model.init import matrix_std
from megafrontier.model.mlp import activate, up_rows
from megafrontier.model.moe.products import (
    Multiply,
    Product,
    add_biases,
    choose_product,
    grouped_product,
    loop_product,
    matrix_gradients,
)
from megafrontier.model.recompute.deferred import DeferrableProduct
from megafrontier.parallel.param_spec import ParameterKind, ParamSpec, set_spec

EXPERT_AXES = ("tensor", "expert_data")
"""The axes over which experts are replicated. Tensor ranks have whole experts, and route the tokens
that they have between the matrices."""


class Experts(nn.Module):
    """MLPs whose matrices lie one after another in a tensor.

    up: [experts, rows, hidden], with a gate the rows of the gate, then those of the up projection.
    down: [experts, hidden, ffn_hidden]. Biases, if there are any: up_bias [experts, rows],
    down_bias [experts, hidden].
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.activate: Callable[[Tensor, str], Tensor] = activate
        """May be compiled."""
        width = moe.ffn_hidden or config.mlp_hidden
        up, down = matrix_std(config), matrix_std(config, to_residual=True)
        self.up = _make((moe.experts, up_rows(config, width), config.hidden), up)
        self.down = _make((moe.experts, config.hidden, width), down)
        self.up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if moe.bias:
            self.up_bias = _make((moe.experts, up_rows(config, width)), kind="bias")
            self.down_bias = _make((moe.experts, config.hidden), kind="bias")
        self.up_product = ExpertProduct(self, "up")
        self.down_product = ExpertProduct(self, "down")

    @property
    def count(self) -> int:
        """The number of experts here."""
        return self.up.shape[0]

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """tokens [n, hidden] sorted by expert, counts int64 [experts] → [n, hidden].

        An expert without tokens gets a gradient of zeros.
        """
        product = self.product(tokens)
        if not len(tokens):  # a batched or grouped product may refuse it
            product = loop_product
        return product(tokens, counts, self.mlps)

    def mlps(self, multiply: Multiply, rows: Tensor, counts: Tensor) -> Tensor:
        """`ExpertMLPs` of these experts."""
        grouped = self.product(rows) is grouped_product
        raised = add_biases(self.up_product(multiply, rows, counts), counts, self.up_bias, grouped)
        lowered = self.down_product(multiply, self.activate(raised, self.activation), counts)
        return add_biases(lowered, counts, self.down_bias, grouped)

    def product(self, tokens: Tensor) -> Product:
        """The product for tokens of this type on this device."""
        sizes = self.up.shape[1], *self.down.shape[1:]
        return choose_product(tokens.device, tokens.dtype, sizes)


class ExpertProduct(DeferrableProduct):
    """The product with the up or the down matrices of experts. It has no parameters itself."""

    def __init__(self, experts: Experts, name: str) -> None:
        super().__init__()
        self._of = experts, name  # in a tuple, so that torch does not take it for a child

    @property
    def matrices(self) -> list[Tensor]:
        return [getattr(*self._of)]

    def forward(self, multiply: Multiply, rows: Tensor, counts: Tensor) -> Tensor:
        """The rows of outputs, as of `Multiply`."""
        return self.multiply(lambda own: multiply(rows, counts, own[0]), rows, counts)

    def start_gradients(self, *kept: Tensor) -> Callable[[], Sequence[Tensor]]:
        rows, counts, gradient = kept
        is_grouped = self._of[0].product(rows) is grouped_product
        return lambda: [matrix_gradients(rows, counts, gradient, is_grouped)]


def _make(shape: tuple[int, ...], std: float = 0.0, kind: ParameterKind = "expert") -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape))
    set_spec(parameter, ParamSpec("", shape, kind, axes=EXPERT_AXES, init_std=std, cut="expert"))
    return parameter


def expert_sizes(config: ModelConfig, moe: MoEConfig) -> tuple[int, ...]:
    """The sizes of an expert's matrices, as `choose_product` takes them."""
    width = moe.ffn_hidden or config.mlp_hidden
    return up_rows(config, width), config.hidden, width
