"""The movement of tokens between the ranks of an expert split, level by level.

It is linear: `start_dispatch` copies each row to all ranks that need it, and `start_collect`, which
is its transpose, sums what comes back. The backward of each moves as the other does.

A message has the rows, in the level's wire format, and what is small and exact: the
experts and weights of each row, or the gradients of the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megafrontier.comm.rows import RouteStep, RowExchange
from megafrontier.comm.streams import AsyncChain
from megafrontier.comm.wires.wire import UNCHANGED, Wires, WorkWires
from megafrontier.model.moe.dispatch import ABSENT
from megafrontier.parallel.groups import all_gather_stacked
from megafrontier.parallel.hierarchy import Hierarchy, Levels
from megafrontier.partition.engine import Engine
from megafrontier.splits.token_routes import Counts, is_inside, plan_step

PEAK = 4.0
"""A chunk of tokens puts at most this many times as many pairs (token, expert) on a rank as a
micro-batch puts on each rank on average. More are processed in several chunks."""

READERS: dict[str, Callable[[Levels, int], Counts]] = {}
"""What knows the counts of ranks with so many tokens each, by the type of device, if it is not what
the device has counted. A simulation adds its own."""


@dataclass
class TokenRoutes:
    """Where some tokens of this rank go, and what this rank gets of all ranks' tokens. Complete
    when the dispatch is over."""

    steps: list[RouteStep] = field(default_factory=list)
    """Outermost level first."""
    experts: Tensor = field(default_factory=lambda: torch.empty(0))
    """int64 [rows, k]: this rank's experts of each row that it gets, from 0; or `ABSENT`."""
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    """fp32 [rows, k]: of these experts."""


@dataclass
class Move:
    """Rows on their way, and what goes with each: 4-byte numbers [rows, m] that stay exact."""

    chain: AsyncChain
    exact: Tensor | None = None
    held: tuple[Tensor | None, ...] = ()
    """What the streams of a device may still read before the wait."""


class TokenExchange:
    """The ranks between which tokens move."""

    def __init__(self, engine: Engine, hierarchy: Hierarchy, wires: WorkWires = UNCHANGED) -> None:
        """Tokens move over the levels of `hierarchy`, on the streams of `engine`."""
        self._engine, self._hierarchy = engine, hierarchy
        depth = len(hierarchy.levels.sizes)
        self._active = [level for level in range(depth) if hierarchy.groups[level] is not None]
        plain = Wires.plain(depth, torch.float32)
        self._collectives = engine.collectives(hierarchy, plain, "tokens")
        self._exchange = RowExchange(self._collectives, wires)

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
    ) -> tuple[Move, TokenRoutes]:
        """Begin to bring rows [n, h] to the ranks of their experts: chosen int64 [n, k] with
        weights fp32 [n, k]. Each rank has `per_rank` experts, and `counts` are of these rows."""
        numbers = torch.cat([chosen.int(), weights.detach().float().view(torch.int32)], 1)
        move, routes = _move(rows, "dispatch tokens", numbers), TokenRoutes()
        for level in reversed(self._active):
            task = partial(self._dispatch, level, counts, per_rank, move, routes)
            self._collectives.then(move.chain, level, task)
        return move, routes

    def _dispatch(
        self,
        level: int,
        counts: Counts,
        per_rank: int,
        move: Move,
        routes: TokenRoutes,
        rows: Tensor,
    ) -> Tensor:
        levels, rank = self._hierarchy.levels, self._hierarchy.rank
        assert move.exact is not None
        active = move.exact.shape[1] // 2
        owners = move.exact[:, :active].long() // per_rank
        step = plan_step(levels, rank, level, counts, owners)
        rows, move.exact = self._exchange.spread_with(step, move.chain, rows, move.exact)
        chosen = move.exact[:, :active]
        chosen[~is_inside(levels, rank, level, chosen // per_rank)] = ABSENT
        routes.steps.append(step)
        return rows

    def finish_dispatch(self, move: Move, routes: TokenRoutes, per_rank: int) -> Tensor:
        """Wait for the rows [m, h] that arrive here, and complete their routes."""
        rows, numbers = self.wait(move)
        assert numbers is not None
        chosen, weights = numbers.chunk(2, 1)
        first = self._hierarchy.rank * per_rank
        routes.experts = torch.where(chosen == ABSENT, ABSENT, chosen - first).long()
        routes.weights = weights.contiguous().view(torch.float32)
        return rows

    def start_spread(self, rows: Tensor, routes: TokenRoutes) -> Move:
        """Begin to bring rows [n, h] along the same routes again."""
        move = _move(rows, "dispatch tokens")
        for step in routes.steps:
            spread = partial(self._exchange.spread, step, move.chain)
            self._exchange.then(move.chain, step.level, spread)
        return move

    def start_collect(self, rows: Tensor, routes: TokenRoutes, exact: Tensor | None = None) -> Move:
        """Begin to bring rows [m, h] back to the ranks of their tokens, summed by token: [n, h].
        `exact` fp32 [m, k] is summed too, without rounding on the way."""
        move = _move(rows, "combine tokens", exact)
        for step in reversed(routes.steps):
            self._exchange.then(move.chain, step.level, partial(self._collect, step, move))
        return move

    def _collect(self, step: RouteStep, move: Move, rows: Tensor) -> Tensor:
        if move.exact is None:
            return self._exchange.collect(step, move.chain, rows).to(rows.dtype)
        total, move.exact = self._exchange.collect_with(step, move.chain, rows, move.exact)
        return total.to(rows.dtype)

    def wait(self, move: Move) -> tuple[Tensor, Tensor | None]:
        """Wait for the rows of a move and what goes with them, and note in the ledger how long it
        took."""
        with self._engine.ledger.waiting("tokens"):
            found = move.chain.wait(), move.exact
        for tensor in found:
            if tensor is not None and tensor.is_cuda:
                # Made on the stream of collectives, used on this one.
                tensor.record_stream(torch.cuda.current_stream())
        return found


def _move(rows: Tensor, label: str, exact: Tensor | None = None) -> Move:
    return Move(AsyncChain(rows.detach(), label, kind="tokens"), exact, (rows, exact))
