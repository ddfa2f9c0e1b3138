"""The linear layer of all modules. Its fields say how it multiplies, when its matrix gets its
gradient, and how ranks divide it.

| cut | this rank has | input | output |
|---|---|---|---|
| None | all | any tokens | the same tokens |
| columns | a part of the outputs of each matrix | this rank's tokens | all tokens |
| rows | a part of the inputs | all tokens | this rank's tokens |
| heads | a part of the outputs | all tokens | all tokens |
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafrontier.model.kernels.float8 import MULTIPLE, float8_linear, weight_gradient
from megafrontier.model.ranks import DividedModule, TensorRanks
from megafrontier.model.recompute.deferred import DeferrableProduct
from megafrontier.parallel.param_spec import Cut, ParamSpec, set_spec


class Linear(DeferrableProduct, DividedModule):
    """inputs [.., inputs] → [.., outputs].

    Its matrix may be several ones below each other, such as query, key and value. If these are cut,
    `weight` and `bias` are lists of their parts.
    """

    weight: nn.Parameter | nn.ParameterList
    bias: nn.Parameter | nn.ParameterList | None
    float8: int | None = None
    """The number of the formats in which it multiplies while it trains. None: its own type."""

    def __init__(
        self,
        inputs: int,
        outputs: int | Sequence[int],
        std: float,
        *,
        bias: bool = False,
        cut: Cut | None = None,
        head_rows: int = 0,
        valid_rows: int | None = None,
    ) -> None:
        """`outputs`: of all, or of each matrix. `std`, `head_rows`, `valid_rows`: as in
        `ParamSpec`. Values are torch's default until they are initialised."""
        super().__init__()
        self.cut, self._head_rows = cut, head_rows
        self._outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        parts = tuple(self._outputs) if len(self._outputs) > 1 else ()
        whole: dict[str, Any] = nn.Linear(inputs, sum(self._outputs), bias)._parameters
        shape = sum(self._outputs), inputs
        spec = ParamSpec(
            "",
            shape,
            "matrix",
            init_std=std,
            valid_rows=valid_rows,
            head_rows=head_rows,
            cut=cut,
            parts=parts,
        )
        self.weight, self.bias = whole["weight"], None
        set_spec(whole["weight"], spec)
        if bias:
            # After a sum over ranks each of them adds all of it.
            cut = None if cut == "rows" else cut
            self.bias = whole["bias"]
            set_spec(whole["bias"], ParamSpec("", shape[:1], "bias", cut=cut, parts=parts))

    @property
    def matrices(self) -> list[Tensor]:
        return _as_list(self.weight)

    @property
    def widths(self) -> list[int]:
        """The outputs of each matrix. If ranks divide them, those that this rank returns."""
        size = 1 if self.ranks is None else self.ranks.size
        return [max(count // size, self._head_rows) for count in self._outputs]

    def forward(self, inputs: Tensor) -> Tensor:
        float8, ranks = self.float8 if self.training else None, self.ranks
        biases = [] if self.bias is None else _as_list(self.bias)
        if ranks is None or self.cut not in ("columns", "rows"):
            return self.multiply(lambda own: _linear(inputs, own[0], biases, float8), inputs)
        inputs = inputs.flatten(0, -2)
        if self.cut == "columns":
            found = self.multiply(
                lambda own: ranks.gather_linear(inputs, own, biases, float8), inputs
            )
            return self._with_whole_heads(found, ranks)[None]
        found = self.multiply(lambda own: ranks.linear_reduce(inputs, own[0], float8), inputs)
        return (found + biases[0] if biases else found)[None]

    def _with_whole_heads(self, projected: Tensor, ranks: TensorRanks) -> Tensor:
        """[n, w] → [n, sum of `widths`]. If there are more ranks than heads, each rank projects a
        part of a head, and the ranks that use the same one exchange their parts."""
        if sum(self.widths) == projected.shape[-1]:
            return projected
        parts = projected.split([len(matrix) for matrix in self.matrices], -1)
        heads = [
            _whole_head(part, width // part.shape[-1], ranks)
            for part, width in zip(parts, self.widths, strict=True)
        ]
        return torch.cat(heads, -1)

    def start_gradients(self, *kept: Tensor) -> Callable[[], Sequence[Tensor]]:
        inputs, gradient = (tensor.flatten(0, -2) for tensor in kept)
        if self.ranks is not None and self.cut == "columns":
            given = inputs, gradient, self.matrices, self.float8
            return self.ranks.start_gather_linear_weights(*given)
        if self.ranks is not None and self.cut == "rows":
            return self.ranks.start_linear_reduce_weight(inputs, gradient, self.float8)
        return lambda: [weight_gradient(gradient, inputs, self.float8)]


def _as_list(values: Tensor | nn.ParameterList) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else list(values)


def _linear(inputs: Tensor, weight: Tensor, biases: Sequence[Tensor], float8: int | None) -> Tensor:
    if float8 is None:
        return F.linear(inputs, weight, *biases)
    found = float8_linear(inputs, weight, float8)
    return found + biases[0] if biases else found


def _whole_head(part: Tensor, copies: int, ranks: TensorRanks) -> Tensor:
    """[n, head_size / copies] → [n, head_size], of this rank and its neighbours."""
    if copies == 1:
        return part
    first = ranks.index // copies * copies
    parts = ranks.gather_tokens(part.contiguous()).view(-1, *part.shape)
    return parts[first : first + copies].transpose(0, 1).flatten(1)


def linear_layers(modules: Iterable[nn.Module]) -> list[Linear]:
    """The linear layers in `modules`."""
    inner = (layer for module in modules for layer in module.modules())
    return [layer for layer in inner if isinstance(layer, Linear)]


def use_float8(modules: Iterable[nn.Module], float8: int) -> None:
    """Let the linear layers in `modules` multiply in formats of this number, if the sizes of their
    matrices fit. The parameters stay as they are."""
    for layer in linear_layers(modules):
        sizes = (size for matrix in layer.matrices for size in matrix.shape)
        if not any(size % MULTIPLE for size in sizes):
            layer.float8 = float8
