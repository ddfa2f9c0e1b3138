"""Activations cut by tokens over the ranks of a split, and the linear layers around the cuts.

Activations move as weights and gradients do: level by level, on the engine's comm streams, counted
in its ledger. A linear layer before or after them is computed in pieces, so that one piece moves
while another is multiplied (the idea of Chang et al. 2024, arXiv:2406.06858, without its kernels).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from math import gcd, prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.comm.rows import RowExchange
from megafrontier.comm.streams import AsyncChain
from megafrontier.comm.wires.block import INT8
from megafrontier.comm.wires.wire import UNCHANGED, WorkWires
from megafrontier.model.kernels.float8 import formats, product, quantized, weight_gradient
from megafrontier.model.recompute.checkpointing import save_results_of
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.partition.engine import Engine

PIECES = 4
"""Pieces of a micro-batch's tokens in a linear layer, if there is overlap."""

_groups: WeakValueDictionary[int, "TokenGroup"] = WeakValueDictionary()
"""By number, because operators take no Python objects."""
_numbers = count()


class TokenGroup:
    """The ranks of a split, each with an equal part of a micro-batch's tokens.

    Tokens are numbered through the rows of a micro-batch. The rank with `index` has the `index`-th
    of `size` equal parts.
    """

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size
        self.number = next(_numbers)
        """What operators get instead of the group."""
        _groups[self.number] = self

    def connect(self, engine: Engine, hierarchy: Hierarchy, wires: WorkWires = UNCHANGED) -> None:
        """Let the activations move over the levels of `hierarchy`, on the streams of `engine`. Call
        it before the first forward."""
        self._engine, self._hierarchy = engine, hierarchy
        self._depth = len(hierarchy.levels.sizes)
        self._wires = wires
        self._collectives: dict[tuple[torch.dtype, bool], LevelCollectives] = {}
        self.rows = RowExchange(self.of_type(torch.float32, is_exact=True), wires)
        """Exchanges rows between these ranks."""

    @property
    def levels(self) -> tuple[int, ...]:
        """The sizes of the levels over which the activations move."""
        return self._hierarchy.levels.sizes

    @property
    def device(self) -> torch.device:
        return self._hierarchy.device

    @property
    def overlaps(self) -> bool:
        """Whether they move beside the computation."""
        return self._engine.overlaps

    def part(self, tokens: Tensor) -> Tensor:
        """This rank's part [n / size, …] of values of all tokens [n, …]."""
        return tokens.chunk(self.size)[self.index]

    def gather(self, part: Tensor, is_exact: bool = False) -> Tensor:
        """All ranks' parts [m, …] as [size · m, …]; with `is_exact` in their own type."""
        chain, out = self.start_gather(part, is_exact)
        self.wait(chain)
        return out

    def reduce(self, tokens: Tensor) -> Tensor:
        """This rank's part [n / size, …] of the sum over ranks of `tokens` [n, …]. The sum is fp32
        and rounded once to the type of `tokens`."""
        found = self.wait(self.start_reduce(tokens.clone()))
        return found.to(tokens.dtype, copy=True).view(-1, *tokens.shape[1:])

    def start_gather(self, part: Tensor, is_exact: bool = False) -> tuple[AsyncChain, Tensor]:
        """Begin to gather. Returns what to wait for, and the result [size · m, …]."""
        out = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        flat, collectives = part.detach().contiguous().view(-1), self.of_type(part.dtype, is_exact)
        chain = collectives.gather(flat, out.view(-1), self._depth, 0, "gather activations")
        return chain, out

    def gather_level(self, part: Tensor, level: int) -> Tensor:
        """The parts [m] of all ranks of this rank's group on the levels up to `level`, exact: in
        the order of their coordinates, those of the innermost level first."""
        ranks = prod(self.levels[: level + 1])
        out, exact = part.new_empty(ranks * len(part)), self.of_type(part.dtype, is_exact=True)
        self.wait(exact.gather(part.contiguous(), out, level + 1, 0, "gather states"))
        return out

    def start_reduce(self, tokens: Tensor) -> AsyncChain:
        """Begin to sum `tokens`, which is overwritten."""
        flat, collectives = tokens.detach().contiguous().view(-1), self.of_type(tokens.dtype)
        return collectives.reduce(flat, 0, self._depth, "reduce activations")

    def of_type(self, dtype: torch.dtype, is_exact: bool = False) -> LevelCollectives:
        """The collectives for activations of `dtype`; with `is_exact`, they send this type."""
        key = dtype, is_exact
        if key not in self._collectives:
            chosen = UNCHANGED if is_exact else self._wires
            self._collectives[key] = self._engine.collectives(
                self._hierarchy, chosen.wires(self._depth, dtype), "activations"
            )
        return self._collectives[key]

    def wait(self, chain: AsyncChain) -> Tensor:
        """Wait for a collective, and note in the ledger how long it took."""
        with self._engine.ledger.waiting("activations"):
            return chain.wait()

    def pieces(self, rows: int, width: int) -> list[slice]:
        """The pieces of each rank's `rows` tokens [width] that move one after another."""
        number = PIECES if self.overlaps and rows >= PIECES else 1
        return cut_pieces(rows, number, INT8.block if self._wires.is_exact else width)

    def gathered_pieces(self, part: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Gather a part [m, …] piece by piece, each under the caller's use of the one before.

        Yields each piece's rows and their tokens of all ranks, [size · rows, …].
        """
        pieces = self.pieces(*part.shape)
        started = self.start_gather(part[pieces[0]])
        for here, following in zip(pieces, [*pieces[1:], None], strict=True):
            chain, tokens = started
            self.wait(chain)
            if following is not None:
                started = self.start_gather(part[following])
            yield here, tokens

    def start_gather_linear_weights(
        self, part: Tensor, gradient: Tensor, weights: Sequence[Tensor], float8: int | None
    ) -> Callable[[], list[Tensor]]:
        """Begin to gather the part again. The result gives the gradients of `gather_linear`'s
        weights."""
        used, (chain, tokens) = formats(float8), self.start_gather(part)

        def finish() -> list[Tensor]:
            self.wait(chain)
            rows = quantized(tokens, used.values).t()
            parts = gradient.split([len(weight) for weight in weights], -1)
            return [product(quantized(part, used.gradients).t(), rows) for part in parts]

        return finish

    def start_linear_reduce_weight(
        self, inputs: Tensor, gradient: Tensor, float8: int | None
    ) -> Callable[[], list[Tensor]]:
        """Begin to gather the gradient of this rank's tokens [n / size, h] again. The result gives
        the gradient of `linear_reduce`'s weight."""
        chain, whole = self.start_gather(gradient)

        def finish() -> list[Tensor]:
            self.wait(chain)
            return [weight_gradient(whole, inputs, float8)]

        return finish

    def rows_of(self, tokens: Tensor, piece: slice) -> Tensor:
        """The rows of a piece in the tokens [size · m, …] of all ranks, as [size, rows, …]."""
        return tokens.view(self.size, -1, *tokens.shape[1:])[:, piece]


def cut_pieces(rows: int, number: int, width: int) -> list[slice]:
    """About `number` equal pieces of `rows` tokens of `width` elements. Each begins with a block of
    int8, so that the message of all rows would have the same blocks."""
    align = INT8.block // gcd(INT8.block, width)
    bounds = [rows * i // number // align * align for i in range(number)]
    return [slice(*pair) for pair in pairwise([*sorted({*bounds}), rows])]


@torch.library.custom_op("megafrontier::gather_tokens", mutates_args=())
def gather_tokens(part: Tensor, group: int) -> Tensor:
    """`TokenGroup.gather` of the group of that number, for the compiler one operator."""
    return _groups[group].gather(part)


@torch.library.custom_op("megafrontier::reduce_tokens", mutates_args=())
def reduce_tokens(tokens: Tensor, group: int) -> Tensor:
    """`TokenGroup.reduce` of the group of that number, for the compiler one operator."""
    return _groups[group].reduce(tokens)


@torch.library.custom_op("megafrontier::gather_linear", mutates_args=())
def gather_linear(
    part: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    group: int,
    float8: int | None,
) -> Tensor:
    """Linear layers side by side of all ranks' tokens: `part` [m, h], weights [w, h] each, and
    biases [w] each or none → [size · m, sum of w]. Saves the part alone for backward.
    `float8`: the number of the formats to multiply in; each piece of tokens has its own scale."""
    ranks, used = _groups[group], formats(float8)
    matrices = [quantized(weight, used.values) for weight in weights]
    out = part.new_empty(ranks.size * part.shape[0], sum(len(weight) for weight in weights))
    for piece, tokens in ranks.gathered_pieces(part):
        columns = ranks.rows_of(out, piece).split([len(weight) for weight in weights], -1)
        rows = quantized(tokens, used.values)
        for i, (matrix, target) in enumerate(zip(matrices, columns, strict=True)):
            found = product(rows, matrix)
            found = found + biases[i] if biases else found
            target.copy_(found.view(target.shape))
    return out


@torch.library.custom_op("megafrontier::gather_linear_backward", mutates_args=())
def _gather_linear_backward(
    gradient: Tensor,
    part: Tensor,
    weights: Sequence[Tensor],
    has_bias: bool,
    group: int,
    has_weights: bool,
    float8: int | None,
) -> list[Tensor]:
    """The gradients of part, weights (if `has_weights`) and biases."""
    ranks, used = _groups[group], formats(float8)
    finish = None
    if has_weights:
        finish = ranks.start_gather_linear_weights(part, gradient, weights, float8)
    matrices = [quantized(weight, used.values).t() for weight in weights]
    widths = [len(weight) for weight in weights]
    by_part, reducing = torch.empty_like(part), []
    for piece in ranks.pieces(*part.shape):
        rows = ranks.rows_of(gradient, piece).flatten(0, 1).split(widths, -1)
        partial = product(quantized(rows[0], used.gradients), matrices[0])
        for row, matrix in zip(rows[1:], matrices[1:], strict=True):
            if isinstance(matrix, Tensor):
                partial.addmm_(row, matrix.t())
            else:
                partial += product(quantized(row, used.gradients), matrix)
        reducing.append((piece, ranks.start_reduce(partial)))
    by_weights = finish() if finish else []
    by_biases = [columns.sum(0) for columns in gradient.split(widths, -1)] if has_bias else []
    for piece, chain in reducing:
        by_part[piece] = ranks.wait(chain).view(by_part[piece].shape)
    return [by_part, *by_weights, *by_biases]


@torch.library.custom_op("megafrontier::linear_reduce", mutates_args=())
def linear_reduce(inputs: Tensor, weight: Tensor, group: int, float8: int | None) -> Tensor:
    """A linear layer cut by its inputs: [n, w] and weight [h, w] → this rank's tokens [n / size, h]
    of the sum over ranks. `float8`: as of `gather_linear`."""
    ranks, used = _groups[group], formats(float8)
    matrix = quantized(weight, used.values)
    out = inputs.new_empty(inputs.shape[0] // ranks.size, len(weight))
    reducing = []
    for piece in ranks.pieces(*out.shape):
        rows = quantized(ranks.rows_of(inputs, piece).flatten(0, 1), used.values)
        partial = product(rows, matrix)
        reducing.append((piece, ranks.start_reduce(partial)))
    for piece, chain in reducing:
        out[piece] = ranks.wait(chain).view(out[piece].shape)
    return out


@torch.library.custom_op("megafrontier::linear_reduce_backward", mutates_args=())
def _linear_reduce_backward(
    gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    group: int,
    has_weight: bool,
    float8: int | None,
) -> list[Tensor]:
    """The gradients of inputs and weight (if `has_weight`), of those of this rank's tokens
    [n / size, h]."""
    ranks, used = _groups[group], formats(float8)
    by_inputs, matrix = torch.empty_like(inputs), quantized(weight, used.values).t()
    whole = gradient.new_empty(len(inputs) if has_weight else 0, len(weight))
    for piece, tokens in ranks.gathered_pieces(gradient):
        if has_weight:
            ranks.rows_of(whole, piece).copy_(tokens.view(ranks.size, -1, len(weight)))
        target = ranks.rows_of(by_inputs, piece)
        target.copy_(product(quantized(tokens, used.gradients), matrix).view(target.shape))
    return [by_inputs, weight_gradient(whole, inputs, float8)] if has_weight else [by_inputs]


@gather_tokens.register_fake
def _(part: Tensor, group: int) -> Tensor:
    return part.new_empty(_groups[group].size * part.shape[0], *part.shape[1:])


@reduce_tokens.register_fake
def _(tokens: Tensor, group: int) -> Tensor:
    return tokens.new_empty(tokens.shape[0] // _groups[group].size, *tokens.shape[1:])


@gather_linear.register_fake
def _(
    part: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], group: int, *_: Any
) -> Tensor:
    width = sum(len(weight) for weight in weights)
    return part.new_empty(_groups[group].size * part.shape[0], width)


@_gather_linear_backward.register_fake
def _(
    gradient: Tensor,
    part: Tensor,
    weights: Sequence[Tensor],
    has_bias: bool,
    group: int,
    has_weights: bool,
    *_: Any,
) -> list[Tensor]:
    biases = [weight.new_empty(len(weight)) for weight in weights] if has_bias else []
    found = [part, *weights] if has_weights else [part]
    return [torch.empty_like(tensor) for tensor in found] + biases


@linear_reduce.register_fake
def _(inputs: Tensor, weight: Tensor, group: int, *_: Any) -> Tensor:
    return inputs.new_empty(inputs.shape[0] // _groups[group].size, len(weight))


@_linear_reduce_backward.register_fake
def _(
    gradient: Tensor, inputs: Tensor, weight: Tensor, group: int, has_weight: bool, *_: Any
) -> list[Tensor]:
    return [torch.empty_like(t) for t in ([inputs, weight] if has_weight else [inputs])]


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[-1]


def _keep_gather_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    part, weights, biases, ctx.group, ctx.float8 = inputs
    ctx.has_bias = bool(biases)
    ctx.save_for_backward(part, *weights)


def _keep_linear_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, weight, ctx.group, ctx.float8 = inputs
    ctx.save_for_backward(values, weight)


def _back_gather_linear(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    part, *weights = ctx.saved_tensors
    has_weights = any(ctx.needs_input_grad[1])  # not those whose gradients are deferred
    by_part, *rest = _gather_linear_backward(
        gradient.contiguous(), part, weights, ctx.has_bias, ctx.group, has_weights, ctx.float8
    )
    count = len(weights) if has_weights else 0
    return by_part, rest[:count] or [None] * len(weights), rest[count:], None, None


def _back_linear_reduce(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    inputs, weight = ctx.saved_tensors
    by_inputs, *by_weight = _linear_reduce_backward(
        gradient.contiguous(), inputs, weight, ctx.group, ctx.needs_input_grad[1], ctx.float8
    )
    return by_inputs, *(by_weight or [None]), None, None


# Each rank uses all tokens that it gathers, so their gradients are summed over the ranks.
gather_tokens.register_autograd(
    lambda ctx, gradient: (reduce_tokens(gradient, ctx.group), None), setup_context=_keep_group
)
reduce_tokens.register_autograd(
    lambda ctx, gradient: (gather_tokens(gradient, ctx.group), None), setup_context=_keep_group
)
gather_linear.register_autograd(_back_gather_linear, setup_context=_keep_gather_linear)
linear_reduce.register_autograd(_back_linear_reduce, setup_context=_keep_linear_reduce)
# They are matrix products, and to compute them again would move the activations again.
save_results_of(gather_linear._opoverload, linear_reduce._opoverload)
