"""The wall time of a run's jobs divides into steps and all else, from its two files alone."""

import json
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from megafrontier.common.errors import LOST, STOPPED
from megafrontier.training.goodput import GoodputMeter, divide, goodput_of, read_goodput
from tests import runs


def at(second, **values):
    return {"at": datetime.fromtimestamp(second, UTC).isoformat(), **values}


def begin(launched, job="a", restart=0, finished=None, **values):
    """The record of a start that has met two seconds after its launch."""
    values |= {} if finished is None else {"finished": finished}
    start = {"reached": 0, "launched": launched, "job": job, "restarts": [restart, 0, 0]}
    return at(launched + 2, **start, **values)


def step(number, ended, seconds=1.0, **between):
    return at(ended, step=number, step_seconds=seconds, between_seconds=between)


def seconds(records, lines):
    return {kind: s for kind, s in goodput_of(records, lines).seconds.items() if s}


FIRST = [begin(1), at(6, first_step=1, step_seconds=1.0)]
"""Launched at second 1, its first step from 5 to 6."""
DONE = [step(1, 6), step(2, 9, saves=1.5), step(3, 12, evaluation=2.0)]


def test_a_run_without_failures_is_starts_steps_and_what_is_between_them():
    records = [*FIRST, at(14, between_seconds={"saves": 1.5}), at(14, ended=0)]
    found = goodput_of(records, DONE)
    assert found.seconds == {
        "steps": 3.0, "repeated": 0.0, "starts": 4.0, "saves": 3.0, "evaluation": 2.0,
        "other": 1.0, "failures": 0.0, "queued": 0.0,
    }  # fmt: skip
    assert (found.wall, found.starts, found.jobs) == (13, 1, 1)
    assert str(found) == (
        "goodput 23.1% of 13.0 s in 1 start; seconds: steps 3.0, starts 4.0, saves 3.0, "
        "evaluation 2.0, other 1.0"
    )


def test_steps_done_again_and_the_time_until_the_next_launch_are_no_steps():
    """Steps 2 and 3 are lost, so metrics.jsonl does not have them as of the first start."""
    records = [
        *FIRST,
        at(15, ended=LOST),
        at(16, failed=LOST),
        begin(18, finished=12.0),
        at(24, first_step=2, step_seconds=2.0),
        at(25, ended=0),
    ]
    lines = [step(1, 6), step(2, 24, 2.0), step(3, 25)]
    assert seconds(records, lines) == {
        "steps": 1 + 2 + 1,
        "repeated": 12 - 6,
        "failures": 18 - 12,
        "starts": 4 + (22 - 18),
    }


def test_time_between_two_jobs_is_no_part_of_the_goodput():
    stopped = [*FIRST, at(13, between_seconds={"saves": 1.0}), at(13, ended=STOPPED)]
    again = [begin(100, restart=1, finished=12.0), at(104, first_step=4, step_seconds=1.0)]
    found = goodput_of([*stopped, *again], [*DONE, step(4, 104)])
    assert found.seconds["queued"] == 100 - 13
    assert found.wall == (13 - 1) + (104 - 100)
    assert (found.starts, found.jobs) == (2, 2)
    assert "of 2 jobs, and 87.0 s between them" in str(found)


def test_a_start_that_finishes_no_step_is_a_start_and_one_that_never_met_a_failure():
    records = [
        *FIRST,
        at(13, ended=LOST),
        begin(14, finished=12.0),
        at(20, ended=LOST),
        at(30, unmet=70, job="a"),
        begin(40, finished=12.0),
        at(45, first_step=4, step_seconds=1.0),
    ]
    assert seconds(records, [*DONE, step(4, 45)]) == {
        "steps": 4, "saves": 1.5, "evaluation": 2, "other": 0.5,
        "starts": 4 + 6 + 4, "failures": (14 - 12) + (40 - 20),
    }  # fmt: skip


def test_a_start_whose_end_nobody_saw_ends_with_its_last_step():
    records = [*FIRST, begin(30, finished=12.0), at(34, first_step=4, step_seconds=1.0)]
    assert seconds(records, [*DONE, step(4, 34)])["failures"] == 30 - 12
    elsewhere = [*FIRST, begin(30, job="b", finished=12.0)]
    assert seconds(elsewhere, DONE)["queued"] == 30 - 12


def test_going_back_to_an_older_checkpoint_makes_the_steps_of_two_starts_repeated():
    records = [
        *FIRST,
        at(12, ended=LOST),
        begin(13, finished=12.0),
        at(18, first_step=4, step_seconds=1.0),
        at(19, ended=LOST),
        begin(20, finished=18.0),
        at(26, first_step=2, step_seconds=1.0),
    ]
    assert seconds(records, [step(1, 6), step(2, 26)])["repeated"] == (12 - 6) + (18 - 17)


def test_spans_follow_each_other_without_gaps_whatever_the_clocks_say():
    jumps = [begin(1), at(3, first_step=1, step_seconds=9.0), at(20, ended=LOST), begin(19)]
    spans = divide(jumps, [step(1, 3, 9.0), step(2, 2, 5.0), step(3, 30)])
    assert all(a.end == b.begin for a, b in pairwise(spans))
    assert all(span.seconds > 0 for span in spans)
    assert (spans[0].begin, spans[-1].end) == (1, 30)


def test_files_of_older_versions_have_no_goodput(tmp_path):
    assert divide([at(1, reached=0), at(5, first_step=1)], [{"step": 1, "step_seconds": 1}]) == []
    assert read_goodput(tmp_path).share == 0


def test_the_goodput_after_a_step_goes_on_from_that_of_the_starts_before(tmp_path):
    def write(name, lines):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    records = [*FIRST, at(13, ended=LOST), begin(100, job="b", finished=12.0)]
    write("attempts.jsonl", records)
    write("metrics.jsonl", [line | {"goodput": 3 / 11} for line in DONE])
    meter = GoodputMeter(tmp_path, now=103.0)
    assert meter.update(1.0, 104.0) == pytest.approx(4 / (12 + 4))
    assert meter.update(1.0, 106.0) == pytest.approx(5 / (12 + 6))
    records.append(at(104, first_step=4, step_seconds=1.0))
    found = goodput_of(records, [*DONE, step(4, 104), step(5, 106)])
    assert found.share == pytest.approx(5 / (12 + 6))


def test_the_log_of_a_run_ends_with_its_goodput_and_each_step_has_it(tmp_path):
    config = runs.make_config_file(tmp_path)
    lines = [
        line for line in runs.run(config, 2, *runs.ONE[:1], "checkpoint.every=3") if "loss" in line
    ]
    last = runs.log(tmp_path / "run").splitlines()[-1]
    found = read_goodput(tmp_path / "run")
    assert last == str(found)
    assert last.startswith("goodput ")
    steps = sum(line["step_seconds"] for line in lines)
    # The seconds come from another clock than `at`, and a step may not begin before the last `at`.
    assert found.seconds["steps"] == pytest.approx(steps, rel=0.02)
    assert found.seconds["saves"] > 0 < found.seconds["evaluation"]
    assert 0 < lines[0]["goodput"] < lines[-1]["goodput"] < 1
    assert lines[3]["between_seconds"]["saves"] > 0
