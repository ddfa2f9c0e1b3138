"""The mesh: how splits divide the levels of a machine, and the process groups that follow.

A split takes some ranks of each level for itself. One level's coordinate is (tensor, context, data,
pipeline), innermost first. Expert parallelism is folded: its ranks are the innermost of
context × data, and `expert_data` is the rest of these, so a level's coordinate is also (tensor,
expert, expert_data, pipeline).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist

from megafrontier.common.errors import UserError
from megafrontier.parallel.groups import make_groups
from megafrontier.parallel.hierarchy import CommArbiter, Hierarchy, Levels
from megafrontier.parallel.world import World

AXES = ("tensor", "context", "data", "pipeline")
MIXTURE_AXES = ("tensor", "expert", "expert_data", "pipeline")
"""The same ranks, with context × data divided another way."""
DATA_PARALLEL = ("tensor", "context", "data")
"""The axes over which a parameter is replicated that no split cuts."""
ENDS = "ends"
"""Stands in the axes of a parameter that the first and the last rank of a pipeline both hold, as
the matrix of tied embeddings. Each of them shards its state over the other axes, and their
gradients are summed once a step."""


@dataclass(frozen=True)
class Splits:
    """Over how many ranks each kind of work is divided; 1: not divided."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1

    @classmethod
    def resolve(
        cls, levels: Levels, values: Mapping[str, int | str], prefix: str = "parallel."
    ) -> "Splits":
        """The splits of `values` by name, each a number or a level's name.

        A level's name stands for all ranks up to that level (pipeline: from the outermost level
        down to it) that no other split takes. `prefix` precedes the names in errors. Raises
        UserError for an unknown level, and for a number that does not fill the levels one after
        the other.
        """
        sizes = _divide(levels, {name: values.get(name, 1) for name in asdict(cls())}, prefix)
        return cls(**{name: prod(sizes[name]) for name in asdict(cls())})


def _divide(
    levels: Levels, values: Mapping[str, int | str], prefix: str = "parallel."
) -> dict[str, tuple[int, ...]]:
    """The size of each axis at each level. Raises UserError as `Splits.resolve` does."""
    sizes = {}
    free = levels.sizes
    for axis in ("tensor", "context", "pipeline"):
        sizes[axis] = _take(levels, free, axis, values[axis], prefix)
        free = _divided(free, sizes[axis])
    sizes["data"] = free
    free = tuple(c * d for c, d in zip(sizes["context"], free, strict=True))
    sizes["expert"] = _take(levels, free, "expert", values["expert"], prefix)
    sizes["expert_data"] = _divided(free, sizes["expert"])
    return sizes


