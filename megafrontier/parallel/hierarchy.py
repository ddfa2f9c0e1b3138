"""The levels of a machine, and one rank's process groups at each of them: the data plane."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist

from megafrontier.common.errors import UserError
from megafrontier.config import LevelConfig
from megafrontier.parallel.world import World

SHARD_ALIGNMENT = 128
"""Elements: every shard is a multiple of 256 bytes in a 2-byte type (RCCL is slow below)."""


@dataclass(frozen=True)
class Levels:
    """The levels' names and sizes, fastest link first. Rank = c₀ + s₀ · (c₁ + s₁ · (c₂ + …))."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def resolve(cls, levels: Mapping[str, LevelConfig], ranks: int) -> "Levels":
        """Fill in the outermost size from the number of ranks. If they are fewer than the sizes
        hold, the levels shrink, as in `_shrunk`.

        Raises UserError for more ranks that the sizes do not divide.
        """
        names = tuple(levels)
        sizes = [level.size for level in levels.values()]
        for name, size in zip(names[:-1], sizes[:-1], strict=True):
            if size is None:
                raise UserError(f"machine.levels.{name}.size: open, only the last level may be")
        fixed = [size for size in sizes if size is not None]
        if ranks < prod(fixed):
            return cls(names, (*_shrunk(fixed, ranks), *(1 for size in sizes if size is None)))
        outer, rest = divmod(ranks, prod(fixed))
        if rest or (sizes[-1] is not None and outer > 1):
            steps = " × ".join(
                f"{n} {'?' if s is None else s}" for n, s in zip(names, sizes, strict=True)
            )
            multiple = ", or a multiple of it" if sizes[-1] is None else ""
            raise UserError(
                f"machine.levels: {steps} cannot hold {ranks} ranks, need at most {prod(fixed)}"
                f"{multiple}; or another machine, as in machine=laptop"
            )
        return cls(names, (*fixed, *(outer for size in sizes if size is None)))

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    def joined(self, inner: Collection[int]) -> "Levels":
        """These levels, of which the `inner` ones have size 1 because their ranks belong to the
        next level further out. Ranks keep their numbers."""
        sizes, carried = list[int](), 1
        for level, size in enumerate(self.sizes):
            carried *= size
            sizes.append(1 if level in inner else carried)
            carried = carried if level in inner else 1
        return Levels(self.names, tuple(sizes))

    @property
    def strides(self) -> tuple[int, ...]:
        """At each level, the ranks of a group inside it: the distance between two neighbours."""
        return tuple(prod(self.sizes[:level]) for level in range(len(self.sizes)))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The rank's index within each level, fastest level first."""
        found = []
        for size in self.sizes:
            rank, coordinate = divmod(rank, size)
            found.append(coordinate)
        return tuple(found)

    def rank_at(self, coordinates: Sequence[int]) -> int:
        """The rank with these coordinates, fastest level first."""
        rank = 0
        for size, coordinate in zip(reversed(self.sizes), reversed(coordinates), strict=True):
            rank = rank * size + coordinate
        return rank

    def level_between(self, rank: int, other: int) -> int:
        """The outermost level whose links lead from a rank to another one."""
        pairs = zip(self.coordinates(rank), self.coordinates(other), strict=True)
        return max((level for level, (a, b) in enumerate(pairs) if a != b), default=0)

    def depth(self, name: str, key: str = "level") -> int:
        """The number of levels up to and including `name`; 0 for `none`. Raises UserError."""
        if name == "none":
            return 0
        if name not in self.names:
            known = ", ".join(("none", *self.names))
            raise UserError(f"{key}: no level {name!r} on this machine, need one of {known}")
        return self.names.index(name) + 1


def _shrunk(sizes: Sequence[int], ranks: int) -> list[int]:
    """The sizes of levels that hold more than these ranks.

    A level keeps its size if the ranks fill all its groups, and takes all ranks if they fit into
    one group. Else it has size 1, and its ranks belong to the next level, because no level may
    claim faster links than its ranks have: 6 ranks of pair 2 × node 4 are pair 2 × node 3, 5 ranks
    are pair 1 × node 5.
    """
    found, room = list[int](), 1
    for size in sizes:
        room *= size
        found.append(room if ranks % room == 0 else ranks if ranks < room else 1)
        room //= min(found[-1], room)
        ranks //= found[-1]
    return found


class Drainable(Protocol):
    """Something that has collectives in flight."""

    def drain(self) -> None:
        """Wait until its collectives are complete."""
        ...


