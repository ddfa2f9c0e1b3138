"""Zero-bubble tables: backward of inputs and of weights apart (Qi et al., arXiv:2401.10241).

Other stages wait for the backward of inputs alone. The backward of weights fills the time in which
a rank would wait. ZB-H1 has one stage per rank. ZB-V has two that form a V, so that each rank holds
one stage near the start and one near the end. No rank holds more activations than rank 0 holds
under 1F1B.
"""

from collections import Counter
from collections.abc import Sequence

from megafrontier.pipeline.simulate import simulate
from megafrontier.pipeline.table import (
    Action,
    ActionKind,
    ActionRow,
    StageMessage,
    Table,
    message_for,
    message_of,
)

# The actions of a rank's first stage (F, I, W) and of its second stage, in short.
_Step = tuple[ActionKind, int]
F, I, W = (ActionKind.FORWARD, 0), (ActionKind.BACKWARD_INPUT, 0), (ActionKind.BACKWARD_WEIGHT, 0)  # noqa: E741
F2, I2, W2 = ((kind, 1) for kind, _ in (F, I, W))
# Which step a rank of a V prefers. Each is the best one for some numbers of micro-batches.
_PRIORITIES: tuple[tuple[_Step, ...], ...] = (
    (I2, I, F2, F, W, W2),
    (I, I2, F2, F, W2, W),
    (I, F2, F, I2, W2, W),
)


def zero_bubble(ranks: int, stages_per_rank: int, micro_batches: int) -> Table:
    """ZB-H1 (`stages_per_rank` 1) or ZB-V (2)."""
    if stages_per_rank == 1:
        return tuple(_h1_row(ranks, micro_batches, rank) for rank in range(ranks))
    table = tuple(_v_row(ranks, micro_batches, rank) for rank in range(ranks))
    if micro_batches >= 2 * ranks:
        return table
    # The rows of a long step have bubbles in a step that is shorter than their own start.
    tables = [table, *(_greedy_v(ranks, micro_batches, order) for order in _PRIORITIES)]
    return min(tables, key=lambda table: simulate(table).seconds)


def folded_stages(ranks: int, stages_per_rank: int, rank: int) -> tuple[int, ...]:
    """The stages of a rank. Two form a V: the first rank has the first stage and the last one."""
    return (rank,) if stages_per_rank == 1 else (rank, 2 * ranks - 1 - rank)


class _Builder:
    """The row of one rank. An action is left out where its micro-batches are used up."""

    def __init__(self, ranks: int, stages_per_rank: int, micro_batches: int, rank: int) -> None:
        self.actions: list[Action] = []
        self.done: Counter[_Step] = Counter()
        self.micro_batches = micro_batches
        self._stages = folded_stages(ranks, stages_per_rank, rank)

    def next(self, step: _Step) -> Action | None:
        """The next action of a step, if this rank's own earlier actions allow it."""
        kind, place = step
        before = {
            ActionKind.BACKWARD_INPUT: ActionKind.FORWARD,
            ActionKind.BACKWARD_WEIGHT: ActionKind.BACKWARD_INPUT,
        }
        allowed = self.done[before[kind], place] if kind in before else self.micro_batches
        if self.done[step] == allowed:
            return None
        return Action(kind, self._stages[place], self.done[step])

    def add(self, *steps: _Step, times: int = 1) -> None:
        """Append the next action of each step, `times` times."""
        for _ in range(times):
            for step in steps:
                if (action := self.next(step)) is not None:
                    self.actions.append(action)
                    self.done[step] += 1


def _h1_row(ranks: int, micro_batches: int, rank: int) -> ActionRow:
    row = _Builder(ranks, 1, micro_batches, rank)
    row.add(F, times=ranks - rank)
    for _ in range(micro_batches):
        row.add(I)
        # Later ranks hold fewer forwarded micro-batches, and keep more for their weights instead.
        if row.done[I] - row.done[W] > rank:
            row.add(W)
        row.add(F)
    row.add(W, times=micro_batches)
    return tuple(row.actions)


def _v_row(ranks: int, micro_batches: int, rank: int) -> ActionRow:
    row = _Builder(ranks, 2, micro_batches, rank)
    row.add(F, times=2 * (ranks - rank) - 1)  # until the first one comes back along the V
    row.add(F2, F, times=rank)  # until its backward comes
    row.add(F2, I2, W2, times=ranks - rank)  # until the backward has gone down and up the V
    row.add(F, I, W, F2, I2, W2, times=micro_batches - ranks)
    row.add(I, I2, times=rank)
    row.add(I, I2, W, times=micro_batches)
    row.add(W2, times=micro_batches)
    return tuple(row.actions)


def _greedy_v(ranks: int, micro_batches: int, priorities: Sequence[_Step]) -> Table:
    """A V in which each rank, at each tick, takes its first step that is ready and has room."""
    rows = [_Builder(ranks, 2, micro_batches, rank) for rank in range(ranks)]
    made: set[StageMessage | None] = {None}
    left = 6 * ranks * micro_batches
    while left:
        taken = [_take(row, rank, ranks, priorities, made) for rank, row in enumerate(rows)]
        made.update(message_of(action) for action in taken if action is not None)
        left -= sum(action is not None for action in taken)
    return tuple(tuple(row.actions) for row in rows)


def _take(
    row: _Builder,
    rank: int,
    ranks: int,
    priorities: Sequence[_Step],
    made: set[StageMessage | None],
) -> Action | None:
    # As many forwards ahead of the backward of weights as `_v_row` has.
    room = {F: 2 * ranks - 1 - rank + row.done[W], F2: rank + 1 + row.done[W2]}
    for step in priorities:
        action = row.next(step)
        if action is None or row.done[step] == room.get(step):
            continue
        if message_for(action, 2 * ranks) in made:
            row.add(step)
            return action
    return None
