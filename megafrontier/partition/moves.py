"""The two moves over levels: gather a slice outward-in, reduce one inward-out; and publishing.

A slice at depth d is a buffer cut through the first d levels. Because deeper slices lie inside
shallower ones, no step copies or permutes. Each move is a chain of crossings, one level each, that
runs on the levels' lanes; the caller gets a ticket for its end.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist

from megafrontier.cluster.collectives import all_gather
from megafrontier.cluster.hierarchy import Hierarchy
from megafrontier.partition.lanes import DONE, Lanes, Task, Ticket
from megafrontier.partition.layout import shard_range
from megafrontier.partition.ledger import Ledger
from megafrontier.partition.wires import Wire, Wires

LABEL_BYTES = 96
NO_ERRORS: Mapping[int, torch.Tensor] = MappingProxyType({})


@dataclass
class Slot:
    """A tensor on its way: each crossing reads it and puts its result in its place.

    `label` says which move of which unit this is, in traces and when ranks disagree.
    """

    value: torch.Tensor
    label: str
    ticket: Ticket = DONE

    def wait(self) -> torch.Tensor:
        """The tensor at the end of the chain, ready to be used here."""
        self.ticket.wait()
        if self.value.is_cuda:
            # It was allocated on a lane's stream and is used on this one.
            self.value.record_stream(torch.cuda.current_stream())
        return self.value


class Moves:
    """Moves on one hierarchy with its wires, counted in a ledger."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        wires: Wires,
        ledger: Ledger,
        lanes: Lanes,
        check_order: bool = False,
    ) -> None:
        """With `check_order` the ranks compare labels before each crossing."""
        self.hierarchy = hierarchy
        self.ledger = ledger
        self._wires = wires
        self._lanes = lanes
        self._check_order = check_order

    def inside(self, buffer: torch.Tensor, depth: int, deeper: int) -> torch.Tensor:
        """This rank's slice at depth `deeper` as a view of its slice `buffer` at `depth`."""
        sizes = self.hierarchy.levels.sizes[depth:deeper]
        place = self.hierarchy.coordinates[depth:deeper]
        start, stop = shard_range(buffer.numel(), sizes, place, deeper - depth)
        return buffer[start:stop]

    def gather(
        self,
        shard: torch.Tensor,
        out: torch.Tensor,
        start: int,
        stop: int,
        label: str,
        after: Ticket = DONE,
    ) -> Ticket:
        """Fill `out`, a slice at depth `stop`, from every owner's `shard` at depth `start`.

        `shard` may be this rank's own part of `out`. Crosses levels start - 1 … stop.
        """
        slot = Slot(shard, label, after)
        self._gather(self._wires.gather, slot, Slot(out, label), start, stop)
        return slot.ticket

    def place(self, weights: torch.Tensor, start: int, stop: int, label: str) -> Ticket:
        """Gather each owner's part of `weights`, at depth `start`, exactly to depth `stop`."""
        exact = Wires.plain(len(self._wires.gather), weights.dtype)
        slot = Slot(self.inside(weights, stop, start), label)
        self._gather(exact.gather, slot, Slot(weights, label), start, stop)
        return slot.ticket

    def publish(
        self, master: torch.Tensor, weights: torch.Tensor, start: int, stop: int, label: str
    ) -> Ticket:
        """Bring fp32 `master`, a slice at depth `start`, to all copies `weights` at depth `stop`.

        Over the outermost levels with delta wires only the change since the last publication
        travels. It is encoded against the weights as they were published, so what a message fails
        to say is part of the next change; every rank, the owner too, adds the same decoded change.
        """
        own = self.inside(weights, stop, start)
        depth = start
        while depth > stop and self._wires.gather[depth - 1].is_delta:
            depth -= 1
        if depth == start:
            slot = Slot(own, label)
            self.then(slot, start - 1, lambda: own.copy_(master))
        else:
            slot = self._publish_change(master, Slot(own, label), start, depth)
            reached = self.inside(weights, stop, depth)
            self.then(slot, depth, partial(_add_change, slot, reached))
        self._gather(self._wires.gather, slot, Slot(weights, label), depth, stop)
        return slot.ticket

    def _publish_change(self, master: torch.Tensor, slot: Slot, start: int, stop: int) -> Slot:
        """A chain to the fp32 change of the slice at depth `stop`, decoded alike on every rank."""
        self.then(slot, start - 1, partial(_subtract, slot, master))
        for level in reversed(range(stop, start)):
            self.then(slot, level, partial(self._pass_change_on, slot, level))
        return slot

    def _pass_change_on(self, slot: Slot, level: int) -> None:
        change = slot.value
        out = change.new_empty(change.numel() * self.hierarchy.levels.sizes[level])
        self._cross_gather(self._wires.gather, slot, Slot(out, slot.label), level, level)

    def reduce(
        self,
        full: torch.Tensor,
        start: int,
        stop: int,
        label: str,
        errors: Mapping[int, torch.Tensor] = NO_ERRORS,
        after: Ticket = DONE,
    ) -> Slot:
        """Sum everybody's `full`, a slice at depth `start`, into the slice at depth `stop`.

        Ends with fp32, or `full` itself when no level was crossed. Crosses levels start … stop - 1.
        `errors` by level are what earlier messages failed to say (see `Wire.reduce`).
        """
        slot = Slot(full, label, after)
        self._reduce(self._wires.reduce, slot, start, stop, errors)
        return slot

    def sum_replicas(self, slot: Slot, depth: int) -> None:
        """Go on to sum an fp32 slice at `depth` in place over all levels beyond it.

        One owner adds up each piece and hands it back, so that all replicas hold the same bits;
        slow levels carry only a piece of the slice.
        """
        self._sum_replicas(self._wires.reduce, slot, depth)

    def reduce_exactly(self, full: torch.Tensor, start: int, stop: int, label: str) -> Slot:
        """Sum `full` over levels start … stop - 1, and over all replicas, in fp32."""
        plain = Wires.plain(len(self._wires.reduce), torch.float32)
        slot = Slot(full, label)
        self._reduce(plain.reduce, slot, start, stop, NO_ERRORS)
        self._sum_replicas(plain.reduce, slot, stop)
        return slot

    def then(self, slot: Slot, level: int, task: Task) -> None:
        """Go on with `task` on the lane of `level`: a crossing of it, or local work beside one."""
        slot.ticket = self._lanes.run(max(level, 0), task, slot.ticket)

    def _gather(
        self, wires: tuple[Wire, ...], slot: Slot, out: Slot, start: int, stop: int
    ) -> None:
        for level in reversed(range(stop, start)):
            self.then(slot, level, partial(self._cross_gather, wires, slot, out, stop, level))

    def _cross_gather(
        self, wires: tuple[Wire, ...], slot: Slot, out: Slot, stop: int, level: int
    ) -> None:
        target = self.inside(out.value, stop, level)
        group = self.hierarchy.groups[level]
        if group is not None:
            with self._crossing(level, group, slot.label) as sent:
                sent.append(wires[level].gather(slot.value, target, group))
        elif slot.value.data_ptr() != target.data_ptr():
            target.copy_(slot.value)
        slot.value = target

    def _reduce(
        self,
        wires: tuple[Wire, ...],
        slot: Slot,
        start: int,
        stop: int,
        errors: Mapping[int, torch.Tensor],
    ) -> None:
        for level in range(start, stop):
            error = errors.get(level)
            self.then(slot, level, partial(self._cross_reduce, wires, slot, level, error))

    def may_leave_errors(self, level: int) -> bool:
        """Whether gradients cross a level, and in low bits."""
        return self.hierarchy.groups[level] is not None and self._wires.reduce[level].is_low_bit

    def _cross_reduce(
        self, wires: tuple[Wire, ...], slot: Slot, level: int, error: torch.Tensor | None
    ) -> None:
        group = self.hierarchy.groups[level]
        if group is None:
            return
        full = slot.value
        size = self.hierarchy.levels.sizes[level]
        out = torch.empty(full.numel() // size, dtype=torch.float32, device=full.device)
        with self._crossing(level, group, slot.label) as sent:
            sent.append(wires[level].reduce(full, out, group, error))
        slot.value = out

    def _crossing(
        self, level: int, group: dist.ProcessGroup, label: str
    ) -> AbstractContextManager[list[int]]:
        if self._check_order:
            self._compare(level, group, label)
        return self.ledger.crossing(level, label)

    def _compare(self, level: int, group: dist.ProcessGroup, label: str) -> None:
        """Raise RuntimeError when a peer is about to make another crossing than this one."""
        raw = label.encode()[:LABEL_BYTES].ljust(LABEL_BYTES)
        mine = torch.tensor(list(raw), dtype=torch.uint8, device=self.hierarchy.device)
        peers = self.hierarchy.levels.peers(self.hierarchy.rank, level)
        theirs = torch.empty(len(peers) * LABEL_BYTES, dtype=torch.uint8, device=mine.device)
        all_gather(theirs, mine, group)
        for peer, row in zip(peers, theirs.view(len(peers), -1).tolist(), strict=True):
            if bytes(row) != raw:
                raise RuntimeError(
                    f"collectives in another order: over level "
                    f"{self.hierarchy.levels.names[level]!r} rank {self.hierarchy.rank} comes to "
                    f"{label!r}, rank {peer} to {bytes(row).decode(errors='replace').rstrip()!r}"
                )

    def _sum_replicas(self, wires: tuple[Wire, ...], slot: Slot, depth: int) -> None:
        last = len(self.hierarchy.levels.sizes)
        if depth == last:
            return
        whole = Slot(slot.value, slot.label)
        self.then(slot, depth, partial(_remember, slot, whole))
        self._reduce(wires, slot, depth, last, NO_ERRORS)
        self._gather(wires, slot, whole, last, depth)


def _remember(slot: Slot, whole: Slot) -> None:
    whole.value = slot.value


def _subtract(slot: Slot, master: torch.Tensor) -> None:
    slot.value = master - slot.value


def _add_change(slot: Slot, reached: torch.Tensor) -> None:
    reached.copy_(reached + slot.value)
    slot.value = reached
