"""The two moves over levels: gather a slice outward-in, reduce one inward-out; and publishing.

A slice at depth d is a buffer cut through the first d levels. Because deeper slices lie inside
shallower ones, no step copies or permutes. Each move is a chain of crossings, one level each, that
runs on the levels' lanes; the caller gets a ticket for its end.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from types import MappingProxyType

import torch
import torch.distributed as dist

from megafrontier.common.buffers import BufferPool, Workspace
from megafrontier.parallel.groups import all_gather_stacked
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.partition.comm.delta import Change, levels_of_changes
from megafrontier.partition.comm.ledger import Ledger
from megafrontier.partition.comm.pending import Slot, Step, Work, weave
from megafrontier.partition.comm.streams import DONE, Lanes, Ticket
from megafrontier.partition.layout import shard_range
from megafrontier.partition.wires.wire import Wire, Wires, pass_on

LABEL_BYTES = 128
NO_ERRORS: Mapping[int, torch.Tensor] = MappingProxyType({})


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
        """With `check_order` the ranks compare labels before each crossing; for that the levels
        must share one lane."""
        self.hierarchy = hierarchy
        self.ledger = ledger
        self._wires = wires
        self._lanes = lanes
        self._check_order = check_order
        self._held: list[Step] | None = None
        self._way_back: list[Step] = []
        count = len(hierarchy.levels.sizes)
        self._workspaces = {
            lanes.number(level): Workspace(hierarchy.device) for level in range(count)
        }
        self._buffer_pool = BufferPool(hierarchy.device)

    @property
    def held_bytes(self) -> int:
        """Bytes that messages have needed so far, and keep."""
        return self._buffer_pool.held_bytes + sum(s.held_bytes for s in self._workspaces.values())

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
    ) -> Slot:
        """Fill `out`, a slice at depth `stop`, from every owner's `shard` at depth `start`.

        `shard` may be this rank's own part of `out`. Crosses levels start - 1 … stop.
        """
        slot = Slot(shard, label, after)
        self._gather(self._wires.gather, slot, Slot(out, label), start, stop)
        return slot

    def place(self, weights: torch.Tensor, start: int, stop: int, label: str) -> Slot:
        """Gather each owner's part of `weights`, at depth `start`, exactly to depth `stop`."""
        exact = Wires.plain(len(self._wires.gather), weights.dtype)
        slot = Slot(self.inside(weights, stop, start), label)
        self._gather(exact.gather, slot, Slot(weights, label), start, stop)
        return slot

    def publish(
        self, master: torch.Tensor, weights: torch.Tensor, start: int, stop: int, label: str
    ) -> Slot:
        """Bring fp32 `master`, a slice at depth `start`, to all copies `weights` at depth `stop`.

        Over the outermost levels with delta wires only the change since the last publication
        travels. It is encoded against the weights as they were published, so one message's error is
        part of the next change; every rank, the owner too, adds the same decoded change.
        """
        crossed = levels_of_changes(self._wires, self.hierarchy.levels.sizes, start, stop)
        slot = Slot(self.inside(weights, stop, start), label)
        if crossed:
            self._publish_change(slot, master, self.inside(weights, stop, crossed[0]), crossed)
        else:
            self.then(slot, start - 1, lambda published: published.copy_(master))
        reached = crossed[0] if crossed else start
        self._gather(self._wires.gather, slot, Slot(weights, label), reached, stop)
        return slot

    def _publish_change(
        self, slot: Slot, master: torch.Tensor, reached: torch.Tensor, crossed: list[int]
    ) -> None:
        """Go on from this rank's own part of `reached`, as it was published, to all of `reached`:
        over the levels `crossed` go the owners' messages, and each rank adds what they say."""
        numel, rows, came_by = master.numel(), 1, None
        for level in reversed(crossed):
            wire = self._wires.gather[level]
            rows *= self.hierarchy.levels.sizes[level]
            shape = rows, wire.codec.message_bytes(numel)
            out = None
            if level != crossed[0]:
                out = slot.borrow(self._buffer_pool, prod(shape), wire.codec.dtype).view(shape)
            change = Change(master, reached, came_by, wire)
            self.then(slot, level, partial(self._cross_change, change, level, slot.label, out))
            came_by = wire

    def _cross_change(
        self,
        change: Change,
        level: int,
        label: str,
        out: torch.Tensor | None,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Into `out` what goes on to another level; at the last one, without, into the weights."""
        group, workspace = (
            self.hierarchy.groups[level],
            self._workspace_for(self._wires.gather, level),
        )
        assert group is not None
        with self._crossing(level, label) as sent:
            messages = change.messages(value, workspace)
            shape = messages.shape[0] * dist.get_world_size(group), messages.shape[1]
            received = workspace.get("received", shape, messages.dtype) if out is None else out
            sent.append(pass_on(messages, received, group))
            return change.add(received) if out is None else out

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

        Ends with fp32 in the memory of `full`, which is used up, or `full` itself when no level was
        crossed. Crosses levels start … stop - 1. `errors` by level are those of earlier messages
        (see `Wire.reduce`).
        """
        slot = Slot(full, label, after)
        self._reduce(self._wires.reduce, slot, start, stop, errors)
        return slot

    def sum_replicas(self, slot: Slot, depth: int) -> None:
        """Go on to sum an fp32 slice at `depth` in place over all levels beyond it.

        One owner adds up each piece and hands it back, so that all replicas hold the same bits;
        slow levels carry only a piece of the slice. What comes back over the inner levels waits for
        `end_sums` or for the next sum, which crosses them first: it would hold them up until the
        slow level has been crossed.
        """
        way_back = self._sum_replicas(self._wires.reduce, slot, depth)
        self.end_sums()
        self._way_back = way_back

    def end_sums(self) -> None:
        """Give the lanes what is left of all sums over replicas."""
        steps, self._way_back = self._way_back, []
        self._issue_all(steps)

    def reduce_exactly(self, full: torch.Tensor, start: int, stop: int, label: str) -> Slot:
        """Sum `full`, which is used up, over levels start … stop - 1, and over all replicas, in
        fp32. Over level `start` it goes as it is: nothing would be gained by more bits."""
        as_it_is, plain = (
            Wires.plain(len(self._wires.reduce), dtype).reduce
            for dtype in (full.dtype, torch.float32)
        )
        wires = as_it_is[: start + 1] + plain[start + 1 :]
        slot = Slot(full, label)
        self._reduce(wires, slot, start, stop, NO_ERRORS)
        self._issue_all(self._sum_replicas(wires, slot, stop))
        return slot

    def then(self, slot: Slot, level: int, work: Work) -> None:
        """Go on with `work` on the lane of `level`: a crossing of it, or work beside one."""
        if self._held is None:
            self._issue(slot, level, work)
        else:
            self._held.append((slot, level, work))

    @contextmanager
    def woven(self) -> Iterator[None]:
        """Give the lanes a gather and a reduce, begun inside in this order, in that of `weave`."""
        with self._collected() as steps:
            yield
        self._issue_all(weave(steps))

    @contextmanager
    def _collected(self) -> Iterator[list[Step]]:
        """Steps that are begun inside, in place of giving them to the lanes."""
        steps: list[Step] = []
        self._held = steps
        try:
            yield steps
        finally:
            self._held = None

    def _issue_all(self, steps: Iterable[Step]) -> None:
        for slot, level, work in steps:
            self._issue(slot, level, work)

    def _issue(self, slot: Slot, level: int, work: Work) -> None:
        lane = self._lanes.number(max(level, 0))
        slot.ticket = self._lanes.run(lane, partial(_go_on, slot, work), slot.ticket)

    def _gather(
        self, wires: tuple[Wire, ...], slot: Slot, out: Slot, start: int, stop: int
    ) -> None:
        for level in reversed(range(stop, start)):
            self.then(slot, level, partial(self._cross_gather, wires, out, stop, level))

    def _cross_gather(
        self, wires: tuple[Wire, ...], out: Slot, stop: int, level: int, shard: torch.Tensor
    ) -> torch.Tensor:
        target = self.inside(out.value, stop, level)
        group = self.hierarchy.groups[level]
        if group is not None:
            with self._crossing(level, out.label) as sent:
                workspace = self._workspace_for(wires, level)
                sent.append(wires[level].gather(shard, target, group, workspace))
        elif shard.data_ptr() != target.data_ptr():
            target.copy_(shard)
        return target

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
            self.then(slot, level, partial(self._cross_reduce, wires, level, slot.label, error))

    def _cross_reduce(
        self,
        wires: tuple[Wire, ...],
        level: int,
        label: str,
        error: torch.Tensor | None,
        full: torch.Tensor,
    ) -> torch.Tensor:
        group = self.hierarchy.groups[level]
        if group is None:
            return full
        with self._crossing(level, label) as sent:
            workspace = self._workspace_for(wires, level)
            out, count = wires[level].reduce(full, group, workspace, error)
            sent.append(count)
        return out

    def _workspace_for(self, wires: tuple[Wire, ...], level: int) -> Workspace:
        """The lane's own; for what only a checkpoint sends, some that goes again."""
        if wires in (self._wires.gather, self._wires.reduce):
            return self._workspaces[self._lanes.number(level)]
        return Workspace(self.hierarchy.device)

    def _crossing(self, level: int, label: str) -> AbstractContextManager[list[int]]:
        if self._check_order:
            self._compare(f"{label!r} over {self.hierarchy.levels.names[level]!r}")
        return self.ledger.crossing(level, label)

    def _compare(self, mine: str) -> None:
        """Raise RuntimeError when a peer is about to make another crossing than this one.

        Each rank compares over all of its levels, whichever it is about to cross: ranks that come
        to different ones would wait for each other in a circle. And it does so to the end before
        it raises, or those that it agrees with would lack it further out.
        """
        rank, found = self.hierarchy.rank, []
        raw = mine.encode()[:LABEL_BYTES].ljust(LABEL_BYTES)
        sent = torch.tensor(list(raw), dtype=torch.uint8, device=self.hierarchy.device)
        for level, group in enumerate(self.hierarchy.groups):
            if group is None:
                continue
            peers = self.hierarchy.levels.peers(rank, level)
            theirs = zip(peers, map(bytes, all_gather_stacked(sent, group).tolist()), strict=True)
            found += [(peer, row) for peer, row in theirs if row != raw]
        if found:
            peer, row = found[0]
            other = row.decode(errors="replace").rstrip()
            raise RuntimeError(
                f"collectives in another order: rank {rank} comes to {mine}, rank {peer} to {other}"
            )

    def _sum_replicas(self, wires: tuple[Wire, ...], slot: Slot, depth: int) -> list[Step]:
        """Returns what is still to be given to the lanes: the way back over the inner levels."""
        last = len(self.hierarchy.levels.sizes)
        if all(group is None for group in self.hierarchy.groups[depth:]):  # there is but one
            return []
        whole = Slot(slot.value, slot.label)
        self.then(slot, depth, partial(_remember, whole))
        self._reduce(wires, slot, depth, last, NO_ERRORS)
        with self._collected() as way_back:
            self._gather(wires, slot, whole, last, depth)
        self._issue_all(way_back[:1])
        return way_back[1:]


def _go_on(slot: Slot, work: Work) -> None:
    slot.value = work(slot.value)


def _remember(whole: Slot, value: torch.Tensor) -> torch.Tensor:
    whole.value = value
    return value