def _divided(sizes: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(size // part for size, part in zip(sizes, by, strict=True))


def _take(
    levels: Levels, free: tuple[int, ...], axis: str, value: int | str, prefix: str
) -> tuple[int, ...]:
    """The ranks that a split takes at each level of the `free` ones. Raises UserError."""
    # The pipeline fills the levels from outside, because stages exchange the least.
    order = -1 if axis == "pipeline" else 1
    names, free = levels.names[::order], free[::order]
    if isinstance(value, str):
        if value not in names:
            known = ", ".join(levels.names)
            raise UserError(
                f"{prefix}{axis}: no level {value!r} on this machine, need a whole number "
                f"or one of {known}"
            )
        value = prod(free[: names.index(value) + 1])
    taken = _fill(value, free)
    if taken is None:
        steps = " × ".join(f"{n} {s}" for n, s in zip(names, free, strict=True))
        fits = ", ".join(str(n) for n in range(1, prod(free) + 1) if _fill(n, free))
        raise UserError(
            f"{prefix}{axis}: {value}, does not fill the levels ({steps} ranks without other "
            f"splits) one after the other, need one of {fits}"
        )
    return taken[::order]


def _fill(count: int, free: Sequence[int]) -> tuple[int, ...] | None:
    """The ranks that `count` takes at each level, which fill a level before they enter the next;
    None if `count` does not fit."""
    taken = []
    for size in free:
        here = min(count, size)
        if here < 1 or max(count, size) % here:
            return None
        taken.append(here)
        count //= here
    return tuple(taken) if count == 1 else None


@dataclass(frozen=True)
class MeshShape:
    """The splits on the levels of a machine, without processes. Raises UserError if they do not
    fit.

    Every method that takes axes accepts any of `AXES` or any of `MIXTURE_AXES`, not both.
    """

    levels: Levels
    splits: Splits = field(default_factory=Splits)

    def __post_init__(self) -> None:
        _ = self.sizes  # raises

    @cached_property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """The size of each axis at each level."""
        return _divide(self.levels, asdict(self.splits))

    def over(self, axes: Sequence[str]) -> Levels:
        """The levels with the sizes of `axes` alone, without `ENDS`; 1 where nothing is left."""
        sizes = zip(*(self.sizes[axis] for axis in _basis(axes) if axis in axes), strict=True)
        return Levels(self.levels.names, tuple(map(prod, sizes)))

    def peers(self, rank: int, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """At each level the ranks that differ from `rank` only there and only in the coordinates of
        `axes`, in the order of these. `rank` is one of them."""
        found, stride = [], 1
        for level, size in enumerate(self.levels.sizes):
            own, step, steps = rank // stride % size, 1, [0]
            first = rank - own * stride
            for axis in _basis(axes):
                count = self.sizes[axis][level]
                own, here = divmod(own, count)
                taken = range(count) if axis in axes else (here,)
                steps = [inner + step * other for other in taken for inner in steps]
                step *= count
            found.append(tuple(first + other * stride for other in steps))
            stride *= size
        return tuple(found)

    def joined_peers(
        self, rank: int, axes: Sequence[str], inner: Collection[int]
    ) -> tuple[tuple[int, ...], ...]:
        """`peers` at each level of `over(axes).joined(inner)`."""
        found, steps = list[tuple[int, ...]](), [0]
        for level, ranks in enumerate(self.peers(rank, axes)):
            steps = [step + other - rank for other in ranks for step in steps]
            is_inner = level in inner
            found.append((rank,) if is_inner else tuple(rank + step for step in steps))
            steps = steps if is_inner else [0]
        return tuple(found)

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """The number of `rank` among the ranks that differ from it only in `axes`, innermost level
        first."""
        own = [peers.index(rank) for peers in self.peers(rank, axes)]
        return self.over(axes).rank_at(own)

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` in the pipeline's coordinate alone, in the order of the
        pipeline."""
        peers = self.peers(rank, ("pipeline",))
        steps = [[other - rank for other in at] for at in peers]
        over = self.over(("pipeline",))
        return tuple(
            rank + sum(step[at] for step, at in zip(steps, over.coordinates(number), strict=True))
            for number in range(over.ranks)
        )


def _basis(axes: Sequence[str]) -> tuple[str, ...]:
    """All axes among which `axes` are. Raises ValueError if they are not of one such set."""
    basis = MIXTURE_AXES if {"expert", "expert_data"} & set(axes) else AXES
    if not set(axes) - {ENDS} <= set(basis):
        raise ValueError(f"axes {tuple(axes)}, need some of {AXES}, or some of {MIXTURE_AXES}")
    return basis


class Mesh:
    """The ranks of a run in the shape that the splits give them, and this rank's groups.

    `world` is all ranks: the control plane. `hierarchy` gives the levels of a kind of parameter or
    of a split. Hierarchies with the same peers at a level share a group there, and all have one
    `arbiter`: their collectives must go through the same comm streams, in program order.
    """

    def __init__(
        self, shape: MeshShape, world: World, timeout: timedelta = timedelta(minutes=10)
    ) -> None:
        """`timeout` applies to every collective of the groups."""
        self.shape, self.world = shape, world
        self.arbiter = CommArbiter()
        self.timeout = timeout
        self._hierarchies: dict[tuple[str, ...], Hierarchy] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._made: dict[str, int] = {}

    @classmethod
    def single(cls, levels: Levels, device: torch.device) -> "Mesh":
        """The mesh of a single process. All levels have size 1."""
        return cls(MeshShape(levels), World.single(device))

    @property
    def levels(self) -> Levels:
        """The machine's levels, which hold all ranks."""
        return self.shape.levels

    @property
    def splits(self) -> Splits:
        return self.shape.splits

    @property
    def rank(self) -> int:
        """This rank's number among all ranks."""
        return self.world.rank

    @property
    def device(self) -> torch.device:
        return self.world.device

    @cached_property
    def data_rank(self) -> int:
        """Which of `data_size` equal parts of a batch this rank reads. Ranks that differ only in
        another coordinate read the same samples."""
        return self.shape.index(self.rank, ("data",))

    @property
    def data_size(self) -> int:
        return self.shape.over(("data",)).ranks

    @cached_property
    def tensor_rank(self) -> int:
        """This rank's number among those that share its matrices."""
        return self.shape.index(self.rank, ("tensor",))

    @cached_property
    def work_rank(self) -> int:
        """This rank's number among those that read the same samples and do other parts of the
        work."""
        return self.shape.index(self.rank, ("tensor", "context"))

    @cached_property
    def pipeline_rank(self) -> int:
        """This rank's number in its pipeline."""
        return self.shape.index(self.rank, ("pipeline",))

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss and tokens count in their sum over all ranks: the ranks of a
        tensor split have the same. Ranks without the last stage of a pipeline have 0 of both."""
        return self.tensor_rank == 0

    def hierarchy(self, axes: Sequence[str] = DATA_PARALLEL) -> Hierarchy:
        """The levels over `axes`: any of `AXES` or any of `MIXTURE_AXES`.

        The first call for some axes makes the groups, so all ranks must call it in the same order.
        """
        axes = tuple(axis for axis in (*_basis(axes), ENDS) if axis in axes)
        if ENDS in axes:
            return self._with_ends(axes)
        if axes not in self._hierarchies:
            peers = self.shape.peers(self.rank, axes)
            self._make_groups("+".join(axes), peers)
            groups = tuple(self._groups[ranks] for ranks in peers)
            levels, outside = self.shape.over(axes), self._outside(axes)
            self._hierarchies[axes] = Hierarchy(
                levels, peers, groups, self.world, self.arbiter, outside
            )
        return self._hierarchies[axes]

    def joined(self, axes: Sequence[str], inner: Collection[int]) -> Hierarchy:
        """`hierarchy` of levels of which the `inner` ones are joined to the next level further out
        (`Levels.joined`). The call makes groups, so all ranks must make it in the same order."""
        if not inner:
            return self.hierarchy(axes)
        peers = self.shape.joined_peers(self.rank, axes, inner)
        self._make_groups("+".join(axes), peers)
        groups = tuple(self._groups[ranks] for ranks in peers)
        levels, outside = self.shape.over(axes).joined(inner), self._outside(axes)
        return Hierarchy(levels, peers, groups, self.world, self.arbiter, outside)

    def _with_ends(self, axes: tuple[str, ...]) -> Hierarchy:
        """The hierarchy of the other axes with one more level: both ends of this pipeline."""
        if axes not in self._hierarchies:
            inner = self.hierarchy(axes[:-1])
            ends = self.shape.pipeline_ranks(self.rank)
            ends = (ends[0], ends[-1])
            crossed = self.levels.level_between(*ends)
            self._hierarchies[axes] = inner.extended(ENDS, ends, self.group(ends), crossed)
        return self._hierarchies[axes]

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks, of which this is one; None for a single one. All of them call
        it, after the same number of other groups."""
        if ranks not in self._groups:
            self._make_groups("pipeline", [ranks])
        return self._groups[ranks]

    def levels_of_groups(self) -> dict[str, tuple[str, bool]]:
        """By torch's name of each group that this rank has made: the level that it crosses, and
        whether it is one of the control plane."""
        names = self.levels.names
        found: dict[str, tuple[str, bool]] = {
            group.group_name: (names[self.levels.level_between(ranks[0], ranks[-1])], False)
            for ranks, group in self._groups.items()
            if group is not None
        }
        for name, group in zip(names, self.world.groups, strict=True):
            if group is not None:
                found[group.group_name] = name, True
        return found

    def _outside(self, axes: Sequence[str]) -> tuple[tuple[str, int], ...]:
        others = [axis for axis in _basis(axes) if axis not in axes]
        split = [axis for axis in others if self.shape.over((axis,)).ranks > 1]
        return tuple((axis, self.shape.index(self.rank, (axis,))) for axis in split)

    def linked(self) -> list[Hierarchy]:
        """Hierarchies that together reach all peers of this rank, for tests of links. Splits whose
        activations move in every layer have one each, because a rank waits for these peers most."""
        split = [(axis,) for axis in ("tensor", "context") if getattr(self.splits, axis) > 1]
        return [self.hierarchy(axes) for axes in (DATA_PARALLEL, ("pipeline",), *split)]

    def _make_groups(self, name: str, peers: Sequence[tuple[int, ...]]) -> None:
        new = [ranks for ranks in peers if ranks not in self._groups]
        groups = make_groups(new, self.device, self.timeout)
        self._groups |= zip(new, groups, strict=True)
        made = sum(group is not None for group in groups)
        self._made[name] = self._made.get(name, 0) + made

    def describe_groups(self) -> str:
        """One line: the communicators of a rank, by the axes for which they were made first."""
        control = sum(group is not None for group in self.world.groups)
        made = {"control": control, **self._made}
        parts = ", ".join(f"{count} {name}" for name, count in made.items() if count)
        return f"communicators: {sum(made.values())} a rank ({parts})"

    def drain_and_barrier(self) -> None:
        """Wait until no rank has a collective in flight."""
        self.arbiter.drain()
        self.world.barrier()
