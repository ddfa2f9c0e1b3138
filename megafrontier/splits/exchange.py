"""The movement of tokens between the ranks of an expert split, level by level.

It is linear: `start_dispatch` copies each row to all ranks that need it, and `start_collect`, which
is its transpose, sums what comes back. The backward of each moves as the other does.

A message has the rows, in the level's wire format, and beside them what is small and exact: the
experts and weights of each row, or the gradients of the weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megafrontier.comm.streams import AsyncChain
from megafrontier.comm.wires.registry import CastCodec, Codec
from megafrontier.comm.wires.wire import Wire, Wires
from megafrontier.parallel.groups import all_gather_stacked, all_to_all
from megafrontier.parallel.hierarchy import Hierarchy, Levels
from megafrontier.partition.engine import Engine
from megafrontier.splits.routes import ABSENT, Counts, Hop, is_inside, make_hop

PEAK = 4.0
"""A chunk of tokens puts at most this many times as many pairs (token, expert) on a rank as a
micro-batch puts on each rank on average. More are processed in several chunks."""

READERS: dict[str, Callable[[Levels, int], Counts]] = {}
"""What knows the counts of ranks with so many tokens each, by the type of device, if it is not what
the device has counted. A simulation adds its own."""


@dataclass
class Routes:
    """Where some tokens of this rank go, and what this rank gets of all ranks' tokens. Complete
    when the dispatch is over."""

    hops: list[Hop] = field(default_factory=list)
    """Outermost level first."""
    experts: Tensor = field(default_factory=lambda: torch.empty(0))
    """int64 [rows, k]: this rank's experts of each row that it gets, from 0; or `ABSENT`."""
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    """fp32 [rows, k]: of these experts."""


@dataclass
class Move:
    """Rows on their way, and what goes with each: 4-byte numbers [rows, m] that stay exact."""

    chain: AsyncChain
    beside: Tensor | None = None
    held: tuple[Tensor | None, ...] = ()
    """What the streams of a device may still read before the wait."""


