"""Whole matrices for optimizers that need them, from shards that are cut anywhere.

Note [Owners of matrices]
A unit's flat buffer is cut into equal shards, across matrices, and a rank of a tensor split has
only a box of a matrix. For an update of whole matrices, each matrix has an owner. The ranks send
their parts of a matrix to the owner, and it sends the parts of the result back. So all states stay
sharded as those of other optimizers, and each matrix is computed once in a replica.

A part moves level by level, outermost first: over each level it goes to the peer that has the
owner's coordinate there. What the ranks of an inner level then hold together is one contiguous
slice of the unit, so parts from the peers of a level, in their order, are parts in the order of the
flat buffer. Over a level of size s a rank sends, there and back, (s - 1) / s of two shards; a
publication sends s - 1 shards.

Matrices of the same size are dealt out together, one to each rank in a round. While a round is
computed, the parts of the next are on their way.

The matrices of the experts of a block lie in one parameter. It is divided into as many runs of
experts as there are ranks, and each run is dealt out as one matrix is: its owner computes its
matrices in one batch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.comm.rows import RowExchange
from megafrontier.comm.streams import AsyncChain
from megafrontier.optim.base import MasterSlice
from megafrontier.parallel.hierarchy import shard_range
from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.partition.layout import Entry
from megafrontier.partition.unit import Unit

MatrixBox = tuple[slice, ...]
"""A box of a matrix."""


@dataclass(frozen=True)
class Matrix:
    """A matrix of the whole model, or matrices [n, rows, columns] of some experts, and its boxes in
    a unit of this rank.

    Ranks of a tensor split have several boxes of one matrix if it is several ones below each other.
    """

    index: int
    """The unit's index."""
    unit: Unit
    boxes: tuple[tuple[Entry, ParamSpec], ...]
    rows: int
    """Rows of the matrices of which it consists, which are updated as one each."""

    @property
    def spec(self) -> ParamSpec:
        return self.boxes[0][1]

    @property
    def numel(self) -> int:
        """Elements of the boxes."""
        return sum(entry.numel for entry, _ in self.boxes)

    @property
    def is_cut(self) -> bool:
        return self.numel < prod(self.spec.shape)

    def count(self, start: int, stop: int) -> int:
        """Elements of the boxes within [start, stop) of the unit's flat buffer."""
        return sum(stop - start for start, stop in self._ranges(start, stop))

    def slices(self) -> list[MasterSlice]:
        """The parts of the boxes in this rank's shard of the unit."""
        start, stop = self.unit.range
        return [(self.index, slice(a - start, b - start)) for a, b in self._ranges(start, stop)]

    def _ranges(self, start: int, stop: int) -> Iterable[tuple[int, int]]:
        for entry, _ in self.boxes:
            first, last = max(start, entry.offset), min(stop, entry.offset + entry.numel)
            if first < last:
                yield first, last

    def regions(self, rank: int, ranks: int) -> list[MatrixBox]:
        """The boxes of all `ranks` of a tensor split, this one's number being `rank`: those of the
        first rank, of the second, …"""
        return [
            tuple(
                slice(a, b)
                if b - a == size
                else slice(*(n + (other - rank) * (b - a) for n in (a, b)))
                for (a, b), size in zip(spec.box, spec.shape, strict=True)
            )
            for other in range(ranks)
            for _, spec in self.boxes
        ]


def find_matrices(units: Sequence[Unit], rows: Callable[[ParamSpec], int]) -> list[Matrix]:
    """The matrices with parameters in these units. `rows`: of the matrices that are updated as one
    each, or 0 for a parameter that is not meant."""
    found: dict[tuple[int, str], list[tuple[Entry, ParamSpec]]] = {}
    experts: list[Matrix] = []
    for index, unit in enumerate(units):
        for entry in unit.layout.entries:
            spec = unit.specs[entry.name]
            if rows(spec) and spec.kind == "expert":
                runs = _runs(unit, entry, spec)
                experts += [Matrix(index, unit, (run,), rows(spec)) for run in runs]
            elif rows(spec):
                found.setdefault((index, spec.name), []).append((entry, spec))
    matrices = [
        Matrix(index, units[index], tuple(boxes), rows(boxes[0][1]))
        for (index, _), boxes in found.items()
    ]
    return matrices + experts


