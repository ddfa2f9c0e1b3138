"""Hook points, and what is known of their forwards and of the backward in progress."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import inf
from weakref import WeakSet

import torch
from torch import nn

from megafrontier.partition.unit import ROOT, Phase, Unit


class HookPoint:
    """A module with hooks, and the units that it needs while it runs."""

    def __init__(
        self, name: str, module: nn.Module, units: Sequence[Unit], parent: "HookPoint | None"
    ) -> None:
        self.name, self.module = name, module
        self.units = units
        self.parent = parent
        """The hook point around this one."""
        self.trained = [unit for unit in units if not unit.is_frozen]
        self.is_persistent = all(unit.is_persistent for unit in units)
        self.inputs: dict[int, object] = {}
        """In forward: the grad_fn of each input tensor, by the tensor's id."""
        self.intruder: HookPoint | None = None
        """In forward: a block that has run meanwhile and does not lie inside this one."""

    @property
    def is_root(self) -> bool:
        return self.name == ROOT

    @property
    def is_resident(self) -> bool:
        """Whether the parameters are always unsharded and there is nothing to publish."""
        return all(unit.is_resident for unit in self.units)

    @property
    def is_stale(self) -> bool:
        return any(unit.is_stale for unit in self.units)

    def is_in(self, names: Sequence[str]) -> bool:
        """Whether this is the root, one of the points of these names, or inside of one."""
        if self.is_root or self.name in names:
            return True
        return self.parent is not None and not self.parent.is_root and self.parent.is_in(names)

    def lies_in(self, other: "HookPoint") -> bool:
        """Whether this is `other` or lies inside it."""
        return self is other or (self.parent is not None and self.parent.lies_in(other))

    def start_unshard(self) -> None:
        for unit in self.units:
            unit.start_unshard()

    def unshard(self) -> None:
        for unit in self.units:
            unit.unshard()

    def set_phase(self, phase: Phase) -> None:
        for unit in self.units:
            unit.phase = phase

    def reshard(self) -> None:
        for unit in self.units:
            unit.reshard()

    def keep_unsharded(self) -> None:
        for unit in self.units:
            unit.keep_unsharded()

    def start_reducing(self) -> None:
        for unit in self.trained:
            unit.start_reducing()

    def finish_reducing(self) -> None:
        for unit in self.trained:
            unit.finish_reducing()

    def release_gradients(self) -> None:
        for unit in self.trained:
            unit.release_gradient()

    def start_finishing(self) -> None:
        for unit in self.trained:
            # The other end of a pipeline sums at the end of the step: until then it may wait for
            # what comes after this on the stream.
            if unit.hierarchy.crossed is None:
                unit.start_finishing()


class BlockPart:
    """The hook points of one forward, in the order in which they run: those of a whole model, or of
    a stage of a pipeline. The root is among them.

    `kept_after_forward`, `kept_after_backward`: where forward turns to backward, and backward to
    the next forward, the units that ran last are the first to run, and no other unit needs their
    buffers: they stay unsharded. So do the root's units, which have buffers of their own.
    """

    def __init__(self, points: Sequence[HookPoint], prefetch: int) -> None:
        self.forward = list(points)
        # A block's backward begins before those of the blocks inside it.
        self.backward = list(_backward_order(points))
        self._places = (
            {point: place for place, point in enumerate(self.forward)},
            {point: place for place, point in enumerate(self.backward)},
        )
        self._prefetch = prefetch
        blocks = [point for point in points if not point.is_root]
        roots = {point for point in points if point.is_root}
        turning = [point for point in self.backward if not point.is_root][: prefetch + 1]
        self.kept_after_backward = {*roots, *blocks[: prefetch + 1]}
        self.kept_after_forward = {*roots, *turning}

    def after(self, point: HookPoint, in_backward: bool) -> Sequence[HookPoint]:
        """The points to prefetch while this one runs."""
        order, place = (self.forward, self.backward)[in_backward], self._places[in_backward][point]
        return order[place + 1 : place + 1 + self._prefetch]

    def beyond(self, point: HookPoint) -> Sequence[HookPoint]:
        """The point that follows those prefetched in backward, if there is one."""
        place = self._places[True][point] + 1 + self._prefetch
        return self.backward[place : place + 1] if self._prefetch else []


def _backward_order(points: Sequence[HookPoint]) -> Iterator[HookPoint]:
    """Points in the order in which their backwards begin: the last first, and each before those
    inside it. The root comes last, although its backward is around all others."""
    roots = [point for point in points if point.is_root]
    outermost = [p for p in points if not p.is_root and (p.parent is None or p.parent.is_root)]
    inside: dict[HookPoint, list[HookPoint]] = defaultdict(list)
    for point in points:
        if point.parent is not None:
            inside[point.parent].append(point)
    rest = [*roots, *outermost]
    while rest:
        point = rest.pop()
        yield point
        rest += inside[point] if not point.is_root else []


class ForwardRecord:
    """One forward of a block, as the gradient hook of the tensors that it made.

    It lives as long as the graph of that forward. `number` counts the forwards of all blocks that
    had begun when this one ended.
    """

    def __init__(
        self, point: HookPoint, number: int, begin_backward: "Callable[[ForwardRecord], None]"
    ) -> None:
        self.point = point
        self.number = number
        self._begin_backward = begin_backward

    def __call__(self, _gradient: torch.Tensor) -> None:
        """Called with the gradient of each tensor; the first one begins the block's backward."""
        self._begin_backward(self)


class PendingForwards:
    """The forwards of all blocks whose backward has not begun.

    Autograd runs them backward in reverse order, so the numbers of forwards tell which are over.
    """

    def __init__(self) -> None:
        self.number = 0
        # Weak, because a graph may be dropped without a backward.
        self._pending: dict[HookPoint, WeakSet[ForwardRecord]] = defaultdict(WeakSet)

    def add(self, record: ForwardRecord) -> None:
        self._pending[record.point].add(record)

    def discard(self, record: ForwardRecord) -> None:
        """The backward of this forward has begun."""
        self._pending[record.point].discard(record)

    def has(self, point: HookPoint, number: float = inf) -> bool:
        """Whether a forward of this block is pending, among those up to `number`: later ones belong
        to another graph."""
        return any(record.number <= number for record in self._pending[point])


class BackwardPass:
    """A backward that autograd runs now."""

    def __init__(self, reduces: bool) -> None:
        self.reduces = reduces
        """Whether parameters get a gradient in it."""
        self.newest = 0
        """The number of the newest forward whose backward has begun: none after it takes part."""
        self.missing: dict[HookPoint, set[tuple[int, int]]] = {}
        """Of points whose backward has begun and is not over: (unit, parameter) without a gradient
        so far."""
        self.done: set[HookPoint] = set()

    def begin(self, point: HookPoint) -> set[tuple[int, int]]:
        """The parameters of a point without a gradient so far."""
        if point not in self.missing:
            self.missing[point] = {
                (slot, number)
                for slot, unit in enumerate(point.units)
                for number in range(len(unit.parameters))
                if not unit.is_frozen
            }
        return self.missing[point]
