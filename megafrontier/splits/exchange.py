"""The movement of tokens between the ranks of an expert split, level by level.

It is linear: `start_spread` copies each row to all ranks that need it, and `start_collect`, which
is its transpose, sums what comes back. Each is the other's backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megafrontier.parallel.groups import all_gather_stacked, all_to_all
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.partition.comm.streams import AsyncChain
from megafrontier.partition.engine import Engine
from megafrontier.partition.wires.registry import CastCodec, Codec
from megafrontier.partition.wires.wire import Wires
from megafrontier.splits.routes import ABSENT, Counts, Hop, inside, make_hop

PEAK = 3.0
"""A chunk of tokens puts at most this many times as many pairs (token, expert) on a rank as a
micro-batch puts on each rank on average. More are processed in several chunks."""


@dataclass
class Routes:
    """Where some tokens of this rank go, and what this rank gets of all ranks' tokens."""

    hops: list[Hop]
    """Outermost level first."""
    experts: Tensor
    """int64 [rows, k]: this rank's experts of each row that it gets, from 0; or `ABSENT`."""
    weights: Tensor
    """fp32 [rows, k]: of these experts."""


class TokenExchange:
    """The ranks between which tokens move."""

    def __init__(self, engine: Engine, hierarchy: Hierarchy) -> None:
        """Tokens move over the levels of `hierarchy`, on the streams of `engine`."""
        self._engine, self._hierarchy = engine, hierarchy
        depth = len(hierarchy.levels.sizes)
        self._active = [level for level in range(depth) if hierarchy.groups[level] is not None]
        wires = Wires.plain(depth, torch.float32)
        self._collectives = engine.collectives(hierarchy, wires, "tokens")

    def chunks(self, chosen: Tensor, weights: Tensor, per_rank: int) -> list[tuple[Tensor, Routes]]:
        """The tokens of each chunk, int64 [n], and their routes. The number of chunks is the same
        on all ranks."""
        everything = torch.arange(len(chosen), device=chosen.device)
        counts = self._count(chosen // per_rank)
        limit = PEAK * counts.all_pairs / self._hierarchy.size
        waiting, found = [(everything, counts)], []
        while waiting:
            rows, counts = waiting.pop()
            if counts.most > limit and counts.tokens > 1:
                # Every second token, because the routing may change along a sequence.
                halves = rows[::2], rows[1::2]
                waiting += [(half, self._count(chosen[half] // per_rank)) for half in halves[::-1]]
            else:
                found.append((rows, self._route(chosen[rows], weights[rows], per_rank, counts)))
        return found

    def _count(self, owners: Tensor) -> Counts:
        """The counts of all ranks."""
        own = Counts.of(self._hierarchy.levels, owners)
        chain = self._chain(own[None], "count tokens")
        for level in self._active:
            self._collectives.then(chain, level, partial(self._gather_counts, level, chain))
        return Counts(self._hierarchy.levels, self.wait(chain).cpu())

    def _gather_counts(self, level: int, chain: AsyncChain, table: Tensor) -> Tensor:
        group = self._hierarchy.groups[level]
        assert group is not None
        with self._collectives.record(level, chain) as sent:
            sent.append((self._hierarchy.levels.sizes[level] - 1) * table.nbytes)
            return all_gather_stacked(table, group).flatten(0, 1)

    def _route(self, chosen: Tensor, weights: Tensor, per_rank: int, counts: Counts) -> Routes:
        levels, rank = self._hierarchy.levels, self._hierarchy.rank
        active, hops = chosen.shape[1], []
        # One message has both. Experts are below 2^31.
        about = torch.cat([chosen.int(), weights.float().view(torch.int32)], 1)
        for level in reversed(self._active):
            owners = chosen.where(chosen == ABSENT, chosen // per_rank)
            hops.append(make_hop(levels, rank, level, counts, owners))
            about = self.wait(self._start_spread(about, hops[-1:], [CastCodec(torch.int32)]))
            chosen = about[:, :active].long()
            owners = inside(levels, rank, level, chosen // per_rank)
            chosen = chosen.where(owners != ABSENT, ABSENT)
        own = chosen.where(chosen == ABSENT, chosen - rank * per_rank)
        return Routes(hops, own, about[:, active:].contiguous().view(torch.float32))

    def start_spread(self, rows: Tensor, routes: Routes) -> AsyncChain:
        """Begin to bring rows [n, h] to the ranks of their experts."""
        return self._start_spread(rows, routes.hops, [CastCodec(rows.dtype)] * len(routes.hops))

    def _start_spread(
        self, rows: Tensor, hops: Sequence[Hop], codecs: Sequence[Codec]
    ) -> AsyncChain:
        chain = self._chain(rows, "dispatch tokens")
        for hop, codec in zip(hops, codecs, strict=True):
            self._collectives.then(chain, hop.level, partial(self._spread, hop, codec, chain))
        return chain

    def start_collect(self, rows: Tensor, routes: Routes) -> AsyncChain:
        """Begin to bring rows [m, h] back to the ranks of their tokens, summed by token: [n, h]."""
        chain = self._chain(rows, "combine tokens")
        for hop in reversed(routes.hops):
            codec = CastCodec(rows.dtype)
            self._collectives.then(chain, hop.level, partial(self._collect, hop, codec, chain))
        return chain

    def wait(self, chain: AsyncChain) -> Tensor:
        """Wait for the end of a chain, and note in the ledger how long it took."""
        with self._engine.ledger.waiting("tokens"):
            found = chain.wait()
        if found.is_cuda:
            # Made on the stream of collectives, used on this one.
            found.record_stream(torch.cuda.current_stream())
        return found

    def _spread(self, hop: Hop, codec: Codec, chain: AsyncChain, rows: Tensor) -> Tensor:
        """The rows of a hop: those that stay, then those of each peer."""
        kept = len(hop.keep)
        out = rows.new_empty(hop.rows_after, rows.shape[1])
        torch.index_select(rows, 0, hop.keep, out=out[:kept])
        messages = _encode(codec, rows[hop.send])
        received = self._exchange(hop.level, chain, messages, hop.sent, hop.received)
        if received.dtype == out.dtype:
            out[kept:] = received
        else:
            codec.decode(received, out[kept:])
        return out

    def _collect(self, hop: Hop, codec: Codec, chain: AsyncChain, rows: Tensor) -> Tensor:
        """The inverse of `_spread`, with sums in fp32 that are rounded once."""
        kept = len(hop.keep)
        total = torch.zeros(hop.rows, rows.shape[1], device=rows.device)
        total[hop.keep] = rows[:kept].float()
        messages = _encode(codec, rows[kept:].contiguous())
        received = self._exchange(hop.level, chain, messages, hop.received, hop.sent)
        values = received
        if codec.is_quantized:
            values = rows.new_empty(len(hop.send), rows.shape[1])
            codec.decode(received, values)
        # One peer after another: no row is there twice, and sums have the same order in every run.
        parts = zip(hop.send.split(hop.sent), values.split(hop.sent), strict=True)
        for places, part in parts:
            total.index_add_(0, places, part.float())
        return total.to(rows.dtype)

    def _exchange(
        self, level: int, chain: AsyncChain, messages: Tensor, sent: list[int], received: list[int]
    ) -> Tensor:
        """Send messages [n, m], so many to each peer, and receive those of the peers."""
        group = self._hierarchy.groups[level]
        assert group is not None
        out = messages.new_empty(sum(received), messages.shape[1])
        with self._collectives.record(level, chain) as count:
            count.append(messages.nbytes)
            all_to_all(out, messages, group, received, sent)
        return out

    def _chain(self, value: Tensor, label: str) -> AsyncChain:
        return AsyncChain(value.detach(), label, kind="tokens")


def _encode(codec: Codec, rows: Tensor) -> Tensor:
    """One message for each row; the rows themselves if they have the codec's type."""
    if rows.dtype == codec.dtype:
        return rows
    length = codec.message_bytes(rows.shape[1]) // codec.dtype.itemsize
    messages = torch.empty(len(rows), length, dtype=codec.dtype, device=rows.device)
    codec.encode(rows, messages)
    return messages
