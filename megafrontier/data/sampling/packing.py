"""Best-fit packing of whole documents into sequences, as a pure function of the corpus' index.

A document of n tokens is n - 1 pairs of a token and the next one. A longer document than a sequence
is first cut into sequences of its own, and a rest. Documents and rests are then put into sequences
by best-fit decreasing (Ding et al. 2024, arXiv:2404.10830): the longest first, each into the
sequence with the least room in which it fits.

Note [Memory of packing]
Documents of one size are interchangeable. So sizes are packed, not documents: the result is a short
list of groups of equal sequences, and the i-th document of a size is looked up in the mapped index
when it is read. For this, a table of about `TABLE_ENTRIES` numbers says how many documents of each
size come before each block of documents. Memory therefore does not grow with the corpus. Opening
it reads the index once.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafrontier.data.corpus.indexed import IndexedDataset

TABLE_ENTRIES = 1 << 24
"""Of the table, 4 bytes each."""
_LEAST_BLOCK = 1 << 14
"""Documents in a block, which are read to find one of them."""


class Piece(NamedTuple):
    """Consecutive pairs of a token and the next one."""

    start: int
    """The first token in the .bin."""
    pairs: int


class Items(NamedTuple):
    """Items of one size in each sequence of a group: sequence i has `each` items, from number
    `first` + i · `each` on."""

    size: int
    first: int
    each: int


@dataclass(frozen=True)
class Group:
    """Sequences that hold items of the same sizes."""

    count: int
    items: tuple[Items, ...] = ()

    def split(self, count: int) -> tuple["Group", "Group"]:
        """The first `count` sequences, and the others."""
        rest = tuple(Items(size, first + count * each, each) for size, first, each in self.items)
        return Group(count, self.items), Group(self.count - count, rest)

    def put(self, size: int, first: int, each: int) -> "Group":
        """The same with `each` items more in every sequence."""
        return Group(self.count, (*self.items, Items(size, first, each)))


def best_fit(counts: Sequence[int], room: int) -> list[Group]:
    """Pack `counts[s]` items of each size s ≤ `room` into sequences of this room, by best-fit
    decreasing. Items of one size are numbered from 0."""
    rooms: list[int] = []  # ascending, of groups that have some left
    groups: dict[int, list[Group]] = {}

    def add(group: Group, left: int) -> None:
        if group.count:
            if left not in groups:
                insort(rooms, left)
            groups.setdefault(left, []).append(group)

    for size in range(room, 0, -1):
        first, stop = 0, counts[size]
        while first < stop:
            at = bisect_left(rooms, size)
            if at == len(rooms):
                add(Group(-(-(stop - first) // (room // size))), room)
                continue
            left = rooms[at]
            group = groups[left].pop()
            if not groups[left]:
                del groups[left], rooms[at]
            each = left // size
            full, group = group.split(min(group.count, (stop - first) // each))
            add(full.put(size, first, each), left - each * size)
            first += full.count * each
            if group.count and first < stop:
                last, group = group.split(1)
                add(last.put(size, first, stop - first), left - (stop - first) * size)
                first = stop
            add(group, left)
    return [group for left in rooms for group in groups[left]]


class PackedRange:
    """The sequences that documents first … stop - 1 of a corpus are packed into. They are numbered
    from 0: first those of documents that are longer than a sequence, then the packed ones."""

    first_window = 0

    def __init__(self, corpus: IndexedDataset, first: int, stop: int, length: int) -> None:
        """`length`: tokens of a sequence. Raises UserError for a damaged index."""
        self.corpus, self._length = corpus, length
        self._block = max(_LEAST_BLOCK, -(-(stop - first) * length // TABLE_ENTRIES))
        self._blocks = [*range(first, stop, self._block), stop]
        number = len(self._blocks)
        # How many there are before each block: whole sequences, and rests of each size.
        self._whole = np.zeros(number, np.int64)
        self._rests = np.zeros((length, number), np.uint32)
        for i in range(number - 1):
            _, pairs = self._documents(i)
            self._whole[i + 1] = self._whole[i] + (pairs // length).sum()
            found = np.bincount(pairs % length, minlength=length)
            self._rests[:, i + 1] = self._rests[:, i] + found.astype(np.uint32)
        counts = [*self._rests[:, -1].tolist(), 0]
        counts[0] = 0
        self._groups = best_fit(counts, length)
        self._starts = [*accumulate((g.count for g in self._groups), initial=int(self._whole[-1]))]
        self.windows = self._starts[-1]

    def pieces(self, window: int) -> list[Piece]:
        """What sequence `window` holds; the rest of it is padding."""
        if window < self._whole[-1]:
            return [self._whole_piece(window)]
        at = bisect_right(self._starts, window) - 1
        index = window - self._starts[at]
        return [
            self._rest(size, first + index * each + i)
            for size, first, each in self._groups[at].items
            for i in range(each)
        ]

    def _documents(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first token of each document of a block, and its pairs."""
        bounds = self.corpus.document_bounds(self._blocks[block], self._blocks[block + 1])
        return bounds[:-1], np.maximum(np.diff(bounds) - 1, 0)

    def _whole_piece(self, number: int) -> Piece:
        block = int(np.searchsorted(self._whole, number, "right")) - 1
        starts, pairs = self._documents(block)
        ends = np.cumsum(pairs // self._length) + self._whole[block]
        at = int(np.searchsorted(ends, number, "right"))
        before = int(ends[at]) - int(pairs[at]) // self._length
        return Piece(int(starts[at]) + (number - before) * self._length, self._length)

    def _rest(self, size: int, number: int) -> Piece:
        counts = self._rests[size]
        block = int(np.searchsorted(counts, number, "right")) - 1
        starts, pairs = self._documents(block)
        at = np.flatnonzero(pairs % self._length == size)[number - int(counts[block])]
        return Piece(int(starts[at] + pairs[at] - size), size)