class CommArbiter:
    """Lets one engine at a time have collectives in flight on the groups of a mesh.

    Two engines might launch their collectives in a different order on each rank.
    """

    def __init__(self) -> None:
        self._holder: Drainable | None = None

    def acquire(self, owner: Drainable) -> None:
        """Make `owner` the holder, after the collectives of the previous holder are complete."""
        if self._holder is not owner:
            self.drain()
        self._holder = owner

    def drain(self) -> None:
        """Wait until no collective is in flight. Raises the exception of one that failed."""
        if self._holder is not None:
            self._holder.drain()


@dataclass(frozen=True, eq=False)  # else each use as a key would hash all peers
class Hierarchy:
    """The levels over some axes of a mesh, this rank's coordinates, and its group at each level.

    For a parameter these are its data-parallel levels: the ranks over which it is replicated.
    `peers` has the ranks of each level's group, numbered as in `world`, in the order of their
    coordinate. The group of a level of size 1 is None.

    Weights and gradients move over these groups; errors, agreement and metrics go through `world`,
    which has groups of its own. On one shared group the two would not be launched in the same order
    on all ranks.
    """

    levels: Levels
    peers: tuple[tuple[int, ...], ...]
    groups: tuple[dist.ProcessGroup | None, ...]
    world: World
    arbiter: CommArbiter = field(default_factory=CommArbiter)
    outside: tuple[tuple[str, int], ...] = ()
    """This rank's coordinates on the mesh's other axes, of those with more than one rank."""
    crossed: int | None = None
    """In a hierarchy that is `extended`: the machine's level that the additional one crosses."""
    coordinates: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = tuple(peers.index(self.world.rank) for peers in self.peers)
        object.__setattr__(self, "coordinates", found)

    @property
    def rank(self) -> int:
        """This rank's number within the hierarchy; another than `world.rank` if there are
        splits."""
        return self.levels.rank_at(self.coordinates)

    @property
    def size(self) -> int:
        return self.levels.ranks

    @property
    def device(self) -> torch.device:
        return self.world.device

    def extended(
        self, name: str, peers: tuple[int, ...], group: dist.ProcessGroup | None, crossed: int
    ) -> "Hierarchy":
        """This hierarchy with one more level beyond all others. Its `peers` are replicas of each
        other, because no state is sharded over that level. `crossed`: the machine's level whose
        links lead to them."""
        levels = Levels((*self.levels.names, name), (*self.levels.sizes, len(peers)))
        return Hierarchy(
            levels,
            (*self.peers, peers),
            (*self.groups, group),
            self.world,
            self.arbiter,
            ((name, 0), *(at for at in self.outside if at[0] != "pipeline")),
            crossed,
        )

    @property
    def machine_levels(self) -> int:
        """How many of the levels are the machine's."""
        return len(self.levels.sizes) - (self.crossed is not None)

    def machine_level(self, level: int) -> int:
        """The machine's level that `level` crosses."""
        return level if level < self.machine_levels or self.crossed is None else self.crossed

    def shard_index(self, depth: int) -> tuple[int, int]:
        """(index, number of shards) of this rank's shard of a buffer sharded over `depth`
        levels."""
        index = 0
        for size, coordinate in zip(
            self.levels.sizes[:depth], self.coordinates[:depth], strict=True
        ):
            index = index * size + coordinate
        return index, prod(self.levels.sizes[:depth])

    def is_first_replica(self, depth: int) -> bool:
        """Whether this rank is the first of the ranks that hold the same shard at `depth`."""
        return all(coordinate == 0 for coordinate in self.coordinates[depth:])

    def broadcast_to_replicas(self, tensors: Iterable[torch.Tensor], depth: int) -> None:
        """Copy the first replica's tensors, in place, to all ranks that hold the same shard at
        `depth`."""
        self.arbiter.drain()
        for tensor in tensors:
            sent = tensor.to(self.device)  # an offloaded one lies on the host
            # Outermost level first: every source must have the tensor when its level's turn comes.
            for level in reversed(range(depth, len(self.levels.sizes))):
                if (group := self.groups[level]) is not None:
                    dist.broadcast(sent, self.peers[level][0], group=group)
            if sent is not tensor:
                tensor.copy_(sent)


def shard_range(
    numel: int, sizes: Sequence[int], coordinates: Sequence[int], depth: int
) -> tuple[int, int]:
    """[start, stop) of a rank's shard of a buffer of `numel`, cut through the first `depth` levels.
    `sizes` and the rank's `coordinates` are given fastest level first."""
    start, length = 0, numel
    for size, coordinate in zip(sizes[:depth], coordinates[:depth], strict=True):
        length //= size
        start += coordinate * length
    return start, start + length
