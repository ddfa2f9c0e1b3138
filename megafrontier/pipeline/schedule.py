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

from functools import cache
from itertools import pairwise

from megafrontier.common.errors import need
from megafrontier.pipeline.table import Action, Kind, Row, Table
from megafrontier.pipeline.zero_bubble import zero_bubble

SCHEDULES = ("1f1b", "interleaved", "zero_bubble")


@cache
def make_table(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Table:
    """The table of `schedule` (`1f1b`, `interleaved` or `zero_bubble`).

    Raises UserError for a schedule that has no table for `stages_per_rank`.
    """
    check_schedule(schedule, stages_per_rank)
    if schedule == "zero_bubble":
        return zero_bubble(ranks, stages_per_rank, micro_batches)
    return tuple(
        _one_forward_one_backward(ranks, stages_per_rank, micro_batches, rank)
        for rank in range(ranks)
    )


def check_schedule(schedule: str, stages_per_rank: int) -> None:
    """Raise UserError if `schedule` is unknown or does not work with `stages_per_rank`."""
    need(schedule in SCHEDULES, "parallel.schedule", schedule, f"need {', '.join(SCHEDULES)}")
    key, value = "parallel.stages_per_rank", stages_per_rank
    match schedule:
        case "1f1b":
            need(value == 1, key, value, "need 1 with the 1f1b schedule")
        case "interleaved":
            need(value >= 2, key, value, "need 2 or more with the interleaved schedule")
        case _:
            need(value in (1, 2), key, value, "need 1 or 2 with the zero_bubble schedule")


def _one_forward_one_backward(ranks: int, stages: int, micro_batches: int, rank: int) -> Row:
    """Forwards until the first backward is there, then one forward and one backward in turn."""
    groups = _groups(ranks, micro_batches) if stages > 1 else [range(micro_batches)]
    forwards = [(s, i) for group in groups for s in range(stages) for i in group]
    backwards = [(s, i) for group in groups for s in reversed(range(stages)) for i in group]
    # The last stage of this rank is forwarded first after (stages - 1) * len(groups[0]) forwards
    # of its other stages. Its backward comes when the ranks after this one have had it, too.
    hops = ranks - 1 - rank if stages == 1 else 2 * (ranks - 1 - rank)
    ahead = min(len(forwards), hops + (stages - 1) * len(groups[0]))
    row = [_action(Kind.FORWARD, ranks, rank, at) for at in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += [
            _action(Kind.FORWARD, ranks, rank, forward),
            _action(Kind.BACKWARD, ranks, rank, backward),
        ]
    left = backwards[len(forwards) - ahead :]
    return (*row, *(_action(Kind.BACKWARD, ranks, rank, at) for at in left))


def _action(kind: Kind, ranks: int, rank: int, at: tuple[int, int]) -> Action:
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
