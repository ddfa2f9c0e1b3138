"""Checkpoints are saved by time as well as by steps, as rank 0's clock says."""

import json
import os
import re
import signal

import pytest

from megafrontier.common.errors import STOPPED
from megafrontier.common.signals import record_stop_requests
from megafrontier.parallel.fault_injection import VARIABLE
from megafrontier.training import loop
from megafrontier.training.callbacks import save as saving
from tests import runs

TEN = (
    *runs.ONE, "train.steps=10", "train.micro_batch=8", "checkpoint.keep=0",
    "checkpoint.asynchronous=false",
)  # fmt: skip
MINUTE = 60.0


@pytest.fixture
def clock(monkeypatch):
    """Let each step take a minute by rank 0's clock, and `other` seconds by that of rank 1.
    `before(trainer)` is called at the beginning of each step."""

    def choose(other=MINUTE, before=lambda trainer: None):
        start_step, now = loop.start_step, [0.0]

        def step(trainer, *rest):
            before(trainer)
            now[0] += MINUTE if trainer.is_first else other
            return start_step(trainer, *rest)

        monkeypatch.setattr(loop, "start_step", step)
        monkeypatch.setattr(saving, "monotonic", lambda: now[0])

    return choose


def saved(folder):
    return [int(step) for step in re.findall(r"checkpoint \S+/step-(\d+)", runs.log(folder))]


@pytest.mark.parametrize(
    ("every", "minutes", "steps", "other", "depth"),
    [
        (0, 3, [4, 8, 10], 3600.0, 0),  # due in step 3, saved after the next one, and so on
        (0, 3, [4, 8, 10], 0.0, 1),
        (5, 3, [4, 5, 9, 10], 0.0, 0),  # each trigger begins the time anew
        (3, 3, [3, 6, 9, 10], 3600.0, 1),  # due by both: saved once
        (0, 0.5, [2, 4, 6, 8, 10], 0.0, 0),  # less than a step
        (3, 0, [3, 6, 9, 10], 3600.0, 0),
        (0, 0, [10], 3600.0, 0),
    ],
)
def test_a_checkpoint_is_saved_by_steps_or_by_rank_0s_clock_whichever_comes_first(
    config_file, tmp_path, clock, monkeypatch, every, minutes, steps, other, depth
):
    clock(other)
    monkeypatch.setattr(loop, "queue_depth", lambda trainer: depth)
    runs.run(config_file, 2, *TEN, f"checkpoint.every={every}", f"checkpoint.minutes={minutes}")
    assert saved(tmp_path / "run") == steps


def test_saves_by_time_change_no_loss_nor_does_a_resume_from_one(config_file, tmp_path, clock):
    unbroken = runs.run(config_file, 2, *TEN, f"run.directory={tmp_path}/unbroken")
    clock()
    runs.run(config_file, 2, *TEN, "checkpoint.minutes=3", "train.stop_at=6")
    (tmp_path / "run" / "checkpoints" / "step-00000006").rename(tmp_path / "lost")
    lines = runs.run(config_file, 2, *TEN, "checkpoint.minutes=3")
    assert "resumed" in runs.log(tmp_path / "run")
    assert runs.losses(lines) == runs.losses(unbroken)


def test_a_deterministic_run_does_not_fold_errors_by_the_clock(config_file, tmp_path, clock):
    clock()
    low = ("partition.wires.reduce.world=int4", "partition.error_feedback=true")
    fixed = ("train.deterministic=true", "checkpoint.minutes=3")
    runs.run(config_file, 2, *TEN, *low, *fixed)
    assert saved(tmp_path / "run") == [10]
    assert "warning: checkpoint.minutes: 3, not used: " in runs.log(tmp_path / "run")


def test_a_save_that_is_still_written_puts_off_the_next_that_is_due_by_time(
    config_file, tmp_path, clock, monkeypatch
):
    clock()
    late = (
        "the checkpoint of step 4 is still being written: the next one is due by time and follows"
    )
    log = str(tmp_path / "run" / "log.txt")
    fault = {"at": "save", "step": 4, "rank": 0, "do": "wait", "path": log, "message": late}
    monkeypatch.setenv(VARIABLE, json.dumps([fault]))
    runs.run(
        config_file, 2, *TEN, "train.steps=40", "checkpoint.asynchronous=true",
        "checkpoint.minutes=3",
    )  # fmt: skip
    log = runs.log(tmp_path / "run")
    assert log.count(late) == 1
    steps = saved(tmp_path / "run")
    assert steps[0] == 4
    assert steps[1] >= 9
    assert log.index(late) < log.index("step-00000004")


@pytest.mark.parametrize("step", [3, 4, 10])  # asked for, due, last
def test_a_request_to_stop_and_one_for_a_checkpoint_make_one(config_file, tmp_path, clock, step):
    def stop(trainer):
        if trainer.step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    clock(before=stop)
    config = runs.load(config_file, *TEN, f"checkpoint.minutes={3 if step < 10 else 9}")
    with record_stop_requests():
        assert runs.train(config, 2) == (STOPPED if step < 10 else 0)
    assert saved(tmp_path / "run") == [step]
