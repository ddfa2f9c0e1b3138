"""The two moves over levels: gather a slice outward-in, reduce one inward-out.

Both walk the levels between two depths; a slice at depth d is a buffer cut through the first d
levels. Because deeper slices lie inside shallower ones, no step copies or permutes.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from megafrontier.cluster.hierarchy import Hierarchy
from megafrontier.partition.layout import shard_range
from megafrontier.partition.ledger import Ledger
from megafrontier.partition.wires import Wire, Wires


class Moves:
    """Gather and reduce on one hierarchy with its wires, counted in a ledger."""

    def __init__(self, hierarchy: Hierarchy, wires: Wires, ledger: Ledger) -> None:
        self.hierarchy = hierarchy
        self.ledger = ledger
        self._wires = wires

    def inside(self, buffer: torch.Tensor, depth: int, deeper: int) -> torch.Tensor:
        """This rank's slice at depth `deeper` as a view of its slice `buffer` at `depth`."""
        sizes = self.hierarchy.levels.sizes[depth:deeper]
        place = self.hierarchy.coordinates[depth:deeper]
        start, stop = shard_range(buffer.numel(), sizes, place, deeper - depth)
        return buffer[start:stop]

    def gather(self, shard: torch.Tensor, out: torch.Tensor, start: int, stop: int) -> None:
        """Fill `out`, a slice at depth `stop`, from every owner's `shard` at depth `start`.

        `shard` may be this rank's own part of `out`. Crosses levels start - 1 … stop.
        """
        self._gather(self._wires.gather, shard, out, start, stop)

    def _gather(
        self,
        wires: tuple[Wire, ...],
        shard: torch.Tensor,
        out: torch.Tensor,
        start: int,
        stop: int,
    ) -> None:
        for level in reversed(range(stop, start)):
            target = self.inside(out, stop, level)
            group = self.hierarchy.groups[level]
            if group is None:
                _copy(shard, target)
            else:
                with self.ledger.crossing(level) as sent:
                    sent.append(wires[level].gather(shard, target, group))
            shard = target
        if start == stop:
            _copy(shard, out)

    def publish(self, master: torch.Tensor, weights: torch.Tensor, start: int, stop: int) -> None:
        """Bring fp32 `master`, a slice at depth `start`, to all copies `weights` at depth `stop`.

        Over the outermost levels with delta wires only the change since the last publication
        travels. It is encoded against the weights as they were published, so what a message fails
        to say is part of the next change; every rank, the owner too, adds the same decoded change.
        """
        own = self.inside(weights, stop, start)
        change = None
        depth = start
        while depth > stop and self._wires.gather[depth - 1].is_delta:
            change = master - own if change is None else change
            depth -= 1
            out = change.new_empty(change.numel() * self.hierarchy.levels.sizes[depth])
            self._gather(self._wires.gather, change, out, depth + 1, depth)
            change = out
        reached = self.inside(weights, stop, depth)
        reached.copy_(master if change is None else reached + change)
        self._gather(self._wires.gather, reached, weights, depth, stop)

    def place(self, weights: torch.Tensor, start: int, stop: int) -> None:
        """Gather each owner's part of `weights`, at depth `start`, exactly to depth `stop`."""
        exact = Wires.plain(len(self._wires.gather), weights.dtype)
        self._gather(exact.gather, self.inside(weights, stop, start), weights, start, stop)

    def reduce(
        self,
        full: torch.Tensor,
        start: int,
        stop: int,
        errors: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> torch.Tensor:
        """Sum everybody's `full`, a slice at depth `start`, into the slice at depth `stop`.

        Returns fp32; `full` itself when no level was crossed. Crosses levels start … stop - 1.
        `errors` by level are what earlier messages failed to say (see `Wire.reduce`).
        """
        return self._reduce(self._wires.reduce, full, start, stop, errors)

    def reduce_exactly(self, full: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """`reduce` with every message in fp32."""
        plain = Wires.plain(len(self._wires.reduce), torch.float32)
        return self._reduce(plain.reduce, full, start, stop, {})

    def _reduce(
        self,
        wires: tuple[Wire, ...],
        full: torch.Tensor,
        start: int,
        stop: int,
        errors: Mapping[int, torch.Tensor],
    ) -> torch.Tensor:
        for level in range(start, stop):
            group = self.hierarchy.groups[level]
            if group is None:
                continue
            size = self.hierarchy.levels.sizes[level]
            out = torch.empty(full.numel() // size, dtype=torch.float32, device=full.device)
            with self.ledger.crossing(level) as sent:
                sent.append(wires[level].reduce(full, out, group, errors.get(level)))
            full = out
        return full

    def sum_replicas(self, shard: torch.Tensor, depth: int) -> None:
        """Sum an fp32 slice at `depth` in place over all levels beyond it.

        One owner adds up each piece and hands it back, so that all replicas hold the same bits;
        slow levels carry only a piece of the slice.
        """
        self._sum_replicas(self._wires.reduce, shard, depth)

    def sum_replicas_exactly(self, shard: torch.Tensor, depth: int) -> None:
        """`sum_replicas` with every message in fp32."""
        plain = Wires.plain(len(self._wires.reduce), torch.float32)
        self._sum_replicas(plain.reduce, shard, depth)

    def _sum_replicas(self, wires: tuple[Wire, ...], shard: torch.Tensor, depth: int) -> None:
        last = len(self.hierarchy.levels.sizes)
        piece = self._reduce(wires, shard, depth, last, {})
        self._gather(wires, piece, shard, last, depth)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
