"""Runs of blocks in forward, and in which order their backward begins.

A rank may pass a block by, and its run then makes nothing with a gradient: no hook tells when its
turn in backward comes. It comes all the same, or this rank's collectives were in another order than
those of the ranks on which the block did run.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import inf
from weakref import WeakSet

import torch


class Run:
    """One run of a block in forward, and the gradient hook on its outputs: it lives as long as the
    graph that it is part of.

    `index` is its unit's, `number` counts the runs that had begun by its end. `idle` are the runs
    before it, since the last one with outputs, that have made nothing on this rank: they live as
    long as this one, and their backward begins after its.
    """

    def __init__(self, index: int, number: int, begin: "Begin") -> None:
        self.index = index
        self.number = number
        self.idle: list[Run] = []
        self._begin = begin

    def __call__(self, _gradient: torch.Tensor) -> None:
        """The hook: the first of the gradients has come."""
        self._begin(self)


Begin = Callable[[Run], None]
"""What is called at each gradient of what a run has made. Only graphs hold it: it may hold us."""


class Runs:
    """Those of all blocks whose backward has not begun."""

    def __init__(self) -> None:
        self._entered = 0
        self.newest = 0
        """The unit of the block that began to run last."""
        self._waiting: dict[int, WeakSet[Run]] = defaultdict(WeakSet)
        # That have made nothing here, in their order: those that no later run holds yet, and those
        # whose turn in this backward is to come.
        self._idle: list[Run] = []
        self._due: list[Run] = []

    def enter(self, index: int) -> int:
        """A block begins to run; its number among all runs."""
        self._entered += 1
        self.newest = index
        return self._entered

    def is_newest(self, number: int) -> bool:
        """Whether no block has begun to run since."""
        return number == self._entered

    def end(self, index: int, made: Sequence[torch.Tensor], begin: Begin) -> None:
        """A run that ends has `made` this, or nothing."""
        run = Run(index, self._entered, begin)
        if made:
            run.idle, self._idle = self._idle, []
            _watch(made, run)
        else:
            self._idle.append(run)
        self._waiting[index].add(run)

    def recompute(self, index: int, made: Sequence[torch.Tensor], begin: Begin) -> None:
        """The same of one that runs again in its own backward."""
        _watch(made, Run(index, self._entered, begin))

    def is_waiting(self, index: int, number: float = inf) -> bool:
        """Whether the backward of some run of a unit is still to begin, of those up to `number`:
        later ones than the run whose backward begins are another graph's."""
        return any(run.number <= number for run in self._waiting[index])

    def begin(self, run: Run) -> None:
        """Its backward begins."""
        self._waiting[run.index].discard(run)

    def begin_backward(self) -> None:
        """That of a loss begins."""
        self._due, self._idle = self._idle, []

    def due_before(self, run: Run) -> Iterator[Run]:
        """Those that have made nothing and came after `run`, last first: their turn is before its.
        Those that it holds are due then."""
        yield from self._later_than(run.number)
        if run.idle:
            self._due = sorted([*self._due, *run.idle], key=lambda idle: idle.number)
            run.idle = []

    def due_at_last(self) -> Iterator[Run]:
        """All others, when the backward of the loss is over."""
        yield from self._later_than(0)

    def _later_than(self, number: int) -> Iterator[Run]:
        while self._due and self._due[-1].number > number:
            yield self._due.pop()


def _watch(made: Sequence[torch.Tensor], run: Run) -> None:
    for tensor in made:
        tensor.register_hook(run)
