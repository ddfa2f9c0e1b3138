"""A run that is asked to stop saves its step and ends with code 75; started again, it goes on as if
it had not been stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megafrontier.common.errors import STOPPED
from tests import processes, runs
from tests.launch.test_launchers import slurm, start

RANKS = 2
SMALL = ("machine=laptop", "train.steps=12", "train.micro_batch=8")


@pytest.fixture(scope="module")
def unbroken(folder):
    return runs.run(folder / "config.yaml", RANKS, *SMALL, f"run.directory={folder}/unbroken")


def arguments(folder, name, *overrides):
    return [
        "train", str(folder / "config.yaml"), "--nproc", str(RANKS),
        f"run.directory={folder}/{name}", *SMALL, *overrides,
    ]  # fmt: skip


def train(folder, name, *overrides):
    """Run `train`; the ended process."""
    return processes.run(processes.COMMAND, arguments(folder, name, *overrides))


def checkpoints(folder, name):
    return sorted(path.name for path in (folder / name / "checkpoints").glob("step-*"))


def resume(folder, name, *overrides):
    return runs.run(
        folder / "config.yaml", RANKS, *SMALL, f"run.directory={folder}/{name}", *overrides
    )


@pytest.mark.parametrize(("number", "whom"), [("SIGTERM", "getppid"), ("SIGUSR1", "getpid")])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_to_the_same_bits(
    folder, unbroken, signalled, number, whom
):
    """One rank is enough: the others learn of it from the sum that ends each step."""
    ended = train(folder, number, signalled(f"4 {whom} {number}"))
    assert ended.returncode == STOPPED, ended.stderr
    assert ended.stderr == ""
    stopped = runs.metrics(folder / number)
    last = stopped[-1]["step"]
    assert last == 4 if whom == "getpid" else last in (4, 5), "the parent may take a moment"
    assert checkpoints(folder, number) == [f"step-{last:08d}"]
    assert f"stopped on request at step {last}; the same command goes on\n" in ended.stdout
    assert not runs.valid_losses(stopped), "there is no time for an evaluation"
    resumed = resume(folder, number)
    assert runs.losses(resumed) == runs.losses(unbroken)
    assert runs.valid_losses(resumed) == runs.valid_losses(unbroken)


def test_a_run_that_would_begin_anew_says_so_and_writes_no_checkpoint_twice(folder, signalled):
    chosen = ("checkpoint.every=4", "evaluate.every=4", "checkpoint.resume=never")
    ended = train(folder, "kept", signalled("4 getpid SIGUSR1"), *chosen)
    assert ended.returncode == STOPPED, ended.stderr
    assert "stopped on request at step 4; go on without checkpoint.resume\n" in ended.stdout
    assert ended.stdout.count("checkpoint /") == 1
    assert checkpoints(folder, "kept") == ["step-00000004"]


def test_a_run_that_is_stopped_in_its_last_step_is_finished(folder, unbroken, signalled):
    ended = train(folder, "last", signalled("12 getpid SIGTERM"))
    assert ended.returncode == 0, ended.stderr
    assert runs.valid_losses(runs.metrics(folder / "last")) == runs.valid_losses(unbroken)


STARTING = """
import os, signal, sys
from importlib.abc import MetaPathFinder
class Signal(MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "omegaconf":
            assert "torch" not in sys.modules
            os.kill(os.getpid(), signal.SIGUSR1)
sys.meta_path.insert(0, Signal())
from megafrontier import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_run_that_is_asked_while_it_starts_makes_no_step_and_loses_nothing(folder):
    name = "starting"
    command = [sys.executable, "-c", STARTING, *arguments(folder, name)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == STOPPED, ended.stderr
    assert "stopped on request at step 0" in ended.stdout
    assert runs.metrics(folder / name) == []
    assert checkpoints(folder, name) == []


def test_every_process_of_a_group_may_be_signalled_as_slurm_does(folder):
    """SIGTERM to the parent, the ranks and their processes, at any time, then again."""
    chosen = arguments(folder, "group", "train.steps=100000")
    command = [sys.executable, "-m", "megafrontier", *chosen]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = folder / "group" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for _ in range(3):
        os.killpg(process.pid, signal.SIGTERM)
        os.killpg(process.pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (STOPPED, "")
    assert checkpoints(folder, "group") == [
        f"step-{runs.metrics(folder / 'group')[-1]['step']:08d}"
    ]


def test_a_launchers_rank_that_is_asked_stops_all_ranks(folder, signalled):
    """These ranks have no parent of ours."""
    overrides = ("train.steps=12", signalled("3 getpid SIGUSR1"))
    started = start(processes.COMMAND, folder, "slurm", slurm, *overrides)
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [STOPPED] * 2, errors
    assert checkpoints(folder, "slurm") == ["step-00000003"]
