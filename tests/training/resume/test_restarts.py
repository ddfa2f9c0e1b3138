"""A run that fails at the same step again and again is given up; any other run goes on."""

import json
from functools import partial

import pytest

from megafrontier.common.errors import (
    BAD_INPUT,
    BAD_NODE,
    FAILED,
    LOST,
    STOPPED,
    NodesUnfit,
    RunFailed,
)
from megafrontier.config import Config
from megafrontier.launch.health import excluded_nodes
from megafrontier.parallel.env import Identity
from megafrontier.parallel.world import World
from megafrontier.training.resume.restarts import (
    Outage,
    find_outage,
    has_begun,
    reached_step,
    record_begun,
    record_interrupt,
    record_start,
)

ALONE = Identity(0, 1, 0, "alone", host="frontier00001")
LIMIT = 3


class Killed(Exception):
    """What ends a start that cannot record how it ended."""


@pytest.fixture
def start(tmp_path):
    """Start the run once: it gets as far as `reached` and ends with a code, or because of a bad
    node, or is killed. Returns True; raises RunFailed if the run is given up."""
    config = Config()
    config.run.directory = str(tmp_path)
    config.train.attempts = LIMIT
    world = World.single()
    excluded = partial(excluded_nodes.read, tmp_path)

    def start_once(reached, code=None, bad_node=None, resumed=None, info=print, limit=LIMIT):
        config.train.attempts = limit
        try:
            with record_start(config, ALONE, world, info, excluded) as record:
                if resumed is not None:
                    record.add(resumed=resumed)
                metrics = "".join(f'{{"step": {step}, "loss": 1}}\n' for step in range(reached + 1))
                (tmp_path / "metrics.jsonl").write_text(metrics)
                if bad_node is not None:
                    excluded_nodes.add(tmp_path, [bad_node])
                    raise NodesUnfit(f"preflight: {bad_node} is slow")
                if code is None:
                    raise Killed
                record.end(code)
        except (Killed, NodesUnfit):
            pass
        return True

    return start_once


def entries(tmp_path):
    return [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]


def append(tmp_path, line):
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write(line)


def test_a_run_that_fails_at_one_step_too_often_is_given_up_and_names_the_step(start):
    for reached in (7, 7, 5):
        start(reached)
    with pytest.raises(RunFailed, match=r"step 6: the last 3 attempts .*attempts\.jsonl"):
        start(7)


def test_a_run_that_makes_progress_may_fail_as_often_as_it_likes(start):
    assert all(start(reached, LOST if reached % 2 else None) for reached in range(20))


@pytest.mark.parametrize("code", [STOPPED, BAD_INPUT, FAILED, 0])
def test_a_start_that_ends_in_order_begins_the_count_anew(start, code):
    assert all(start(7, end) for end in [None, None, code] * 4)


def test_a_run_that_is_always_stopped_before_its_first_step_is_given_up(start):
    """The time limit is too short for start-up and one step."""
    for _ in range(LIMIT):
        start(7, STOPPED, resumed=7)
    with pytest.raises(RunFailed, match="step 8: the last 3 attempts"):
        start(7, STOPPED, resumed=7)


def test_a_run_that_does_a_step_between_two_stops_goes_on(start):
    assert all(start(step + 1, STOPPED, resumed=step) for step in range(2 * LIMIT))


@pytest.mark.parametrize("resumed", [[100, 150, 200, 250, 300], [400, 100, 100, 90, 80]])
def test_a_run_that_has_saved_more_or_was_sent_back_makes_progress(start, resumed):
    """Even if it gets nowhere near the step that an earlier start had reached."""
    start(430)
    assert all(start(step + 30, resumed=step) for step in resumed)


def test_failures_after_the_same_checkpoint_count(start):
    for reached in (130, 120, 130):
        start(reached, resumed=100)
    with pytest.raises(RunFailed, match="the last 3 attempts"):
        start(130, resumed=100)


def test_zero_never_gives_up(start):
    assert all(start(7, limit=0) for _ in range(10))


def test_a_run_that_was_given_up_and_is_started_again_may_fail_as_often_again(start):
    for _ in range(2):
        assert all(start(7) for _ in range(LIMIT))
        with pytest.raises(RunFailed):
            start(7)


def test_ctrl_c_is_no_failure(start, tmp_path):
    for _ in range(4):
        assert start(7)
        record_interrupt(tmp_path)


def test_starts_that_each_exclude_another_node_do_not_count(start):
    start(7)
    start(7)
    for number in range(10):
        start(7, bad_node=f"frontier{number:05d}")
    assert start(7), "the third failure"
    with pytest.raises(RunFailed, match="the last 3 attempts"):
        start(7)


