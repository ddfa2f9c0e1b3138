"""The flat buffer of one unit: where each parameter lies in it, and which slice each rank owns.

The buffer is cut by the fastest level first and each part by the next level. So a rank's shard of
any state is one contiguous slice, and deeper shards lie inside shallower ones.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter

import torch

from megafrontier.parallel.hierarchy import SHARD_ALIGNMENT


def padded(numel: int, shards: int) -> int:
    """`numel` elements and the padding with which they divide into `shards` aligned shards."""
    multiple = shards * SHARD_ALIGNMENT
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class Entry:
    """One parameter: elements [offset, offset + numel) of the flat buffer, row-major."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The parameters of one unit in order, and the padded length `numel` of their flat buffer."""

    name: str
    entries: tuple[Entry, ...]
    numel: int

    @classmethod
    def build(cls, name: str, shapes: Iterable[tuple[str, Sequence[int]]], shards: int) -> "Layout":
        """Lay the parameters end to end and pad to `shards` equal, aligned shards."""
        entries = []
        offset = 0
        for parameter, shape in shapes:
            entries.append(Entry(parameter, tuple(shape), offset))
            offset += prod(shape)
        return cls(name, tuple(entries), padded(offset, shards))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the buffer `flat` [numel], one for each parameter, in its shape."""
        return [flat[e.offset : e.offset + e.numel].view(e.shape) for e in self.entries]

    def bounds(self, index: int, shards: int) -> tuple[int, int]:
        """[start, stop) of shard `index` of `shards` equal ones."""
        length = self.numel // shards
        return index * length, (index + 1) * length

    def in_shard(self, index: int, shards: int) -> list[tuple[Entry, int, int, int]]:
        """`within` the bounds of shard `index` of `shards` equal ones."""
        return self.within(*self.bounds(index, shards))

    def padding_within(self, start: int, stop: int) -> slice:
        """The padding in [start, stop) of the buffer, relative to `start`."""
        last = self.entries[-1]
        return slice(max(0, min(last.offset + last.numel, stop) - start), None)

    def within(self, start: int, stop: int) -> list[tuple[Entry, int, int, int]]:
        """The parts of parameters in [start, stop) of the buffer.

        Each is (entry, first, last, at): elements [first, last) of that parameter, row-major, and
        their offset relative to `start`.
        """
        parts = []
        # Bisect, because a checkpoint calls this for each of its many shards.
        begin = bisect_right(self.entries, start, key=attrgetter("offset")) - 1
        end = bisect_left(self.entries, stop, key=attrgetter("offset"))
        for entry in self.entries[begin:end]:
            first = max(start, entry.offset)
            last = min(stop, entry.offset + entry.numel)
            if first < last:
                parts.append((entry, first - entry.offset, last - entry.offset, first - start))
        return parts
