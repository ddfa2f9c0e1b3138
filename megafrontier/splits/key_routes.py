"""The routes of keys and values over the levels of a context split: a function of the documents.

A rank needs the keys and values of its documents' earlier tokens. They cross the levels from the
slowest to the fastest: a token that several ranks of a node need enters the node once. Every rank
computes the routes of all tokens, so no sizes are exchanged.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafrontier.splits.documents import DocumentPart, assign_over

PartFlags = NDArray[np.bool_]


class KeyStep(NamedTuple):
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


class KeyRoutes(NamedTuple):
    """What a rank owns, needs, sends and gets."""

    own: tuple[DocumentPart, ...]
    """The parts of its tokens, in order."""
    pasts: list[slice]
    """For each part, where the earlier tokens that it attends to are among those of `past`."""
    past: NDArray[np.int64]
    """The tokens that it needs, by their numbers, each document's in order."""
    steps: list[KeyStep]
    """Of the levels, slowest first. A level at which no rank sends has none."""
    tokens: int
    """How many tokens it has in the end."""


def find_routes(
    bounds: tuple[int, ...], sizes: tuple[int, ...], index: int, window: int = 0
) -> KeyRoutes:
    """The routes of the `index`-th rank of levels of these sizes, fastest first.

    `index` and `bounds`: as in `assign_over`. `window`: the tokens that a token attends to, itself
    included; 0: all before it.
    """
    parts = assign_over(bounds, sizes)
    owners = np.array([part.rank for part in parts])
    firsts = _first_needed(parts, window)
    needed = _needed(owners, firsts, prod(sizes))
    has = owners == np.arange(prod(sizes))[:, None]
    numbers = _Numbers(parts)
    numbers.add(has[index])
    steps = []
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
            chosen = numbers.of(sent)
            arriving = [numbers.add(some) for some in received]
            steps.append(KeyStep(level, chosen, counts, arriving))
    own = tuple(part for part in parts if part.rank == index)
    past = numbers.of([needed[index]])
    return KeyRoutes(own, _pasts(index, parts, firsts, needed[index]), past, steps, numbers.total)


def _first_needed(parts: Sequence[DocumentPart], window: int) -> NDArray[np.int64]:
    """For each part, the number of the first part that it attends to; its own if to no other."""
    starts, stops, documents = np.array([part[:3] for part in parts]).T
    begins = np.searchsorted(starts, documents)
    if window:
        begins = np.maximum(begins, np.searchsorted(stops, starts - window + 1, "right"))
    found: NDArray[np.int64] = np.minimum(begins, np.arange(len(parts)))
    return found


def _needed(owners: NDArray[np.int64], firsts: NDArray[np.int64], size: int) -> PartFlags:
    """[rank, part]: whether a part of the rank attends to it, and lies after it."""
    changes = np.zeros((size, len(owners) + 1), np.int64)
    np.add.at(changes, (owners, firsts), 1)
    np.add.at(changes, (owners, np.arange(len(owners))), -1)
    found: PartFlags = changes.cumsum(1)[:, :-1] > 0
    return found


def _pasts(
    index: int, parts: Sequence[DocumentPart], firsts: NDArray[np.int64], needed: PartFlags
) -> list[slice]:
    """For each part of a rank, where the parts that it attends to are among the needed ones."""
    lengths = np.array([part.stop - part.start for part in parts]) * needed
    places = lengths.cumsum() - lengths
    own = [number for number, part in enumerate(parts) if part.rank == index]
    found = []
    for number in own:
        first, length = int(firsts[number]), parts[number].start - parts[int(firsts[number])].start
        found.append(slice(int(places[first]), int(places[first]) + length))
    return found


class _Numbers:
    """The numbers of the tokens that a rank has. Flags [part] say which parts are meant."""

    def __init__(self, parts: Sequence[DocumentPart]) -> None:
        self._lengths = np.array([part.stop - part.start for part in parts])
        self._firsts = np.zeros_like(self._lengths)
        self.total = 0

    def count(self, flags: PartFlags) -> int:
        """The number of tokens of these parts."""
        return int(self._lengths[flags].sum())

    def add(self, flags: PartFlags) -> int:
        """Give the tokens of these parts the next numbers. Returns how many there are."""
        ends = self._lengths[flags].cumsum() + self.total
        self._firsts[flags] = ends - self._lengths[flags]
        self.total += self.count(flags)
        return self.count(flags)

    def of(self, each: Sequence[PartFlags]) -> NDArray[np.int64]:
        """The numbers of the tokens of these parts, one after another."""
        chosen = np.concatenate([np.flatnonzero(flags) for flags in each])
        lengths = self._lengths[chosen]
        before = lengths.cumsum() - lengths
        starts: NDArray[np.int64] = np.repeat(self._firsts[chosen] - before, lengths)
        return starts + np.arange(len(starts))