def _runs(unit: Unit, entry: Entry, spec: ParamSpec) -> Iterable[tuple[Entry, ParamSpec]]:
    """The matrices of a rank's experts in runs, one for each owner."""
    count, *shape = entry.shape
    runs = min(count, prod(unit.hierarchy.levels.sizes[: unit.placement.optimizer]))
    bounds = [count * number // runs for number in range(runs + 1)]
    for first, last in pairwise(bounds):
        size = last - first, *shape
        part = Entry(entry.name, size, entry.offset + first * prod(shape))
        yield part, replace(spec, shape=size, box=())


class MatrixOwners:
    """Applies a function to whole matrices of which each rank has parts of its shards."""

    def __init__(self, matrices: Sequence[Matrix], tensor: LevelCollectives | None) -> None:
        """`tensor`: collectives over the ranks of a tensor split."""
        self._rounds: list[_Round] = []

        routes: dict[tuple[int, int, bool], list[Matrix]] = {}
        for matrix in matrices:
            unit = matrix.unit
            route = id(unit.hierarchy), unit.placement.optimizer, matrix.is_cut
            routes.setdefault(route, []).append(matrix)
        for members in routes.values():
            steps = _steps(members[0], tensor)
            ranks = prod(step.size for step in steps)
            members.sort(key=_cost, reverse=True)
            for at in range(0, len(members), ranks):
                self._rounds.append(_Round(members[at : at + ranks], steps, tensor))

    def apply(
        self,
        shards: Sequence[torch.Tensor],
        function: Callable[[Matrix, torch.Tensor], torch.Tensor],
    ) -> None:
        """Replace each matrix in `shards`, this rank's of each unit, by `function` of it, which has
        the same shape. All ranks call it. Shards may be in host memory; `function` is called on the
        device. The host waits for the device only if they are."""
        sent: _Parts | None = None
        returned: _Parts | None = None
        for number in range(len(self._rounds) + 2):
            started = None
            if number < len(self._rounds):
                started = self._rounds[number].send(shards)
            computed = None if sent is None else sent.of.compute(sent, function)
            if returned is not None:
                returned.of.store(returned, shards)
            sent, returned = started, computed


def _cost(matrix: Matrix) -> int:
    """What the iterations cost: each multiplies the smaller dimension m twice with all elements and
    once with m × m."""
    *count, rows, columns = matrix.spec.shape
    small, large = sorted((rows, columns))
    return prod(count) * small * small * (2 * large + small)


@dataclass(frozen=True)
class _MatrixStep:
    """A level over which parts move."""

    collectives: LevelCollectives
    level: int
    is_tensor: bool

    @property
    def size(self) -> int:
        return self.collectives.hierarchy.levels.sizes[self.level]

    @property
    def coordinate(self) -> int:
        return self.collectives.hierarchy.coordinates[self.level]

    def counts(self, matrix: Matrix) -> list[int]:
        """How many of a matrix's elements each peer holds before the step."""
        hierarchy = self.collectives.hierarchy
        sizes = hierarchy.levels.sizes
        if self.is_tensor:  # and each has those of its peers on the levels beyond
            return [matrix.numel * prod(sizes[self.level + 1 :])] * self.size
        coordinates, found = list(hierarchy.coordinates), []
        for peer in range(self.size):
            coordinates[self.level] = peer
            numel = matrix.unit.layout.numel
            found.append(matrix.count(*shard_range(numel, sizes, coordinates, self.level + 1)))
        return found


def _steps(matrix: Matrix, tensor: LevelCollectives | None) -> list[_MatrixStep]:
    """The levels between the ranks that have parts of a matrix, outermost first."""
    over = [(matrix.unit.collectives, matrix.unit.placement.optimizer, False)]
    if matrix.is_cut:
        assert tensor is not None
        over.append((tensor, len(tensor.hierarchy.levels.sizes), True))
    steps = [
        _MatrixStep(collectives, level, is_tensor)
        for collectives, depth, is_tensor in over
        for level in reversed(range(depth))
    ]
    return [step for step in steps if step.size > 1]


@dataclass
class _Parts:
    """Parts of a round's matrices on their way."""

    of: "_Round"
    chain: AsyncChain
    held: list[torch.Tensor]
    """Memory that passes between streams, until the chain's end."""


class _MatrixExchange:
    """The exchange of one step. Parts of `before`, in order of the owners' coordinates, become
    parts of `after`, those of each matrix together."""

    def __init__(
        self,
        step: _MatrixStep,
        counts: dict[int, list[int]],
        before: Sequence[int],
        kept: Sequence[int],
        after: Sequence[int],
        owners: dict[int, int],
    ) -> None:
        """`counts`: by matrix, elements of each peer. `kept`: the matrices whose parts come here,
        in the order in which peers send them. `owners`: coordinates, by matrix."""
        self._step, peers = step, range(step.size)
        self._rows = RowExchange(step.collectives)
        own = [counts[m][step.coordinate] for m in before]
        self._sent = [
            sum(n for m, n in zip(before, own, strict=True) if owners[m] == peer) for peer in peers
        ]
        self._received = [sum(counts[m][peer] for m in kept) for peer in peers]
        arrived = [(peer, m) for peer in peers for m in kept]
        grouped = [(peer, m) for m in after for peer in peers]
        self._arrived = [counts[m][peer] for peer, m in arrived]
        self._grouped = [counts[m][peer] for peer, m in grouped]
        self._order = [arrived.index(part) for part in grouped]
        self._inverse = [grouped.index(part) for part in arrived]

    def forward(self, parts: _Parts) -> None:
        self._move(parts, self._sent, self._received)
        self._permute(parts, self._arrived, self._order)

    def backward(self, parts: _Parts) -> None:
        self._permute(parts, self._grouped, self._inverse)
        self._move(parts, self._received, self._sent)

    def _move(self, parts: _Parts, sent: list[int], received: list[int]) -> None:
        level, rows = self._step.level, self._rows

        def move(value: torch.Tensor) -> torch.Tensor:
            out = value.new_empty(sum(received))
            rows.exchange(level, parts.chain, value[:, None], sent, received, out[:, None])
            return out

        rows.then(parts.chain, level, move)

    def _permute(self, parts: _Parts, lengths: list[int], order: list[int]) -> None:
        def permute(value: torch.Tensor) -> torch.Tensor:
            pieces = value.split(lengths)
            out = _cat([pieces[i] for i in order], value)
            parts.held += [value, out]
            return out

        self._step.collectives.then(parts.chain, self._step.level, permute)


class _Round:
    """Matrices that are computed at the same time, at most one on each rank."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        steps: Sequence[_MatrixStep],
        tensor: LevelCollectives | None,
    ) -> None:
        sizes = [step.size for step in steps]
        owners = [
            _coordinates(i * prod(sizes) // len(matrices), sizes) for i in range(len(matrices))
        ]
        here: list[int] = list(range(len(matrices)))
        first = order = _by_owner(here, owners, 0)
        self._exchanges = []
        for number, step in enumerate(steps):
            here = [m for m in here if owners[m][number] == step.coordinate]
            after = _by_owner(here, owners, number + 1)
            counts = {m: step.counts(matrices[m]) for m in order}
            to = {m: owners[m][number] for m in order}
            self._exchanges.append(_MatrixExchange(step, counts, order, here, after, to))
            order = after
        self._shards = [part for m in first for part in matrices[m].slices()]
        rank, ranks = (0, 1)
        if tensor is not None and any(step.is_tensor for step in steps):
            rank, ranks = tensor.hierarchy.shard_index(len(tensor.hierarchy.levels.sizes))
        self._owned = [(matrices[m], matrices[m].regions(rank, ranks)) for m in order]
        device = matrices[0].unit.hierarchy.device
        # Compute in bf16 where that is fast; the owners of matrices are sent the same type.
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._empty = torch.empty(0, dtype=dtype, device=device)

    def send(self, shards: Sequence[torch.Tensor]) -> _Parts:
        """Begin to bring the parts to the owners."""
        like = self._empty
        pieces = [shards[i][part].to(like.dtype).to(like.device) for i, part in self._shards]
        parts = self._start(_cat(pieces, like), "matrices")
        for exchange in self._exchanges:
            exchange.forward(parts)
        return parts

    def compute(
        self, parts: _Parts, function: Callable[[Matrix, torch.Tensor], torch.Tensor]
    ) -> _Parts:
        """Wait for the parts, compute the matrices that this rank owns, and begin to bring the
        parts of the results back."""
        value = parts.chain.wait()
        found, at = [], 0
        for matrix, regions in self._owned:
            numel = prod(matrix.spec.shape)
            whole = _join(value[at : at + numel], matrix.spec.shape, regions)
            result = function(matrix, whole)
            found += [result[region].reshape(-1) for region in regions]
            at += numel
        parts = self._start(_cat(found, value), "updates")
        for exchange in reversed(self._exchanges):
            exchange.backward(parts)
        return parts

    def store(self, parts: _Parts, shards: Sequence[torch.Tensor]) -> None:
        """Wait for the parts of the results, and write them to the shards."""
        value, at = parts.chain.wait(), 0
        for index, part in self._shards:
            length = part.stop - part.start
            shards[index][part] = value[at : at + length]
            at += length

    def _start(self, value: torch.Tensor, what: str) -> _Parts:
        return _Parts(self, AsyncChain(value, f"exchange {what}", kind="gradients"), [value])


def _coordinates(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of a rank on each of the steps, the last of which counts fastest."""
    found = []
    for size in reversed(sizes):
        index, coordinate = divmod(index, size)
        found.append(coordinate)
    return tuple(reversed(found))


def _by_owner(here: Sequence[int], owners: Sequence[tuple[int, ...]], number: int) -> list[int]:
    """Matrices in the order of the owners' coordinates of step `number`, if there is one."""
    return sorted(here, key=lambda m: owners[m][number : number + 1])


def _cat(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(list(pieces)) if pieces else like.new_empty(0)


def _join(flat: torch.Tensor, shape: tuple[int, ...], regions: Sequence[MatrixBox]) -> torch.Tensor:
    """A matrix from its boxes, which lie one after the other in `flat`."""
    if len(regions) == 1:
        return flat.view(shape)
    whole, at = flat.new_empty(shape), 0
    for region in regions:
        box = whole[region]
        box.copy_(flat[at : at + box.numel()].view(box.shape))
        at += box.numel()
    return whole
