"""Collectives over levels: gather slices from the outer levels inwards, reduce them outwards.

A slice at depth d is a buffer cut through the first d levels. Deeper slices are contiguous parts of
shallower ones, so no collective copies or permutes. Each gather, reduction or publication is a
chain of per-level collectives, issued on the streams of the levels. The caller gets the chain and
waits for its end.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from types import MappingProxyType

import torch
import torch.distributed as dist

from megafrontier.comm.delta import WeightDelta, delta_levels
from megafrontier.comm.ledger import Ledger, TrafficKind
from megafrontier.comm.streams import (
    DONE,
    HOST,
    AsyncChain,
    CommStreams,
    Op,
    WorkHandle,
)
from megafrontier.comm.wires.wire import Wire, Wires
from megafrontier.common.buffers import Workspace
from megafrontier.parallel.groups import all_gather, all_gather_stacked
from megafrontier.parallel.hierarchy import Hierarchy, shard_range

LABEL_BYTES = 128
NO_ERRORS: Mapping[int, torch.Tensor] = MappingProxyType({})


class LevelCollectives:
    """Gathers, reductions and publications on one hierarchy, in the formats of its wires.

    The ledger counts their bytes and seconds by level and kind.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        wires: Wires,
        ledger: Ledger,
        streams: CommStreams,
        check_order: bool = False,
        kind: TrafficKind | None = None,
    ) -> None:
        """With `check_order`, the ranks compare labels before each collective; then all levels must
        share one stream. `kind`: what is moved. Default: gathers and publications move weights,
        and reductions gradients."""
        self.hierarchy = hierarchy
        self.ledger = ledger
        self._wires = wires
        self._streams = streams
        self._check_order = check_order
        self._gathered: TrafficKind = kind or "weights"
        self._reduced: TrafficKind = kind or "gradients"

    def local_slice(self, buffer: torch.Tensor, depth: int, deeper: int) -> torch.Tensor:
        """This rank's slice at depth `deeper`, as a view of its slice `buffer` at `depth`."""
        sizes = self.hierarchy.levels.sizes[depth:deeper]
        coordinates = self.hierarchy.coordinates[depth:deeper]
        start, stop = shard_range(buffer.numel(), sizes, coordinates, deeper - depth)
        return buffer[start:stop]

    @property
    def wires(self) -> Wires:
        """The formats of messages."""
        return self._wires

    def gather(
        self,
        shard: torch.Tensor,
        out: torch.Tensor,
        start: int,
        stop: int,
        label: str,
        after: WorkHandle = DONE,
    ) -> AsyncChain:
        """Fill `out`, a slice at depth `stop`, from every owner's `shard`, a slice at depth
        `start`, over levels start - 1 down to stop. `shard` may be a view of `out`."""
        chain = AsyncChain(shard, label, after, self._gathered)
        self._gather(self._wires.gather, chain, AsyncChain(out, label), start, stop)
        return chain

    def gather_exact(
        self,
        weights: torch.Tensor,
        start: int,
        stop: int,
        label: str,
        kind: TrafficKind = "weights",
    ) -> AsyncChain:
        """Fill `weights`, a slice at depth `stop`, from every owner's slice of it at depth `start`,
        without any rounding."""
        exact = Wires.plain(len(self._wires.gather), weights.dtype)
        chain = AsyncChain(self.local_slice(weights, stop, start), label, kind=kind)
        self._gather(exact.gather, chain, AsyncChain(weights, label), start, stop)
        return chain

    def publish(
        self,
        master: torch.Tensor,
        weights: torch.Tensor,
        start: int,
        stop: int,
        label: str,
        after: WorkHandle = DONE,
        is_on_host: bool = False,
    ) -> AsyncChain:
        """Bring `master`, a slice at depth `start`, to all copies `weights` at depth `stop`, after
        its update. It is fp32, or rounded to the type of the copies. `is_on_host`: it lies in the
        host's memory.

        Over the outermost levels with delta wires, only the change since the last publication is
        sent. It is computed from the published weights, so the error of one message is part of the
        next change. Every rank, the owner too, adds the same decoded change.
        """
        levels = delta_levels(self._wires, self.hierarchy.levels.sizes, start, stop)
        chain = AsyncChain(self.local_slice(weights, stop, start), label, after, self._gathered)
        depth = levels[0] if levels else start
        if levels:
            if is_on_host:
                master = self._copy_from_host(chain, master)
            self._publish_delta(chain, master, self.local_slice(weights, stop, depth), levels)
        else:
            copy = lambda published: published.copy_(master, non_blocking=True)  # noqa: E731
            self.then(chain, HOST if is_on_host else start - 1, copy)
        self._gather(self._wires.gather, chain, AsyncChain(weights, label), depth, stop)
        return chain

    def _copy_from_host(self, chain: AsyncChain, master: torch.Tensor) -> torch.Tensor:
        """A buffer of the device, which holds `master` when the chain has got here."""
        buffer = chain.acquire(self._streams.buffers, master.numel(), master.dtype)

        def copy(value: torch.Tensor) -> torch.Tensor:
            buffer.copy_(master, non_blocking=True)
            return value

        self.then(chain, HOST, copy)
        return buffer

    def _publish_delta(
        self, chain: AsyncChain, master: torch.Tensor, base: torch.Tensor, levels: list[int]
    ) -> None:
        """Update all of `base`, published weights, from every owner's `master` over `levels`. The
        chain's tensor is this rank's own shard of `base`, then messages, then `base`."""
        numel, rows, previous_wire = master.numel(), 1, None
        for level in reversed(levels):
            wire = self._wires.gather[level]
            rows *= self.hierarchy.levels.sizes[level]
            shape = rows, wire.codec.message_length(numel)
            out = None
            if level != levels[0]:
                pool = self._streams.buffers
                out = chain.acquire(pool, prod(shape), wire.codec.dtype).view(shape)
            delta = WeightDelta(master, base, previous_wire, wire)
            self.then(chain, level, partial(self._gather_delta, delta, level, chain, out))
            previous_wire = wire

    def _gather_delta(
        self,
        delta: WeightDelta,
        level: int,
        chain: AsyncChain,
        out: torch.Tensor | None,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Gather messages into `out` for the next level; on the last level, which has no `out`,
        apply them to the weights."""
        group, workspace = self.hierarchy.groups[level], self._workspace(self._wires.gather, level)
        assert group is not None
        with self.record(level, chain) as sent:
            messages = delta.messages(value, workspace)
            shape = messages.shape[0] * dist.get_world_size(group), messages.shape[1]
            received = workspace.get("received", shape, messages.dtype) if out is None else out
            all_gather(received.view(-1), messages.view(-1), group)
            sent.append(received.nbytes - messages.nbytes)
            return delta.apply(received) if out is None else out

    def reduce(
        self,
        full: torch.Tensor,
        start: int,
        stop: int,
        label: str,
        errors: Mapping[int, torch.Tensor] = NO_ERRORS,
        after: WorkHandle = DONE,
    ) -> AsyncChain:
        """Sum every rank's `full`, a slice at depth `start`, into the slice at depth `stop`, over
        levels start … stop - 1.

        The sum is fp32 and overwrites memory of `full`; it is `full` itself if no level has peers.
        `errors` of earlier messages, by level, are as in `Wire.reduce`.
        """
        chain = AsyncChain(full, label, after, self._reduced)
        self._reduce(self._wires.reduce, chain, start, stop, errors)
        return chain

    def sum_over_replicas(
        self,
        chain: AsyncChain,
        depth: int,
        level: int,
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Sum the chain's fp32 slice at `depth` in place over all levels beyond it.

        One owner adds up each shard and gathers give it back, so all replicas hold the same bits,
        and slow levels carry only a shard of the slice. The gathers over the inner levels are
        deferred until `CommStreams.issue_deferred` or the next sum: its reduction uses these levels
        first, and would wait there until the slow level is done. Then comes `function` of the sum,
        on the stream of `level`.
        """
        rest = self._sum_over_replicas(self._wires.reduce, chain, depth)
        last = [Op(chain, level, function)]
        if rest:
            self._streams.defer([*rest, *last])
        else:
            self._streams.issue_deferred()
            self._streams.issue_all(last)

    def reduce_exact(self, full: torch.Tensor, start: int, stop: int, label: str) -> AsyncChain:
        """Sum `full`, which is overwritten, over levels start … stop - 1 and over all replicas, in
        fp32. Level `start` sends the type of `full`, because more bits would add nothing."""
        first, rest = (
            Wires.plain(len(self._wires.reduce), dtype).reduce
            for dtype in (full.dtype, torch.float32)
        )
        wires = first[: start + 1] + rest[start + 1 :]
        chain = AsyncChain(full, label, kind="gradients")
        self._reduce(wires, chain, start, stop, NO_ERRORS)
        self._streams.issue_all(self._sum_over_replicas(wires, chain, stop))
        return chain

    def then(
        self, chain: AsyncChain, level: int, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Append `function` to a chain, on the stream of `level`."""
        self._streams.issue(Op(chain, level, function))

    def _gather(
        self, wires: tuple[Wire, ...], chain: AsyncChain, out: AsyncChain, start: int, stop: int
    ) -> None:
        for level in reversed(range(stop, start)):
            self.then(chain, level, partial(self._gather_level, wires, chain, out, stop, level))

    def _gather_level(
        self,
        wires: tuple[Wire, ...],
        chain: AsyncChain,
        out: AsyncChain,
        stop: int,
        level: int,
        shard: torch.Tensor,
    ) -> torch.Tensor:
        target = self.local_slice(out.value, stop, level)
        group = self.hierarchy.groups[level]
        if group is not None:
            with self.record(level, chain) as sent:
                workspace = self._workspace(wires, level)
                sent.append(wires[level].gather(shard, target, group, workspace))
        elif shard.data_ptr() != target.data_ptr():
            target.copy_(shard)
        return target

    def _reduce(
        self,
        wires: tuple[Wire, ...],
        chain: AsyncChain,
        start: int,
        stop: int,
        errors: Mapping[int, torch.Tensor],
    ) -> None:
        for level in range(start, stop):
            error = errors.get(level)
            self.then(chain, level, partial(self._reduce_level, wires, level, chain, error))

    def _reduce_level(
        self,
        wires: tuple[Wire, ...],
        level: int,
        chain: AsyncChain,
        error: torch.Tensor | None,
        full: torch.Tensor,
    ) -> torch.Tensor:
        group = self.hierarchy.groups[level]
        if group is None:
            return full
        with self.record(level, chain) as sent:
            workspace = self._workspace(wires, level)
            out, count = wires[level].reduce(full, group, workspace, error)
            sent.append(count)
        return out

    def _sum_over_replicas(
        self, wires: tuple[Wire, ...], chain: AsyncChain, depth: int
    ) -> list[Op]:
        """Issue a sum over replicas, up to its gather over the outermost level. Returns its gathers
        over the inner levels."""
        last = len(self.hierarchy.levels.sizes)
        if all(group is None for group in self.hierarchy.groups[depth:]):
            return []  # there is one replica
        total = AsyncChain(chain.value, chain.label)

        def keep_total(value: torch.Tensor) -> torch.Tensor:
            total.value = value
            return value

        self.then(chain, depth, keep_total)
        self._reduce(wires, chain, depth, last, NO_ERRORS)
        with self._streams.collect() as gathers:
            self._gather(wires, chain, total, last, depth)
        self._streams.issue_all(gathers[:1])
        return gathers[1:]

    def _workspace(self, wires: tuple[Wire, ...], level: int) -> Workspace:
        """The workspace of the level's stream; for wires that only a checkpoint uses, a new one
        whose memory is freed again."""
        if wires in (self._wires.gather, self._wires.reduce):
            return self._streams.workspace(level)
        return Workspace(self.hierarchy.device)

    def record(self, level: int, chain: AsyncChain) -> AbstractContextManager[list[int]]:
        """Count a collective in the ledger, after the check of the order if there is one."""
        if self._check_order and level < self.hierarchy.machine_levels:
            self._compare_order(f"{chain.label!r} over {self.hierarchy.levels.names[level]!r}")
        machine_level = self.hierarchy.machine_level(level)
        return self.ledger.collective(machine_level, chain.label, chain.kind)

    def _compare_order(self, own: str) -> None:
        """Raise RuntimeError if a peer is about to issue another collective than this rank's `own`.

        Each rank compares over all its levels, whatever the level of its collective, because ranks
        at different levels would wait for each other in a circle. It finishes all comparisons
        before it raises, because peers that agree with it still need it on the outer levels.
        """
        rank, differing = self.hierarchy.world.rank, []
        raw = own.encode()[:LABEL_BYTES].ljust(LABEL_BYTES)
        sent = torch.tensor(list(raw), dtype=torch.uint8, device=self.hierarchy.device)
        for level in range(self.hierarchy.machine_levels):
            group = self.hierarchy.groups[level]
            if group is None:
                continue
            peers = self.hierarchy.peers[level]
            rows = map(bytes, all_gather_stacked(sent, group).tolist())
            differing += [(peer, row) for peer, row in zip(peers, rows, strict=True) if row != raw]
        if differing:
            peer, row = differing[0]
            other = row.decode(errors="replace").rstrip()
            raise RuntimeError(
                f"collectives in another order: rank {rank} comes to {own}, rank {peer} to {other}"
            )
