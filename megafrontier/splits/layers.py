"""Linear layers and norms that are divided over the ranks of a tensor split."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megafrontier.model.kernels.float8 import Float8Layer
from megafrontier.model.norms import OffsetRMSNorm
from megafrontier.parallel.param_spec import set_spec, spec_of
from megafrontier.splits.tokens import (
    TokenGroup,
    gather_linear,
    gather_linear_weights,
    gather_tokens,
    linear_reduce,
    linear_reduce_weight,
)


class Cutter:
    """Makes this rank's parts of parameters, with their specs."""

    def __init__(self, group: TokenGroup, names: dict[int, str]) -> None:
        self.group = group
        self._names = names

    def cut(self, parameter: Tensor, dim: int, start: int, count: int) -> nn.Parameter:
        """This rank's equal part of [start, start + count) of dimension `dim`."""
        size = count // self.group.size
        first = start + self.group.index * size
        name = self._names[id(parameter)]
        assert isinstance(parameter, nn.Parameter)
        spec = spec_of(name, parameter)
        box = [(0, length) for length in spec.shape]
        box[dim] = (first, first + size)
        part = nn.Parameter(parameter.detach().narrow(dim, first, size).clone())
        axes = tuple(axis for axis in spec.axes if axis != "tensor")
        set_spec(part, replace(spec, box=tuple(box), axes=axes))
        return part


class ColumnLinear(Float8Layer):
    """A linear layer cut by its outputs: tokens [1, n / size, h] → [1, n, outputs / size].

    Its matrix may be several ones below each other, such as query, key and value. Each is cut.
    """

    def __init__(self, whole: nn.Linear, rows: Sequence[int], cutter: Cutter) -> None:
        """`rows`: of each matrix."""
        super().__init__()
        self.group = cutter.group.number
        # Operators know the group by its number. A stage without embedding and head keeps it here.
        self.ranks = cutter.group
        starts = [sum(rows[:i]) for i in range(len(rows))]
        self.weights = nn.ParameterList(
            cutter.cut(whole.weight, 0, start, count)
            for start, count in zip(starts, rows, strict=True)
        )
        self.biases = nn.ParameterList(
            cutter.cut(whole.bias, 0, start, count)
            for start, count in zip(starts, rows, strict=True)
            if whole.bias is not None
        )

    def forward(self, hidden: Tensor) -> Tensor:
        tokens, weights, biases = hidden.flatten(0, -2), list(self.weights), list(self.biases)
        options = self.group, self.number, self.trained_float8
        return gather_linear(tokens, weights, biases, *options)[None]

    @property
    def late_matrices(self) -> list[Tensor]:
        return list(self.weights)

    def start_gradients(self, *kept: Tensor) -> Callable[[], Sequence[Tensor]]:
        part, gradient = kept
        return gather_linear_weights(part, gradient, self.late_matrices, self.group, self.float8)


class QKVLinear(ColumnLinear):
    """`ColumnLinear` of queries, keys and values. If there are more ranks than key and value heads,
    each rank projects a part of a head, and `copies` ranks exchange their parts of the same one."""

    def __init__(self, whole: nn.Linear, rows: Sequence[int], copies: int, cutter: Cutter) -> None:
        super().__init__(whole, rows, cutter)
        self.copies = copies
        self.first = cutter.group.index // copies * copies

    def forward(self, hidden: Tensor) -> Tensor:
        projected = super().forward(hidden)
        if self.copies == 1:
            return projected
        query, key, value = projected[0].split([len(weight) for weight in self.weights], -1)
        return torch.cat([query, self._whole_head(key), self._whole_head(value)], -1)[None]

    def _whole_head(self, part: Tensor) -> Tensor:
        """[n, head_size / copies] → [n, head_size]."""
        parts = gather_tokens(part.contiguous(), self.group).view(-1, *part.shape)
        return parts[self.first : self.first + self.copies].transpose(0, 1).flatten(1)


class RowLinear(Float8Layer):
    """A linear layer cut by its inputs: tokens [.., inputs / size] → [1, n / size, h]."""

    def __init__(self, whole: nn.Linear, cutter: Cutter) -> None:
        super().__init__()
        self.group = cutter.group.number
        self.weight = cutter.cut(whole.weight, 1, 0, whole.in_features)
        self.bias = whole.bias

    def forward(self, inputs: Tensor) -> Tensor:
        options = self.group, self.number, self.trained_float8
        hidden = linear_reduce(inputs.flatten(0, -2), self.weight, *options)
        return (hidden if self.bias is None else hidden + self.bias)[None]

    @property
    def late_matrices(self) -> list[Tensor]:
        return [self.weight]

    def start_gradients(self, *kept: Tensor) -> Callable[[], Sequence[Tensor]]:
        inputs, gradient = kept
        return linear_reduce_weight(inputs, gradient, self.group, self.float8)


class GatherTokens(nn.Module):
    """Values of this rank's tokens [.., w] → those of all tokens [1, n, w]."""

    def __init__(self, cutter: Cutter) -> None:
        super().__init__()
        self.group = cutter.group.number
        self.ranks = cutter.group

    def forward(self, values: Tensor) -> Tensor:
        return gather_tokens(values.flatten(0, -2), self.group)[None]


def cut_rows(whole: nn.Linear, cutter: Cutter) -> nn.Linear:
    """A linear layer of all tokens, with this rank's part of its outputs."""
    rows = whole.out_features // cutter.group.size
    part = nn.Linear(whole.in_features, rows, bias=False, device="meta")
    part.weight = cutter.cut(whole.weight, 0, 0, whole.out_features)
    return part


class DividedHeadsNorm(nn.Module):
    """An RMS norm of all heads together, of which this rank has some: the ranks exchange a sum of
    squares for each token.

    Its weight is whole on each rank, which uses the part of its heads: the engine sums the gradient
    over the ranks, as of other norms. With fewer heads of keys than ranks, `copies` ranks have the
    same head.
    """

    def __init__(self, whole: nn.RMSNorm, first: int, width: int, copies: int, group: TokenGroup):
        """This rank's heads are the elements [first, first + width) of the whole norm's."""
        super().__init__()
        self.weight = whole.weight
        self.normalized_shape = (width,)
        self.has_offset = isinstance(whole, OffsetRMSNorm)
        self.group = group
        self._whole_width, self._eps = whole.normalized_shape[0], whole.eps or 0.0
        self._first, self._copies = first, copies

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, 1, width] → the same shape and type."""
        values = x.float()
        own = values.square().sum(-1).view(-1, 1)
        squares = gather_tokens(own, self.group.number).view(self.group.size, -1).sum(0)
        scale = torch.rsqrt(squares / (self._copies * self._whole_width) + self._eps)
        weight = self.weight[self._first : self._first + self.normalized_shape[0]].float()
        weight = 1.0 + weight if self.has_offset else weight
        return (values * scale.view(*x.shape[:-1], 1) * weight).to(x.dtype)