class TokenExchange:
    """The ranks between which tokens move."""

    def __init__(
        self, engine: Engine, hierarchy: Hierarchy, wires: Sequence[Wire | None] = ()
    ) -> None:
        """Tokens move over the levels of `hierarchy`, on the streams of `engine`. `wires`: of each
        level; None, and by default, the tokens keep their type."""
        self._engine, self._hierarchy = engine, hierarchy
        depth = len(hierarchy.levels.sizes)
        self._wires = tuple(wires) or (None,) * depth
        self._active = [level for level in range(depth) if hierarchy.groups[level] is not None]
        plain = Wires.plain(depth, torch.float32)
        self._collectives = engine.collectives(hierarchy, plain, "tokens")

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self._hierarchy.rank

    def chunks(self, owners: Tensor) -> list[tuple[Tensor, Counts]]:
        """The tokens of each chunk, int64 [n], and their counts. owners int64 [tokens, k]: the
        ranks of their experts. The number of chunks is the same on all ranks."""
        everything = torch.arange(len(owners), device=owners.device)
        counts = self._count(owners)
        limit = PEAK * counts.all_pairs / self._hierarchy.size
        waiting, found = [(everything, counts)], []
        while waiting:
            rows, counts = waiting.pop()
            if counts.most > limit and counts.tokens > 1:
                # Every second token, because the routing may change along a sequence.
                halves = rows[::2], rows[1::2]
                waiting += [(half, self._count(owners[half])) for half in halves[::-1]]
            else:
                found.append((rows, counts))
        return found

    def _count(self, owners: Tensor) -> Counts:
        """The counts of all ranks."""
        own = Counts.of(self._hierarchy.levels, owners)
        chain = AsyncChain(own[None], "count tokens", kind="tokens")
        for level in self._active:
            self._collectives.then(chain, level, partial(self._gather_counts, level, chain))
        table = self.wait(Move(chain))[0]
        read = READERS.get(table.device.type)
        if read is not None:
            return read(self._hierarchy.levels, len(owners))
        return Counts(self._hierarchy.levels, table.cpu())

    def _gather_counts(self, level: int, chain: AsyncChain, table: Tensor) -> Tensor:
        group = self._hierarchy.groups[level]
        assert group is not None
        with self._collectives.record(level, chain) as sent:
            sent.append((self._hierarchy.levels.sizes[level] - 1) * table.nbytes)
            return all_gather_stacked(table, group).flatten(0, 1)

    def start_dispatch(
        self, rows: Tensor, chosen: Tensor, weights: Tensor, counts: Counts, per_rank: int
    ) -> tuple[Move, Routes]:
        """Begin to bring rows [n, h] to the ranks of their experts: chosen int64 [n, k] with
        weights fp32 [n, k]. Each rank has `per_rank` experts, and `counts` are of these rows."""
        numbers = torch.cat([chosen.int(), weights.detach().float().view(torch.int32)], 1)
        move, routes = _move(rows, "dispatch tokens", numbers), Routes()
        for level in reversed(self._active):
            task = partial(self._dispatch, level, counts, per_rank, move, routes)
            self._collectives.then(move.chain, level, task)
        return move, routes

    def _dispatch(
        self, level: int, counts: Counts, per_rank: int, move: Move, routes: Routes, rows: Tensor
    ) -> Tensor:
        levels, rank = self._hierarchy.levels, self._hierarchy.rank
        assert move.beside is not None
        active = move.beside.shape[1] // 2
        hop = make_hop(levels, rank, level, counts, move.beside[:, :active].long() // per_rank)
        rows = self._spread(hop, self._codec(level, rows.dtype), move, rows)
        chosen = move.beside[:, :active]
        chosen[~is_inside(levels, rank, level, chosen // per_rank)] = ABSENT
        routes.hops.append(hop)
        return rows

    def finish_dispatch(self, move: Move, routes: Routes, per_rank: int) -> Tensor:
        """Wait for the rows [m, h] that arrive here, and complete their routes."""
        rows, numbers = self.wait(move)
        assert numbers is not None
        chosen, weights = numbers.chunk(2, 1)
        first = self._hierarchy.rank * per_rank
        routes.experts = torch.where(chosen == ABSENT, ABSENT, chosen - first).long()
        routes.weights = weights.contiguous().view(torch.float32)
        return rows

    def start_spread(self, rows: Tensor, routes: Routes) -> Move:
        """Begin to bring rows [n, h] the same ways again."""
        move = _move(rows, "dispatch tokens")
        for hop in routes.hops:
            codec = self._codec(hop.level, rows.dtype)
            self._collectives.then(move.chain, hop.level, partial(self._spread, hop, codec, move))
        return move

    def start_collect(self, rows: Tensor, routes: Routes, beside: Tensor | None = None) -> Move:
        """Begin to bring rows [m, h] back to the ranks of their tokens, summed by token: [n, h].
        `beside` fp32 [m, k] is summed too, without rounding on the way."""
        move = _move(rows, "combine tokens", beside)
        for hop in reversed(routes.hops):
            codec = self._codec(hop.level, rows.dtype)
            self._collectives.then(move.chain, hop.level, partial(self._collect, hop, codec, move))
        return move

    def wait(self, move: Move) -> tuple[Tensor, Tensor | None]:
        """Wait for the rows of a move and what goes with them, and note in the ledger how long it
        took."""
        with self._engine.ledger.waiting("tokens"):
            found = move.chain.wait(), move.beside
        for tensor in found:
            if tensor is not None and tensor.is_cuda:
                # Made on the stream of collectives, used on this one.
                tensor.record_stream(torch.cuda.current_stream())
        return found

    def _codec(self, level: int, dtype: torch.dtype) -> Codec:
        wire = self._wires[level]
        return CastCodec(dtype) if wire is None else wire.codec

    def _spread(self, hop: Hop, codec: Codec, move: Move, rows: Tensor) -> Tensor:
        """The rows of a hop: those that stay, then those of each peer."""
        kept = len(hop.keep)
        out = rows.new_empty(hop.rows_after, rows.shape[1])
        torch.index_select(rows, 0, hop.keep, out=out[:kept])
        beside = None if move.beside is None else move.beside[hop.send]
        found, others = self._exchange(
            hop.level, move.chain, codec, rows[hop.send], beside, hop.sent, hop.received
        )
        out[kept:] = found
        if move.beside is not None and others is not None:
            move.beside = torch.cat([move.beside[hop.keep], others])
        return out

    def _collect(self, hop: Hop, codec: Codec, move: Move, rows: Tensor) -> Tensor:
        """The inverse of `_spread`, with sums in fp32 that are rounded once."""
        kept = len(hop.keep)
        beside = None if move.beside is None else move.beside[kept:]
        found, others = self._exchange(
            hop.level, move.chain, codec, rows[kept:], beside, hop.received, hop.sent
        )
        if move.beside is not None and others is not None:
            move.beside = _sum_rows(hop, move.beside[:kept], others)
        return _sum_rows(hop, rows[:kept], found).to(rows.dtype)

    def _exchange(
        self,
        level: int,
        chain: AsyncChain,
        codec: Codec,
        rows: Tensor,
        beside: Tensor | None,
        sent: list[int],
        received: list[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows [n, h], so many to each peer, and what goes with them, [n, m]; receive those of
        the peers."""
        group = self._hierarchy.groups[level]
        assert group is not None
        messages, start = _encode(codec, rows), 0
        if beside is not None:
            parts = [beside.contiguous().view(torch.uint8), messages]
            messages, start = torch.cat(parts, 1), parts[0].shape[1]
        arrived = messages.new_empty(sum(received), messages.shape[1])
        with self._collectives.record(level, chain) as count:
            count.append(messages.nbytes)
            all_to_all(arrived, messages, group, received, sent)
        found = _decode(codec, arrived[:, start:], rows)
        if beside is None:
            return found, None
        return found, arrived[:, :start].contiguous().view(beside.dtype)


def _move(rows: Tensor, label: str, beside: Tensor | None = None) -> Move:
    return Move(AsyncChain(rows.detach(), label, kind="tokens"), beside, (rows, beside))


def _encode(codec: Codec, rows: Tensor) -> Tensor:
    """A message for each row [n, h], as bytes [n, m]."""
    if codec.sends_unchanged(rows.dtype):
        return rows.contiguous().view(torch.uint8)
    length = codec.message_length(rows.shape[1])
    messages = torch.empty(len(rows), length, dtype=codec.dtype, device=rows.device)
    if len(rows):
        codec.encode(rows.contiguous(), messages)
    return messages.view(torch.uint8)


def _decode(codec: Codec, messages: Tensor, like: Tensor) -> Tensor:
    """The rows of messages, bytes [n, m], in the type of a cast, or in that of `like`."""
    if codec.is_cast:
        return messages.view(codec.dtype)
    found = torch.empty(len(messages), like.shape[1], dtype=like.dtype, device=like.device)
    if len(messages):
        codec.decode(messages.contiguous().view(codec.dtype), found)
    return found


def _sum_rows(hop: Hop, kept: Tensor, arrived: Tensor) -> Tensor:
    """The sums fp32 [n, h], by row before the hop, of those that stayed and those that arrive."""
    total = torch.zeros(hop.rows, kept.shape[1], device=kept.device)
    total[hop.keep] = kept.float()
    # One peer after another: no row is there twice, and sums have the same order in every run.
    for places, part in zip(hop.send.split(hop.sent), arrived.split(hop.sent), strict=True):
        total.index_add_(0, places, part.float())
    return total
