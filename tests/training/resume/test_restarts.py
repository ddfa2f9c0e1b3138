"""A run that fails at the same step again and again is given up; any other goes on."""

import json
from datetime import UTC, datetime, timedelta

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
from megafrontier.launch.health import excluded_nodes as bad_nodes
from megafrontier.parallel.env import Identity
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.parallel.levels import Levels
from megafrontier.training.resume.restarts import (
    attempted,
    has_begun,
    note_begun,
    note_interrupted,
    reached_step,
)

ALONE = Identity(0, 1, 0, "alone", host="frontier00001")
LIMIT = 3
START = datetime(2026, 1, 1, tzinfo=UTC)


class Killed(Exception):
    """What ends an attempt that cannot say how."""


@pytest.fixture
def config(tmp_path):
    config = Config()
    config.run.directory = str(tmp_path)
    config.train.attempts = LIMIT
    return config


def hierarchy():
    return Hierarchy(Levels(("world",), (1,)), 0, (None,), "cpu")


def attempt(config, tmp_path, reached, code=None, bad_node=None, resumed=None, info=print):
    """One start of the run, which gets as far as `reached` and ends with a code, or for a bad node,
    or is killed. True: it was let start; else RunFailed is raised."""
    try:
        with attempted(config, ALONE, hierarchy(), info) as this:
            if resumed is not None:
                this.note(resumed=resumed)
            metrics = "".join(f'{{"step": {step}, "loss": 1}}\n' for step in range(1, reached + 1))
            (tmp_path / "metrics.jsonl").write_text(metrics)
            if bad_node is not None:
                bad_nodes.add(tmp_path, [bad_node])
                raise NodesUnfit(f"preflight: {bad_node} is slow")
            if code is None:
                raise Killed
            this.ended(code)
    except (Killed, NodesUnfit):
        pass
    return True


def test_a_run_that_fails_at_one_step_too_often_is_given_up_and_says_where(config, tmp_path):
    for reached in (7, 7, 5):
        attempt(config, tmp_path, reached)
    with pytest.raises(RunFailed, match=r"step 6: the last 3 attempts .*attempts\.jsonl"):
        attempt(config, tmp_path, 7)


def test_a_run_that_gets_on_may_fail_as_often_as_it_likes(config, tmp_path):
    codes = [LOST if reached % 2 else None for reached in range(20)]
    went = [attempt(config, tmp_path, reached, code) for reached, code in enumerate(codes)]
    assert all(went)
    assert reached_step(tmp_path / "metrics.jsonl") == 19


@pytest.mark.parametrize("code", [STOPPED, BAD_INPUT, FAILED, 0])
def test_an_attempt_that_ends_in_order_starts_the_count_anew(config, tmp_path, code):
    ends = [None, None, code] * 4
    assert all(attempt(config, tmp_path, 7, end) for end in ends)


def test_a_run_that_is_always_stopped_before_its_first_step_is_given_up(config, tmp_path):
    """The signal before a time limit that start-up and one step do not fit in."""
    for _ in range(LIMIT):
        attempt(config, tmp_path, 7, STOPPED, resumed=7)
    with pytest.raises(RunFailed, match="step 8: the last 3 attempts"):
        attempt(config, tmp_path, 7, STOPPED, resumed=7)


def test_a_run_that_does_a_step_between_two_stops_goes_on(config, tmp_path):
    assert all(
        attempt(config, tmp_path, step + 1, STOPPED, resumed=step) for step in range(2 * LIMIT)
    )


@pytest.mark.parametrize("resumed", [[100, 150, 200, 250, 300], [400, 100, 100, 90, 80]])
def test_a_run_that_has_saved_more_or_was_sent_back_gets_on(config, tmp_path, resumed):
    """Though it gets nowhere near the step that an attempt before had reached."""
    attempt(config, tmp_path, 430)
    for step in resumed:
        assert attempt(config, tmp_path, step + 30, resumed=step)


def test_failures_after_the_same_checkpoint_count(config, tmp_path):
    for reached in (130, 120, 130):
        assert attempt(config, tmp_path, reached, resumed=100)
    with pytest.raises(RunFailed, match="the last 3 attempts"):
        attempt(config, tmp_path, 130, resumed=100)


def test_what_a_person_interrupts_has_not_failed(config, tmp_path):
    for _ in range(4):
        assert attempt(config, tmp_path, 7)
        note_interrupted(tmp_path, START)


def test_who_interrupts_a_start_that_waits_for_another_says_nothing_of_that_one(config, tmp_path):
    attempt(config, tmp_path, 7)
    before = (tmp_path / "attempts.jsonl").read_text()
    note_interrupted(tmp_path, datetime.now(UTC) + timedelta(seconds=2))
    assert (tmp_path / "attempts.jsonl").read_text() == before


def test_attempts_that_cannot_be_noted_are_told_once_and_go_on(config, tmp_path):
    (tmp_path / "attempts.jsonl").mkdir()
    said = []
    assert attempt(config, tmp_path, 7, code=0, resumed=0, info=said.append)
    (line,) = said
    assert line.startswith("warning: attempts.jsonl is not written: Is a directory; ")


