"""A run says how often it saves, in time, and a submission warns of a job that would not save."""

import pytest

from megafrontier.plan.footprint import snapshot_gib
from megafrontier.plan.resolve import resolve_plan
from megafrontier.plan.saves import describe_saves
from tests import runs

HOUR = 3600.0


@pytest.mark.parametrize(
    ("every", "minutes", "seconds", "line"),
    [
        (500, 30, 16.3, "every 30 minutes (checkpoint.minutes) or 500 steps, 2.26 hours "
         "(checkpoint.every), whichever comes first"),
        (500, 0, 0.01, "every 500 steps, 5 seconds (checkpoint.every)"),
        (500, 0, None, "every 500 steps (checkpoint.every)"),
        (0, 0.5, 16.3, "every 0.5 minutes (checkpoint.minutes)"),
        (0, 0, HOUR, "only at the end, after 48 steps, 2 days"),
    ],
)  # fmt: skip
def test_the_interval_is_told_in_time_where_that_of_a_step_is_known(
    tmp_path, every, minutes, seconds, line
):
    assert describe(tmp_path, every, minutes, seconds) == [f"checkpoints: {line}"]


@pytest.mark.parametrize(
    ("every", "minutes", "seconds", "warned"),
    [
        (500, 30, 16.3, ""),
        (500, 30, None, ""),
        (100, 0, 16.3, ""),
        (500, 0, None, ""),  # nobody knows
        (500, 0, 16.3, "checkpoint.every: 500, "),
        (0, 0, None, "checkpoint.minutes: 0, "),
        (0, 119, 16.3, "checkpoint.minutes: 119, "),
        (0, 119, None, ""),
        (0, 118, 90.0, "checkpoint.minutes: 118, "),  # and two steps
    ],
)
def test_a_job_that_would_save_only_when_it_is_asked_to_stop_is_warned_of(
    tmp_path, every, minutes, seconds, warned
):
    _, *lines = describe(tmp_path, every, minutes, seconds, 119.5 * 60)
    assert len(lines) == bool(warned)
    assert all(line.startswith(f"warning: {warned}so a job saves only when ") for line in lines)
    assert all("asked to stop, after 1.99 hours, " in line for line in lines)


def test_snapshots_are_told_with_their_interval_and_memory(tmp_path):
    path = runs.make_config_file(tmp_path)
    chosen = ["checkpoint.local.every=10", "machine.device.ranks_per_host=4"]

    def lines(*more):
        config = runs.load(path, *chosen, *more)
        plan = resolve_plan(config, 8)
        return snapshot_gib(config, plan), [*describe_saves(config, plan, 2.0)][1:]

    size, said = lines()
    assert said == [
        "snapshots: every 10 steps, 20 seconds (checkpoint.local.every), with a copy on another "
        f"node: {size:.3g} GiB of the node's memory for each rank"
    ]
    assert lines("checkpoint.local.copies=0")[0] == size / 2
    _, (_, warning) = lines(f"machine.device.host_memory_gib={2 * size}")
    assert warning.startswith(f"warning: checkpoint.local: {size:.3g} GiB for each rank are more")


def describe(folder, every, minutes, *times):
    chosen = (f"checkpoint.every={every}", f"checkpoint.minutes={minutes}", "train.steps=48")
    config = runs.load(runs.make_config_file(folder), *chosen)
    return list(describe_saves(config, resolve_plan(config, 8), *times))
