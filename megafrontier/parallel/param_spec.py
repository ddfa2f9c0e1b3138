"""What a parameter is in the whole model, and which part of it this rank holds.

A module sets a spec where it makes a parameter. A module of somebody else's needs none: `spec_of`
then gives that of a whole parameter, which all ranks have.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.parallel.mesh import DATA_PARALLEL

ParameterKind = Literal["matrix", "norm", "bias", "embedding", "expert", "router"]
Role = Literal["hidden", "output", "vector"]
Cut = Literal["columns", "rows", "heads", "vocabulary", "expert"]
_ATTRIBUTE = "_megafrontier_spec"


@dataclass(frozen=True)
class SizeRatio:
    """The size of a parameter's model relative to a base model. The parameter's optimizer scales
    its values by it (`size_factors` of its class in `optim`)."""

    width: float
    depth: float
    """1 outside the blocks."""
    role: Role
    """hidden: a matrix of which both dimensions grow with the width. output: a matrix from the
    width to a fixed number. vector: all others, and the head, whose logits are scaled instead."""


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of the whole model, and the box of it that this rank holds.

    Raises UserError for a box that is not part of the shape.
    """

    name: str
    """Global name. Empty: the parameter's name in the model that is sharded."""
    shape: tuple[int, ...]
    """Global shape."""
    kind: ParameterKind
    box: tuple[tuple[int, int], ...] = ()
    """[start, stop) in each dimension. Default: all."""
    axes: tuple[str, ...] = DATA_PARALLEL
    """Mesh axes whose ranks hold the same box. Its state is sharded and its gradient summed over
    them."""
    in_root: bool = False
    """It belongs to the root, which stays unsharded, although it lies in a block."""
    init_mean: float = 0.0
    init_std: float = 0.0
    """Initial values are normally distributed. With a deviation of 0 all are the mean."""
    ratio: SizeRatio | None = None
    """Default: values of the optimizer do not depend on the size."""
    valid_rows: int | None = None
    """The global tensor's rows from this one on are padding, initially 0. Default: no padding."""
    head_rows: int = 0
    """Rows of an attention head, if the global tensor is the matrices of several below each other;
    otherwise 0."""
    cut: Cut | None = None
    """What a split divides over its ranks. columns, rows: a linear layer's outputs and inputs, as
    Megatron's column-parallel and row-parallel layers. heads, vocabulary: the rows of attention
    heads or of tokens. expert: by experts. Default: each rank has all."""
    parts: tuple[int, ...] = ()
    """Rows of the matrices that lie below each other in it, if each of them is cut. Default: it is
    cut as one."""

    def __post_init__(self) -> None:
        if not self.box:
            object.__setattr__(self, "box", tuple((0, size) for size in self.shape))
        parts = zip(self.box, self.shape, strict=False)
        is_inside = all(0 <= start <= stop <= size for (start, stop), size in parts)
        if len(self.box) != len(self.shape) or not is_inside:
            raise UserError(f"parameter {self.name}: box {self.box}, need part of {self.shape}")

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def valid_numel(self) -> int:
        """Elements of the global tensor that are not padding."""
        if self.valid_rows is None:
            return prod(self.shape)
        return self.valid_rows * prod(self.shape[1:])


def set_spec(parameter: nn.Parameter, spec: ParamSpec) -> None:
    """Give a parameter a spec.

    Parameters that `copy.deepcopy`, `Module.to_empty` or `load_state_dict(assign=True)` make have
    none: set it again.

    Raises UserError if the spec's box does not have the parameter's shape.
    """
    if spec.local_shape != tuple(parameter.shape):
        raise UserError(
            f"parameter {spec.name}: shape {tuple(parameter.shape)}, need that of its spec's box, "
            f"{spec.local_shape}"
        )
    setattr(parameter, _ATTRIBUTE, spec)


def spec_of(name: str, parameter: nn.Parameter) -> ParamSpec:
    """The spec that was set on a parameter, which gets `name` if it has no name of its own.

    Without one: that of a whole parameter, a `bias` below two dimensions, else a `matrix`.
    """
    spec: ParamSpec | None = getattr(parameter, _ATTRIBUTE, None)
    if spec is None:
        return ParamSpec(name, tuple(parameter.shape), "bias" if parameter.dim() < 2 else "matrix")
    return spec if spec.name else replace(spec, name=name)


def global_ranges(spec: ParamSpec, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ranges of the global tensor, row-major, that hold elements [start, stop) of the box.

    They ascend, and none begins where another ends: a box of whole rows has one range.
    """
    shape, box = spec.shape or (1,), spec.box or ((0, 1),)
    sizes = [stop - start for start, stop in box]
    # Dimensions after `cut` are whole, so a run of the box is contiguous in the global tensor.
    cut = next((dim for dim in range(len(shape) - 1, 0, -1) if sizes[dim] < shape[dim]), 0)
    strides = [prod(shape[dim + 1 :]) for dim in range(cut + 1)]
    length = sizes[cut] * strides[cut]
    for run in range(start // length, -(-stop // length)) if start < stop else ():
        rest, first = run, box[cut][0] * strides[cut]
        for dim in reversed(range(cut)):
            rest, index = divmod(rest, sizes[dim])
            first += (box[dim][0] + index) * strides[dim]
        moved = first - run * length
        yield max(start, run * length) + moved, min(stop, (run + 1) * length) + moved
