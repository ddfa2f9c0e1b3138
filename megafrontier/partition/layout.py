"""One unit's flat buffer: where each parameter lies in it, and which slice each rank owns.

The buffer is cut by the fastest level first and each piece by the next, so that a rank's shard of
every state is one contiguous slice, and the deeper shard lies inside the shallower one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter

import torch

SHARD_ALIGNMENT = 128
"""Elements: every shard is a multiple of 256 bytes in a 2-byte type (RCCL is slow below)."""


@dataclass(frozen=True)
class Entry:
    """One parameter in a unit: elements [offset, offset + numel) of the flat buffer, row-major."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The parameters of one unit in order, and the padded length of their flat buffer."""

    name: str
    entries: tuple[Entry, ...]
    numel: int

    @classmethod
    def build(cls, name: str, shapes: Iterable[tuple[str, Sequence[int]]], pieces: int) -> "Layout":
        """Lay the parameters end to end and pad to `pieces` equal, aligned shards."""
        entries = []
        offset = 0
        for parameter, shape in shapes:
            entries.append(Entry(parameter, tuple(shape), offset))
            offset += prod(shape)
        multiple = pieces * SHARD_ALIGNMENT
        return cls(name, tuple(entries), -(-offset // multiple) * multiple)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of the buffer `flat` [numel], in its shape."""
        return [flat[e.offset : e.offset + e.numel].view(e.shape) for e in self.entries]

    def bounds(self, piece: int, pieces: int) -> tuple[int, int]:
        """[start, stop) of piece number `piece` of `pieces` equal ones."""
        length = self.numel // pieces
        return piece * length, (piece + 1) * length

    def in_shard(self, piece: int, pieces: int) -> list[tuple[Entry, int, int, int]]:
        """As `within`, of piece number `piece` of `pieces` equal ones."""
        return self.within(*self.bounds(piece, pieces))

    def padding_within(self, start: int, stop: int) -> slice:
        """Where [start, stop) of the buffer has only padding, counted from `start`."""
        last = self.entries[-1]
        return slice(max(0, min(last.offset + last.numel, stop) - start), None)

    def within(self, start: int, stop: int) -> list[tuple[Entry, int, int, int]]:
        """The parts of parameters inside [start, stop) of the buffer.

        Each is (entry, first, last, at): elements [first, last) of that parameter, row-major, and
        where they begin, counted from `start`.
        """
        parts = []
        # A checkpoint asks this of each of its pieces: not of every parameter for each.
        begin = bisect_right(self.entries, start, key=attrgetter("offset")) - 1
        end = bisect_left(self.entries, stop, key=attrgetter("offset"))
        for entry in self.entries[begin:end]:
            first = max(start, entry.offset)
            last = min(stop, entry.offset + entry.numel)
            if first < last:
                parts.append((entry, first - entry.offset, last - entry.offset, first - start))
        return parts


def shard_range(
    numel: int, sizes: Sequence[int], coordinates: Sequence[int], depth: int
) -> tuple[int, int]:
    """The slice [start, stop) of a buffer of `numel` that a rank holds when it is cut through
    the first `depth` levels, whose sizes and the rank's coordinates are given fastest first."""
    start, length = 0, numel
    for size, coordinate in zip(sizes[:depth], coordinates[:depth], strict=True):
        length //= size
        start += coordinate * length
    return start, start + length
