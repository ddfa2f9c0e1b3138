"""Rows of tokens that rank 0 asks about, scored by all ranks with the model as it is sharded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from megafrontier.common.errors import FatalError
from megafrontier.data.sampling.samples import Batch
from megafrontier.model.attention.kinds import KVCache
from megafrontier.model.loss import IGNORE_INDEX
from megafrontier.parallel.mesh import Mesh
from megafrontier.parallel.world import as_shared_error
from megafrontier.pipeline.work import Runner, Work

T = TypeVar("T")
HEADER = 2
"""Numbers before the ids of a row in a message: how many ids there are, and how many are scored."""


@dataclass(frozen=True)
class Row:
    """Ids of at most the model's sequence length + 1 tokens, of which the last `scored` count. With
    0 they are to be continued."""

    ids: Sequence[int]
    scored: int


@dataclass(frozen=True)
class RowScore:
    """log_probability: of the scored ids, each given all before it, in nats.
    is_greedy: whether each of them is the most likely one.
    likeliest: the most likely id in place of the scored one, if a single one is scored.
    """

    log_probability: float
    is_greedy: bool
    likeliest: int


class StopAsked(Exception):
    """All ranks break off, because one of them has been asked to stop."""


class RowScorer:
    """Scores rows for rank 0. All other ranks take part, in `run`.

    Rank 0 sends each group of rows to all ranks. A data-parallel rank computes its share of them,
    in micro-batches as in training, so a model needs no more memory than there. Rows are padded on
    the right, which no token before sees.
    """

    def __init__(
        self,
        runner: Runner,
        mesh: Mesh,
        global_batch: int,
        micro_batch: int,
        heartbeat: Callable[[], None] = lambda: None,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        """`heartbeat` and `stops`: as of `training.callbacks.evaluate.evaluate`, with groups of
        `global_batch` rows for global batches."""
        self._runner, self._mesh = runner, mesh
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._heartbeat, self._stops = heartbeat, stops
        self.is_computing = False
        """Whether all ranks are, so that what is raised here is raised by all."""
        config = runner.model.config
        self.sequence_length = config.sequence_length
        splits = mesh.splits
        # Compiled blocks would be compiled again for each new length.
        is_fixed = runner.model.is_compiled
        self._multiple = config.sequence_length if is_fixed else 2 * splits.context * splits.tensor

    def run(self, ask: Callable[[], T]) -> T | None:
        """Call `ask` on rank 0, which may call `score`. Returns its result there, None on the other
        ranks; None on all if `stops` did. All ranks call it and raise what `ask` raises."""
        found, problem = None, None
        self._runner.model.eval()
        try:
            if self._mesh.rank == 0:
                found, problem = self._ask(ask)
                self._exchange([])
            else:
                while rows := self._exchange([]):
                    self._compute(rows) if rows[0].scored else self._decode(rows)
            self._mesh.world.raise_first(problem)
        except StopAsked:
            return None
        finally:
            self._runner.model.train()
        return found

    def _ask(self, ask: Callable[[], T]) -> tuple[T | None, FatalError | None]:
        try:
            return ask(), None
        except Exception as error:
            if self.is_computing:  # all ranks are, and raise it, too
                raise
            return None, as_shared_error(error)

    def score(self, rows: Sequence[Row]) -> list[RowScore]:
        """The score of each row, in their order. On rank 0 only, inside `run`."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
        found: dict[int, RowScore] = {}
        for start in range(0, len(rows), self._global_batch):
            group = order[start : start + self._global_batch]
            sent = self._exchange([rows[i] for i in group])
            self.is_computing = True
            found |= zip(group, self._compute(sent), strict=True)
            self.is_computing = False
        return [found[i] for i in range(len(rows))]

    @property
    def has_cache(self) -> bool:
        """Whether `extend` is possible: only if each rank has all blocks and heads, and whole
        rows."""
        splits = self._mesh.splits
        return splits.tensor == splits.context == splits.pipeline == 1

    def extend(self, contexts: Sequence[Sequence[int]], add: Callable[[int, int], bool]) -> None:
        """Call `add` with the number of a context and the most likely next token, as long as it
        returns True, for each context. On rank 0 only, inside `run`.

        Keys and values are cached. The rows of a micro-batch advance together, from the shortest
        context on: to a longer one its own tokens are given.
        """
        order = sorted(range(len(contexts)), key=lambda i: -len(contexts[i]))
        size = self._mesh.data_size * self._micro_batch
        for start in range(0, len(contexts), size):
            group = order[start : start + size]
            rows = self._exchange([Row(contexts[i], 0) for i in group])
            self.is_computing = True
            self._decode(rows, [partial(add, i) for i in group])
            self.is_computing = False

    def _exchange(self, rows: Sequence[Row]) -> list[Row]:
        """Rank 0's rows, on every rank."""
        world, width = self._mesh.world, HEADER + max((len(row.ids) for row in rows), default=0)
        shape = torch.tensor([len(rows), width], device=world.device)
        count, width = world.maximum(shape * (world.rank == 0)).tolist()
        if count == 0:
            return []
        message = torch.zeros(count, width, dtype=torch.int64)
        for line, row in zip(message, rows, strict=False):
            values = torch.tensor([len(row.ids), row.scored, *row.ids])
            line[: len(values)] = values
        lines = world.maximum(message.to(world.device).view(-1)).view(count, width).tolist()
        return [Row(ids[:length], scored) for length, scored, *ids in lines]

    def _compute(self, rows: Sequence[Row]) -> list[RowScore]:
        """The scores of rows that all ranks have. All ranks call it."""
        if self._stops():
            raise StopAsked
        mesh, size = self._mesh, self._micro_batch
        share = -(-len(rows) // (mesh.data_size * size)) * size
        own = [mesh.data_rank + mesh.data_size * i for i in range(share)]
        longest = max(len(row.ids) for row in rows) - 1
        width = min(-(-longest // self._multiple) * self._multiple, self.sequence_length)
        batches = [
            self._batch([rows[i] for i in own[at : at + size] if i < len(rows)], width, at)
            for at in range(0, share, size)
        ]
        sums = torch.zeros(mesh.data_size * share, 3, dtype=torch.float64, device=mesh.device)

        def add(batch: Batch, scores: Tensor) -> None:
            numbers = torch.arange(batch.targets.numel(), device=mesh.device)
            places = self._own(batch, numbers.view_as(batch.targets))
            targets = self._own(batch, batch.targets)
            is_scored = (targets != IGNORE_INDEX).double()
            is_other = (scores[:, 1] != targets) * is_scored
            values = torch.stack([scores[:, 0], is_other, scores[:, 1] * is_scored], 1)
            row = (places // width + batch.first_sample) * mesh.data_size + mesh.data_rank
            sums.index_add_(0, row, values)

        self._runner.evaluate(Work(batches, after=self._heartbeat, scores=add))
        if not mesh.counts_loss:
            sums.zero_()
        totals = mesh.world.total(sums.view(-1)).view_as(sums)[: len(rows)].tolist()
        return [RowScore(total, others == 0, round(best)) for total, others, best in totals]

    @torch.no_grad()
    def _decode(self, rows: Sequence[Row], adds: Sequence[Callable[[int], bool]] = ()) -> None:
        """`extend` of rows that all ranks have. `adds`: of each row, on rank 0. All ranks call
        it."""
        mesh, model, going = self._mesh, self._runner.model, set(range(len(adds)))
        own = [list(row.ids) for row in rows[mesh.data_rank :: mesh.data_size] or rows[:1]]
        dtype = next(model.parameters()).dtype
        cache = KVCache(model.config, batch=len(own), dtype=dtype, device=mesh.device)
        shortest = min(len(row.ids) for row in rows)
        new = [ids[:shortest] for ids in own]
        while True:
            if self._stops():
                raise StopAsked
            logits = model(torch.tensor(new, device=mesh.device), cache=cache, last_only=True)
            found, at = logits[:, -1].argmax(-1), cache.length
            best = torch.zeros(len(rows), dtype=torch.int64, device=mesh.device)
            if mesh.data_rank < len(rows):
                best[mesh.data_rank :: mesh.data_size] = found
            likeliest = mesh.world.total(best).tolist()
            going = {i for i in going if at < len(rows[i].ids) or adds[i](likeliest[i])}
            self._heartbeat()
            if not mesh.world.maximum(torch.tensor([len(going)], device=mesh.device)).item():
                return
            pairs = zip(own, found.tolist(), strict=True)
            new = [[ids[at] if at < len(ids) else token] for ids, token in pairs]

    def _own(self, batch: Batch, values: Tensor) -> Tensor:
        return self._runner.model.own_part(values, batch.documents).flatten()

    def _batch(self, rows: Sequence[Row], width: int, first: int) -> Batch:
        tokens = torch.zeros(self._micro_batch, width, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORE_INDEX)
        for i, row in enumerate(rows):
            ids, length = torch.tensor(row.ids), len(row.ids) - 1
            tokens[i, :length] = ids[:-1]
            targets[i, length - row.scored : length] = ids[1:][length - row.scored :]
        return Batch(tokens, targets, None, first).to(self._mesh.device)
