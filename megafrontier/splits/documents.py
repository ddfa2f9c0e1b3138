"""Which rank of a context split has which tokens: a pure function of the documents.

Each rank has equally many tokens and nearly the same number of pairs (query, key). The longest
documents are cut into two parts for each rank: of 2 · c parts the i-th of c ranks has the parts i
and 2 · c - 1 - i, so that under the causal mask all have equally many pairs. The other documents go
to one rank each, as far as it has room. As few documents are cut as the balance allows, because the
keys and values of a cut document cross ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

BALANCED = 0.02
"""An imbalance (`Assignment.imbalance`) at which no more documents are cut."""


class DocumentPart(NamedTuple):
    """The tokens [start, stop) of a micro-batch, of the document that begins at token `document`,
    on the `rank`-th rank."""

    start: int
    stop: int
    document: int
    rank: int

    @property
    def pairs(self) -> int:
        """Pairs (query, key) of its queries, a token with itself included."""
        tokens = self.stop - self.start
        return tokens * (self.start - self.document) + tokens * (tokens + 1) // 2


@dataclass(frozen=True)
class Assignment:
    """The parts of all tokens of a micro-batch, in their order, on `size` ranks."""

    parts: tuple[DocumentPart, ...]
    size: int

    @cached_property
    def imbalance(self) -> float:
        """By what fraction the busiest rank has more pairs than the mean."""
        pairs = [0] * self.size
        for part in self.parts:
            pairs[part.rank] += part.pairs
        return max(pairs) * self.size / sum(pairs) - 1


@lru_cache(maxsize=64)
def assign_over(bounds: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[DocumentPart, ...]:
    """The parts of `assign` on the ranks of levels of these sizes, fastest first. Ranks of a group
    have parts that follow each other. The fastest level has the largest steps in `rank`, as in
    `Hierarchy.shard_index`."""
    line = ranks_in_line(sizes)
    return tuple(part._replace(rank=line[part.rank]) for part in assign(bounds, len(line)).parts)


def ranks_in_line(sizes: tuple[int, ...]) -> list[int]:
    """The ranks in the order in which neighbours are near: the fastest level has steps of 1."""
    line: list[int] = np.arange(prod(sizes)).reshape(sizes).ravel(order="F").tolist()
    return line


@lru_cache(maxsize=64)
def assign(bounds: tuple[int, ...], size: int) -> Assignment:
    """The assignment of documents to `size` ranks.

    bounds: the start of each document, ascending, and the number of all tokens, a multiple of
        `size`.
    """
    documents = sorted(pairwise(bounds), key=lambda document: document[0] - document[1])
    best, cuts = None, 0
    while best is None or (best.imbalance > BALANCED and cuts < 2 * len(documents)):
        found = _assign(documents, min(cuts, len(documents)), size)
        if best is None or found.imbalance < best.imbalance:
            best = found
        cuts = 2 * cuts or 1
    return best


def _assign(documents: Sequence[tuple[int, int]], cuts: int, size: int) -> Assignment:
    """Cut the first `cuts` documents, which are sorted by falling length."""
    ranks = _Ranks(size, sum(stop - start for start, stop in documents) // size)
    parts: list[DocumentPart] = []
    for document in documents[:cuts]:
        parts += ranks.cut(*document)
    for document in documents[cuts:]:
        parts += ranks.deal(*document)
    return Assignment(tuple(sorted(parts)), size)


class _Ranks:
    """How many more tokens each rank takes, and how many pairs it has."""

    def __init__(self, size: int, tokens: int) -> None:
        self.room, self.pairs = [tokens] * size, [0] * size

    def _take(self, start: int, stop: int, document: int, rank: int) -> DocumentPart:
        part = DocumentPart(start, stop, document, rank)
        self.room[rank] -= stop - start
        self.pairs[rank] += part.pairs
        return part

    def cut(self, document: int, end: int) -> Iterator[DocumentPart]:
        """Two parts for each rank. Tokens that remain go to ranks with the most room."""
        ranks = range(len(self.room))
        share, rest = divmod(end - document, len(ranks))
        tokens = [share] * len(ranks)
        for rank in sorted(ranks, key=lambda rank: -self.room[rank])[:rest]:
            tokens[rank] += 1
        sizes = [count // 2 for count in tokens] + [count - count // 2 for count in tokens[::-1]]
        bounds = accumulate(sizes, initial=document)
        for rank, (start, stop) in zip([*ranks, *ranks[::-1]], pairwise(bounds), strict=True):
            if start < stop:
                yield self._take(start, stop, document, rank)

    def deal(self, document: int, end: int) -> Iterator[DocumentPart]:
        """The whole document for the rank with the fewest pairs among those that have room, else
        parts that fill ranks."""
        start = document
        while start < end:
            fitting = [r for r, room in enumerate(self.room) if room >= end - start]
            if fitting:
                yield self._take(start, end, document, min(fitting, key=self.pairs.__getitem__))
                return
            rank = max(range(len(self.room)), key=self.room.__getitem__)
            stop = start + self.room[rank]
            yield self._take(start, stop, document, rank)
            start = stop
