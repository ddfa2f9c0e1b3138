"""Every table is complete and ordered, and its bubble and memory are those of its formula."""

from collections.abc import Iterator

import pytest

from megafrontier.common.errors import UserError
from megafrontier.pipeline.schedule import find_schedule, make_table
from megafrontier.pipeline.simulate import StageCosts, peak_in_flight, simulate
from megafrontier.pipeline.table import Action, ActionKind, Table, message_for, message_of

UNEQUAL = StageCosts(forward=1.0, backward_input=1.2, backward_weight=0.7)
EVERY = [("1f1b", 1), *(("interleaved", v) for v in (2, 3, 4)), ("zero_bubble", 1)]


def sizes(exhaustive: bool) -> Iterator[tuple[int, int]]:
    """Ranks and micro-batches."""
    for ranks in range(1, 17) if exhaustive else (1, 2, 3, 5, 8):
        for micro_batches in range(1, 33) if exhaustive else (1, 2, 3, 7, 8, 9, 16, 19):
            yield ranks, micro_batches


def check_rows(table: Table, schedule: str, ranks: int, stages: int, micro_batches: int) -> None:
    """Each action once, on the rank of its stage, after what its rank must do before."""
    kinds = [ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT]
    kinds = [ActionKind.FORWARD, *(kinds if schedule == "zero_bubble" else [ActionKind.BACKWARD])]
    everything = {
        Action(kind, stage, i)
        for kind in kinds
        for stage in range(ranks * stages)
        for i in range(micro_batches)
    }
    found = [action for row in table for action in row]
    assert len(found) == len(everything)
    assert set(found) == everything
    for rank, row in enumerate(table):
        place = {action: i for i, action in enumerate(row)}
        for action in row:
            assert find_schedule(schedule).rank_of(ranks, stages, action.stage) == rank
            for earlier in kinds[: kinds.index(action.kind)]:
                assert place[action._replace(kind=earlier)] < place[action]


@pytest.mark.parametrize(("schedule", "stages"), [*EVERY, ("zero_bubble", 2)])
def test_every_action_is_in_the_table_once_and_no_rank_waits_for_ever(schedule, stages, exhaustive):
    for ranks, micro_batches in sizes(exhaustive):
        table = make_table(schedule, ranks, stages, micro_batches)
        check_rows(table, schedule, ranks, stages, micro_batches)
        spans = simulate(table, UNEQUAL).spans
        ends = {message_of(action): end for action, (_, end) in spans.items()}
        assert len(spans) == sum(map(len, table))
        for action, (start, _) in spans.items():
            needed = message_for(action, ranks * stages)
            assert needed is None or ends[needed] <= start


@pytest.mark.parametrize(("schedule", "stages"), EVERY)
def test_the_idle_time_of_a_table_is_that_of_its_formula_for_any_costs(
    schedule, stages, exhaustive
):
    for costs in (StageCosts(1.0, 1.0, 1.0), UNEQUAL):
        f, i, w = costs.forward, costs.backward_input, costs.backward_weight
        for ranks, m in sizes(exhaustive):
            seconds = simulate(make_table(schedule, ranks, stages, m), costs).seconds
            if schedule == "zero_bubble":
                idle = (ranks - 1) * (f + i - w) if m >= ranks else (ranks - 1) * (f + i)
                work = m * (f + i + w) if m >= ranks else m * (f + i) + w
            else:
                # With fewer micro-batches than ranks, the first one must pass all stages.
                work = stages * max(m, ranks) * (f + i + w)
                idle = (min(m, ranks) - 1) * (f + i + w)
            assert seconds == pytest.approx(work + idle)


def test_a_v_is_idle_for_one_tick_per_rank(exhaustive):
    for ranks, m in sizes(exhaustive):
        ticks = simulate(make_table("zero_bubble", ranks, 2, m)).seconds
        if m < ranks:
            assert ticks <= 4 * ranks + 3 * m - 1
        elif m == ranks or m >= 2 * ranks:
            assert ticks == 6 * m + ranks - 1
        else:
            assert ticks <= (6 * m + ranks - 1) * 1.04


def test_no_rank_holds_more_activations_than_its_formula_says(exhaustive):
    for ranks, m in sizes(exhaustive):
        behind = range(ranks - 1, -1, -1)  # ranks after each rank
        peaks = {case: peak_in_flight(make_table(*_sized(case, ranks, m))) for case in EVERY}
        assert peaks["1f1b", 1] == tuple(min(m, n + 1) for n in behind)
        assert max(peaks["zero_bubble", 1]) == max(peaks["1f1b", 1])
        longest = -(-m // max(1, m // ranks))
        for v in (2, 3, 4):
            expected = tuple(min(v * m, 2 * n + (v - 1) * longest + 1) for n in behind)
            assert peaks["interleaved", v] == expected
        # A stage of a V is half as large.
        assert max(peak_in_flight(make_table("zero_bubble", ranks, 2, m))) <= 2 * min(m, ranks)


def _sized(case: tuple[str, int], ranks: int, micro_batches: int) -> tuple[str, int, int, int]:
    return case[0], ranks, case[1], micro_batches


def test_zero_bubble_is_faster_than_1f1b_as_its_formula_says():
    for micro_batches, gain in ((8, 1.45), (32, 1.13)):
        plain = simulate(make_table("1f1b", 8, 1, micro_batches)).seconds
        assert plain / simulate(make_table("zero_bubble", 8, 1, micro_batches)).seconds > gain


@pytest.mark.parametrize(
    ("schedule", "stages", "line"),
    [
        ("gpipe", 1, "parallel.schedule: gpipe, need 1f1b, interleaved, zero_bubble"),
        ("1f1b", 2, "parallel.stages_per_rank: 2, need 1 with the 1f1b schedule"),
        ("interleaved", 1, "parallel.stages_per_rank: 1, need 2 or more with the interleaved"),
        ("zero_bubble", 3, "parallel.stages_per_rank: 3, need 1 or 2 with the zero_bubble"),
    ],
)
def test_a_schedule_without_a_table_for_the_stages_is_refused(schedule, stages, line):
    with pytest.raises(UserError, match=line):
        make_table(schedule, 4, stages, 8)