def test_a_note_after_a_line_that_a_kill_cut_short_is_a_line_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "attempts.jsonl").write_text('{"at": "2026')
    note_begun(tmp_path, "never")
    assert not has_begun(tmp_path, "never"), "by this start: the job is asked to once"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert has_begun(tmp_path, "never")
    assert not has_begun(tmp_path, "auto")


STARTS = {
    "by Slurm alone": ({"restart": 0}, {"restart": 1}, True),
    "by torchrun alone": ({"run": "none"}, {"run": "none", "again": 2}, True),
    "the same": ({"run": "none", "again": 2}, {"run": "none", "again": 2}, False),
    "by another torchrun": ({"run": "a"}, {"run": "b", "again": 1}, False),
    "by torchrun in a job": (
        {"restart": 1, "run": "a"},
        {"restart": 1, "run": "a", "again": 1},
        True,
    ),
    "a job's, requeued": ({"restart": 0, "run": "a", "again": 3}, {"restart": 1, "run": "b"}, True),
    "an earlier one": ({"restart": 1, "run": "a"}, {"restart": 0, "run": "a", "again": 1}, False),
    "of a job and none": ({"run": "a"}, {"restart": 0, "run": "a", "again": 1}, False),
}


@pytest.mark.parametrize(("noted", "present", "is_later"), STARTS.values(), ids=STARTS)
def test_a_later_start_of_the_same_launch_knows_what_an_earlier_one_has_begun(
    tmp_path, monkeypatch, noted, present, is_later
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

    become(**noted)
    note_begun(tmp_path, "never")
    become(**present)
    assert has_begun(tmp_path, "never") is is_later


def test_a_person_who_starts_a_run_that_was_given_up_gets_as_many_attempts_again(config, tmp_path):
    for _ in range(2):
        assert all(attempt(config, tmp_path, 7) for _ in range(LIMIT))
        with pytest.raises(RunFailed):
            attempt(config, tmp_path, 7)


def test_attempts_that_each_list_another_bad_node_do_not_count(config, tmp_path):
    attempt(config, tmp_path, 7)
    attempt(config, tmp_path, 7)
    for number in range(10):
        attempt(config, tmp_path, 7, bad_node=f"frontier{number:05d}")
    assert attempt(config, tmp_path, 7), "the third failure"
    with pytest.raises(RunFailed, match="the last 3 attempts"):
        attempt(config, tmp_path, 7)


def test_a_bad_node_that_is_not_left_out_ends_the_run_as_any_failure_does(config, tmp_path):
    """So a run that is started again without regard to the list cannot go on for ever."""
    for _ in range(1 + LIMIT):  # the first lists it
        attempt(config, tmp_path, 7, bad_node="frontier00002")
    with pytest.raises(RunFailed, match="the last 3 attempts"):
        attempt(config, tmp_path, 7)
    ends = [json.loads(x) for x in (tmp_path / "attempts.jsonl").read_text().splitlines()][1::2]
    assert [end["ended"] for end in ends] == [BAD_NODE] * (1 + LIMIT) + [FAILED]
    assert (tmp_path / "bad-nodes.txt").read_text() == "frontier00002\n"


def test_starts_that_the_batch_file_notes_count_there_and_not_here(config, tmp_path):
    def note(line):
        with (tmp_path / "attempts.jsonl").open("a") as file:
            file.write(line + "\n")

    for _ in range(1 + LIMIT):
        assert attempt(config, tmp_path, 7, STOPPED)
        note('{"at": "2026", "job": "7", "unmet": 70}')
    assert all(attempt(config, tmp_path, 7) for _ in range(LIMIT))
    note('{"at": "2026", "job": "7", "ended": 3}')  # given up there: a person looks
    assert all(attempt(config, tmp_path, 7) for _ in range(LIMIT))
    with pytest.raises(RunFailed):
        attempt(config, tmp_path, 7)


def test_zero_never_gives_up(config, tmp_path):
    config.train.attempts = 0
    assert all(attempt(config, tmp_path, 7) for _ in range(10))


def test_the_file_says_when_where_and_how_each_attempt_went(config, tmp_path):
    attempt(config, tmp_path, 4, STOPPED)
    attempt(config, tmp_path, 6)
    lines = [json.loads(x) for x in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert [line.get("reached", line.get("ended")) for line in lines] == [0, STOPPED, 4]
    assert {line.get("host", "frontier00001") for line in lines} == {"frontier00001"}


def test_lines_that_a_kill_cut_short_are_left_out(config, tmp_path):
    for _ in range(2):
        attempt(config, tmp_path, 7)
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"at": "2026\n')
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    assert reached_step(tmp_path / "metrics.jsonl") == 7
    attempt(config, tmp_path, 7)
    with pytest.raises(RunFailed):
        attempt(config, tmp_path, 7)


@pytest.mark.parametrize("step", ["null", '"8"', "8.5", "Infinity", "[8]"])
def test_lines_whose_step_is_no_number_are_left_out(tmp_path, step):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 7}}\n{{"step": {step}}}\n')
    assert reached_step(tmp_path / "metrics.jsonl") == 7
