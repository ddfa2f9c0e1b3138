"""How the ranks of a layout are divided, in segments, and the small meshes that keep the division.

A segment is the ranks of one axis at one level: 16 nodes of a pipeline, for example. A small mesh
has some segments of the layout, with 2 to 4 ranks each, and no others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import gcd, prod
from typing import NamedTuple

from megafrontier.parallel.mesh import MeshShape, Splits

MOST_RANKS = 8
"""Of a small mesh: more would be too slow on a few cores."""
TRIPLE = 3
"""Segments of a small mesh: 2 ranks each fill `MOST_RANKS`."""


class Segment(NamedTuple):
    """`size` ranks of an axis of `AXES` at a level; `has_experts`: they share experts."""

    level: str
    axis: str
    has_experts: bool
    size: int

    def __str__(self) -> str:
        axis = f"{self.axis} (experts)" if self.has_experts else self.axis
        return f"{axis} {self.size} in {self.level}"


def segments_of(shape: MeshShape) -> list[Segment]:
    """The segments of more than one rank, innermost first."""
    found = []
    for at, level in enumerate(shape.levels.names):
        sizes = {axis: of[at] for axis, of in shape.sizes.items()}
        # Experts take the ranks of the context split first, then data-parallel ones.
        in_context = gcd(sizes["context"], sizes["expert"])
        in_data = gcd(sizes["data"], sizes["expert"] // in_context)
        found += [
            Segment(level, "tensor", False, sizes["tensor"]),
            Segment(level, "context", True, in_context),
            Segment(level, "context", False, sizes["context"] // in_context),
            Segment(level, "data", True, in_data),
            Segment(level, "data", False, sizes["data"] // in_data),
            Segment(level, "pipeline", False, sizes["pipeline"]),
        ]
    return [segment for segment in found if segment.size > 1]


@dataclass(frozen=True)
class SmallMesh:
    """Sizes of a few segments; all others have one rank."""

    segments: tuple[Segment, ...]

    @property
    def ranks(self) -> int:
        return prod(segment.size for segment in self.segments)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return prod(segment.size for segment in self.segments if segment.axis == "data")

    @property
    def splits(self) -> Splits:
        """The sizes of the splits."""
        sizes = {
            axis: prod(s.size for s in self.segments if s.axis == axis)
            for axis in ("tensor", "context", "pipeline")
        }
        experts = prod(s.size for s in self.segments if s.has_experts)
        return Splits(expert=experts, **sizes)

    def level_size(self, level: str) -> int:
        """The ranks of the segments at a level."""
        return prod(s.size for s in self.segments if s.level == level)

    def without(self, segment: Segment) -> "SmallMesh":
        return SmallMesh(tuple(s for s in self.segments if s != segment))

    def __str__(self) -> str:
        return " × ".join(map(str, self.segments)) or "one rank"


def small_meshes(segments: Sequence[Segment], most: int = MOST_RANKS) -> list[SmallMesh]:
    """Small meshes of at most `most` ranks that together have every three of the segments; the one
    with the most different axes and levels first.

    All segments together, if they fit. Otherwise each three (two, if `most` is below 8).
    """
    chosen = min(len(segments), TRIPLE if most >= 2**TRIPLE else 2 if most >= 4 else 1)
    meshes = [_grown(some, most) for some in combinations(segments, chosen)]
    return sorted(meshes, key=lambda mesh: -_variety(mesh))


def _variety(mesh: SmallMesh) -> int:
    axes = {(segment.axis, segment.has_experts) for segment in mesh.segments}
    return 3 * len(axes) + len({segment.level for segment in mesh.segments})


def _grown(segments: Sequence[Segment], most: int) -> SmallMesh:
    """The segments with 2 ranks each, and data-parallel ones with more where there is room: 3 where
    the layout has an odd number, because paddings show there, 4 where it has 4 or more."""
    sizes = [2] * len(segments)
    for i, segment in enumerate(segments):
        wanted = 3 if segment.size % 2 else 4
        is_plain = segment.axis == "data" and not segment.has_experts and segment.size >= wanted
        if is_plain and prod(sizes) // sizes[i] * wanted <= most:
            sizes[i] = wanted
    return SmallMesh(tuple(s._replace(size=n) for s, n in zip(segments, sizes, strict=True)))