def test_a_bad_node_that_is_not_left_out_ends_the_run_like_any_failure(start, tmp_path):
    """A run that is started again and again on the same nodes cannot go on for ever."""
    for _ in range(1 + LIMIT):  # the first start excludes it
        start(7, bad_node="frontier00002")
    with pytest.raises(RunFailed, match="the last 3 attempts"):
        start(7)
    ends = [entry["ended"] for entry in entries(tmp_path)[1::2]]
    assert ends == [BAD_NODE] * (1 + LIMIT) + [FAILED]
    assert (tmp_path / "bad-nodes.txt").read_text() == "frontier00002\n"


def test_starts_that_the_batch_file_notes_are_counted_there_and_not_here(start, tmp_path):
    for _ in range(1 + LIMIT):
        assert start(7, STOPPED)
        append(tmp_path, '{"at": "2026", "job": "7", "unmet": 70}\n')
    assert all(start(7) for _ in range(LIMIT))
    append(tmp_path, '{"at": "2026", "job": "7", "ended": 3}\n')  # the batch file gave it up
    assert all(start(7) for _ in range(LIMIT))
    with pytest.raises(RunFailed):
        start(7)


def test_the_file_says_when_where_and_how_each_start_went(start, tmp_path):
    start(4, STOPPED)
    start(6)
    found = entries(tmp_path)
    assert [entry.get("reached", entry.get("ended")) for entry in found] == [0, STOPPED, 4]
    assert [entry.get("host") for entry in found] == ["frontier00001", None, "frontier00001"]


def test_a_file_that_cannot_be_written_is_one_warning(start, tmp_path):
    (tmp_path / "attempts.jsonl").mkdir()
    lines = []
    assert start(7, code=0, resumed=0, info=lines.append)
    (line,) = lines
    assert line.startswith("warning: attempts.jsonl is not written: Is a directory; ")


def test_lines_that_a_kill_cut_short_are_left_out(start, tmp_path):
    for _ in range(2):
        start(7)
    append(tmp_path, '{"at": "2026\n')
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    assert reached_step(tmp_path / "metrics.jsonl") == 7
    start(7)
    with pytest.raises(RunFailed):
        start(7)


def test_a_line_after_one_that_was_cut_short_is_a_line_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    append(tmp_path, '{"at": "2026')
    record_begun(tmp_path, "never")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert has_begun(tmp_path, "never")
    assert not has_begun(tmp_path, "auto")


STARTS = {
    "by Slurm alone": ({"restart": 0}, {"restart": 1}, True),
    "by torchrun alone": ({"run": "none"}, {"run": "none", "again": 2}, True),
    "the same": ({"run": "none", "again": 2}, {"run": "none", "again": 2}, False),
    "by another torchrun": ({"run": "a"}, {"run": "b", "again": 1}, False),
    "a job's, requeued": ({"restart": 0, "run": "a", "again": 3}, {"restart": 1, "run": "b"}, True),
}


@pytest.mark.parametrize(("earlier", "later", "is_restart"), STARTS.values(), ids=STARTS)
def test_a_restart_of_a_launch_knows_what_an_earlier_start_has_begun(
    tmp_path, monkeypatch, earlier, later, is_restart
):
    def become(restart=None, run=None, again=0):
        job = None if restart is None else "7"
        values = {
            "SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restart, "TORCHELASTIC_RUN_ID": run,
            "TORCHELASTIC_RESTART_COUNT": again,
        }  # fmt: skip
        for name, value in values.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))

    become(**earlier)
    record_begun(tmp_path, "never")
    become(**later)
    assert has_begun(tmp_path, "never") is is_restart


def record(second, **values):
    return {"at": f"1970-01-01T00:00:{second:02d}+00:00", **values}


RAN = [record(1, reached=0), record(3, first_step=1)]
KILLED = record(5, ended=LOST, reason="rank 1 on n2: lost, no answer; stacks in hang")
SEEN = record(9, failed=137, reason="node n2 was lost: down")
OUTAGES = {
    "the first start": ([], None),
    "after the last step": ([*RAN, record(5, ended=0)], None),
    "after a stop": ([*RAN, record(5, ended=STOPPED)], Outage(5, 7, 0, "")),
    "rank 0 alone says it": ([*RAN, KILLED], Outage(5, 7, 1, "rank 1 on n2: lost, no answer")),
    "the launcher knows more": ([*RAN, KILLED, SEEN], Outage(5, 7, 1, "node n2 was lost: down")),
    "no step between": (
        [*RAN, KILLED, record(7, reached=7), SEEN, record(11, unmet=1)],
        Outage(5, 7, 3, "a start that left no word"),
    ),
    "a step between": ([*RAN, KILLED, *RAN, SEEN], Outage(9, 7, 1, "node n2 was lost: down")),
    "nobody says it": (RAN, Outage(6, 7, 1, "a start that left no word")),
}


@pytest.mark.parametrize(("records", "outage"), OUTAGES.values(), ids=OUTAGES)
def test_an_outage_lasts_from_the_first_failure_to_the_next_finished_step(records, outage):
    """If no one saw the failure, from the last finished step, which was at second 6."""
    assert find_outage(records, reached=7, finished=6.0) == outage
