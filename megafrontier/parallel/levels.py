"""The levels of a machine for a given number of ranks: sizes, coordinates, who shares a group."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from megafrontier.common.errors import UserError
from megafrontier.config import LevelConfig


@dataclass(frozen=True)
class Levels:
    """Names and sizes, fastest link first. Rank = c₀ + s₀ · (c₁ + s₁ · (c₂ + …))."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def resolve(cls, levels: Mapping[str, LevelConfig], ranks: int) -> "Levels":
        """Fill in the outermost size from the number of data-parallel ranks.

        Raises UserError when the sizes do not multiply to it.
        """
        names = tuple(levels)
        sizes = [level.size for level in levels.values()]
        for name, size in zip(names[:-1], sizes[:-1], strict=True):
            if size is None:
                raise UserError(f"machine.levels.{name}.size: open, only the last level may be")
        inner = prod(size for size in sizes[:-1] if size is not None)
        outer = ranks // inner if sizes[-1] is None else sizes[-1]
        if outer == 0 or inner * outer != ranks:
            steps = " × ".join(
                f"{n} {'?' if s is None else s}" for n, s in zip(names, sizes, strict=True)
            )
            fits = f"a multiple of {inner}" if sizes[-1] is None else f"{inner * outer}"
            raise UserError(
                f"machine.levels: {steps} cannot hold {ranks} ranks, need {fits}; or another "
                "machine, as in machine=laptop"
            )
        return cls(names, (*(size for size in sizes[:-1] if size is not None), outer))

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The rank's number within each level, fastest first."""
        found = []
        for size in self.sizes:
            rank, coordinate = divmod(rank, size)
            found.append(coordinate)
        return tuple(found)

    def peers(self, rank: int, level: int) -> list[int]:
        """The ranks that differ from `rank` in the coordinate of `level` alone, in its order."""
        stride = prod(self.sizes[:level])
        first = rank - self.coordinates(rank)[level] * stride
        return [first + i * stride for i in range(self.sizes[level])]

    def depth(self, name: str, key: str = "level") -> int:
        """How many levels lie within `name` (inclusive); 0 for `none`. Raises UserError."""
        if name == "none":
            return 0
        if name not in self.names:
            known = ", ".join(("none", *self.names))
            raise UserError(f"{key}: no level {name!r} on this machine, need one of {known}")
        return self.names.index(name) + 1
