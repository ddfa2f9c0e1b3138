"""Schedules of a pipeline as tables: which rank runs which action, in which order.

Pure functions of the numbers of ranks, stages and micro-batches. Names and formulas, with `f` and
`b` the seconds of a stage's forward and backward (`b` = `i` + `w` where inputs and weights are
apart), m micro-batches, p ranks, v stages per rank, m >= p:

    1f1b         Narayanan et al., arXiv:1806.03377: idle (p - 1)(f + b), p - r activations on
                 rank r
    interleaved  Narayanan et al., arXiv:2104.04473: idle (p - 1)(f + b) of a stage v times as short
    zero_bubble  Qi et al., arXiv:2401.10241: ZB-H1, idle (p - 1)(f + i - w), p activations; with
                 two stages per rank ZB-V, idle p - 1 ticks if f = i = w, 2p activations of stages
                 half as large
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from megafrontier.common.errors import need
from megafrontier.pipeline.table import Action, ActionKind, ActionRow, Table
from megafrontier.pipeline.zero_bubble import folded_stages, zero_bubble

MOST_STAGES = 1_000_000
"""More than any model has blocks."""


@dataclass(frozen=True)
class Schedule:
    """What the rest of the library knows of a schedule."""

    name: str
    """Its name in `parallel.schedule`."""
    make: Callable[[int, int, int], Table]
    """(ranks, stages per rank, micro-batches) → the table."""
    stages_per_rank: tuple[range, str]
    """The numbers of stages that a rank may have, and how an error says it."""
    stages_of: Callable[[int, int, int], tuple[int, ...]]
    """(ranks, stages per rank, rank) → the stages of a rank, in ascending order."""
    splits_backward: bool = False
    """Whether the gradients of inputs and of weights are actions of their own."""

    def check(self, stages_per_rank: int) -> None:
        """Raise UserError if a rank cannot have so many stages."""
        allowed, text = self.stages_per_rank
        fits = f"need {text} with the {self.name} schedule"
        need(stages_per_rank in allowed, "parallel.stages_per_rank", stages_per_rank, fits)

    def rank_of(self, ranks: int, stages_per_rank: int, stage: int) -> int:
        """The rank of the pipeline that has a stage."""
        holders = (r for r in range(ranks) if stage in self.stages_of(ranks, stages_per_rank, r))
        return next(holders)


def find_schedule(name: str) -> Schedule:
    """The schedule of a name. Raises UserError if there is none."""
    need(name in SCHEDULES, "parallel.schedule", name, f"need {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


@cache
def make_table(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Table:
    """The table of the schedule of this name.

    Raises UserError for a schedule that has no table for `stages_per_rank`.
    """
    chosen = find_schedule(schedule)
    chosen.check(stages_per_rank)
    return chosen.make(ranks, stages_per_rank, micro_batches)


def in_turn(ranks: int, stages_per_rank: int, rank: int) -> tuple[int, ...]:
    """The stages of a rank if stages go round the ranks: each round visits them in the same
    order."""
    return tuple(range(rank, ranks * stages_per_rank, ranks))


def one_forward_one_backward(ranks: int, stages_per_rank: int, micro_batches: int) -> Table:
    """1F1B, and with several stages per rank its interleaved form."""
    return tuple(_row(ranks, stages_per_rank, micro_batches, rank) for rank in range(ranks))


def _row(ranks: int, stages: int, micro_batches: int, rank: int) -> ActionRow:
    """Forwards until the first backward is there, then one forward and one backward in turn."""
    groups = _groups(ranks, micro_batches) if stages > 1 else [range(micro_batches)]
    forwards = [(s, i) for group in groups for s in range(stages) for i in group]
    backwards = [(s, i) for group in groups for s in reversed(range(stages)) for i in group]
    # The last stage of this rank is forwarded first after (stages - 1) * len(groups[0]) forwards
    # of its other stages. Its backward comes when the ranks after this one have had it, too.
    hops = ranks - 1 - rank if stages == 1 else 2 * (ranks - 1 - rank)
    ahead = min(len(forwards), hops + (stages - 1) * len(groups[0]))
    row = [_action(ActionKind.FORWARD, ranks, rank, at) for at in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += [
            _action(ActionKind.FORWARD, ranks, rank, forward),
            _action(ActionKind.BACKWARD, ranks, rank, backward),
        ]
    left = backwards[len(forwards) - ahead :]
    return (*row, *(_action(ActionKind.BACKWARD, ranks, rank, at) for at in left))


def _action(kind: ActionKind, ranks: int, rank: int, at: tuple[int, int]) -> Action:
    place, micro_batch = at
    return Action(kind, place * ranks + rank, micro_batch)


def _groups(ranks: int, micro_batches: int) -> list[range]:
    """Runs of micro-batches that pass one stage of a rank before the rank turns to the next.

    A run must be at least as long as the row of ranks, or its first micro-batch is not back yet.
    The longer runs come first, because the first one says how far forwards are ahead.
    """
    count = max(1, micro_batches // ranks)
    size, longer = divmod(micro_batches, count)
    starts = [i * size + min(i, longer) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("1f1b", one_forward_one_backward, (range(1, 2), "1"), in_turn),
        Schedule(
            "interleaved", one_forward_one_backward, (range(2, MOST_STAGES), "2 or more"), in_turn
        ),
        Schedule("zero_bubble", zero_bubble, (range(1, 3), "1 or 2"), folded_stages, True),
    )
}
"""By name. `ParallelConfig.schedule` lists the names, too."""
