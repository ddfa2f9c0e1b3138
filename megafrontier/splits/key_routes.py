"""The way of keys and values over the levels of a context split: a pure function of the documents.

A rank needs the keys and values of its documents' earlier tokens. They cross the levels from the
slowest to the fastest: a token that several ranks of a node need enters the node once. Every rank
computes the ways of all tokens, so no sizes are exchanged.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafrontier.splits.documents import Part, assign

Flags = NDArray[np.bool_]


class Hop(NamedTuple):
    """What a rank sends to its peers at one level, and what it gets from them.

    A rank's tokens are numbered in the order in which it gets them: first those that it owns.
    """

    level: int
    sent: NDArray[np.int64]
    """Of the tokens that this rank has, those that it sends, peer by peer."""
    sends: list[int]
    """How many of them go to each peer."""
    receives: list[int]
    """How many tokens come from each peer. They get the next numbers."""


class Routes(NamedTuple):
    """What a rank owns, needs, sends and gets."""

    own: tuple[Part, ...]
    """The parts of its tokens, in order."""
    pasts: list[slice]
    """For each part, where its document's earlier tokens are among those of `past`."""
    past: NDArray[np.int64]
    """The tokens that it needs, by their numbers, each document's in order."""
    hops: list[Hop]
    """Of the levels, slowest first. A level at which no rank sends has none."""
    tokens: int
    """How many tokens it has in the end."""


def find_routes(bounds: tuple[int, ...], sizes: tuple[int, ...], index: int) -> Routes:
    """The routes of the `index`-th rank of levels of these sizes, fastest first.

    The fastest level has the largest steps in `index`, as in `Hierarchy.shard_index`. `bounds`: as
    in `assign`.
    """
    parts = assign(bounds, prod(sizes)).parts
    needed = _needed(parts, prod(sizes))
    owners = np.array([part.rank for part in parts])
    has = owners == np.arange(prod(sizes))[:, None]
    numbers = _Numbers(parts)
    numbers.add(has[index])
    hops = []
    for level in reversed(range(len(sizes))):
        step, around = prod(sizes[level + 1 :]), prod(sizes[level:])
        # Over this level come the tokens that any rank needs that gets them from here over the
        # faster levels: the ranks with the same `index` modulo `around`.
        wanted = np.logical_or.reduce(needed.reshape(-1, around, len(parts)))
        first = index - index // step % sizes[level] * step
        peers = range(first, first + around, step)
        sent = [has[index] & wanted[peer % around] & (peer != index) for peer in peers]
        received = [has[peer] & wanted[index % around] & (peer != index) for peer in peers]
        shared = has.reshape(-1, sizes[level], step, len(parts)).any(1, keepdims=True)
        shared = shared & wanted.reshape(sizes[level], step, -1)
        before, has = has, has | shared.reshape(has.shape)
        if (before != has).any():
            counts = [numbers.count(some) for some in sent]
            hops.append(Hop(level, numbers.of(sent), counts, [numbers.add(x) for x in received]))
    own = tuple(part for part in parts if part.rank == index)
    past = numbers.of([needed[index]])
    return Routes(own, _pasts(own, parts, needed[index]), past, hops, numbers.total)


def _needed(parts: Sequence[Part], size: int) -> Flags:
    """[rank, part]: whether the part is before another one of the rank in its document."""
    _, documents = np.unique([part.document for part in parts], return_inverse=True)
    starts, owners = np.array([(part.start, part.rank) for part in parts]).T
    last = np.full((size, documents.max() + 1), -1)
    np.maximum.at(last, (owners, documents), starts)
    found: Flags = starts < last[:, documents]
    return found


def _pasts(own: Sequence[Part], parts: Sequence[Part], needed: Flags) -> list[slice]:
    """For each own part, where its document's earlier tokens are among the needed ones."""
    begins: dict[int, int] = {}
    count = 0
    for number in np.flatnonzero(needed):
        part = parts[int(number)]
        begins.setdefault(part.document, count)
        count += part.stop - part.start
    firsts = [begins.get(part.document, 0) for part in own]
    return [
        slice(first, first + part.start - part.document)
        for first, part in zip(firsts, own, strict=True)
    ]


class _Numbers:
    """The numbers of the tokens that a rank has. Flags [part] say which parts are meant."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._lengths = np.array([part.stop - part.start for part in parts])
        self._firsts = np.zeros_like(self._lengths)
        self.total = 0

    def count(self, flags: Flags) -> int:
        """The number of tokens of these parts."""
        return int(self._lengths[flags].sum())

    def add(self, flags: Flags) -> int:
        """Give the tokens of these parts the next numbers. Returns how many there are."""
        ends = self._lengths[flags].cumsum() + self.total
        self._firsts[flags] = ends - self._lengths[flags]
        self.total += self.count(flags)
        return self.count(flags)

    def of(self, each: Sequence[Flags]) -> NDArray[np.int64]:
        """The numbers of the tokens of these parts, one after another."""
        chosen = np.concatenate([np.flatnonzero(flags) for flags in each])
        lengths = self._lengths[chosen]
        before = lengths.cumsum() - lengths
        starts: NDArray[np.int64] = np.repeat(self._firsts[chosen] - before, lengths)
        return starts + np.arange(len(starts))
