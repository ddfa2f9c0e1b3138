"""A run that is asked to stop saves its step and ends with code 75; started again it goes on as if
nothing had been."""

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
SMALL = ("machine=laptop", "train.steps=12")

# Where a run is told to stop must not depend on timing, so the ranks signal themselves.
SIGNAL_AT = """
import os, signal, sys
from megafrontier.common import signals
from megafrontier import cli
from megafrontier.launch import local
import megafrontier.training.{module} as module
where = module.{name}
def signalled(*arguments, **options):
    {condition}
        {act}
    return where(*arguments, **options)
module.{name} = signalled
sys.exit(cli.main(sys.argv[1:]))
"""
KILL = "os.kill(os.{whom}(), signal.{signal})"


@pytest.fixture(scope="module")
def unbroken(folder):
    return runs.run(folder / "config.yaml", RANKS, *SMALL, f"run.directory={folder}/unbroken")


def arguments(folder, name, *overrides):
    return [
        "train", str(folder / "config.yaml"), "--nproc", str(RANKS),
        f"run.directory={folder}/{name}", *SMALL, *overrides,
    ]  # fmt: skip


def train(folder, name, script, *overrides):
    """Run `train` by a script that plants a signal; the ended process."""
    return processes.run(script, arguments(folder, name, *overrides))


def at_step(step, act):
    """Act, on one rank of the two, while the given step is computed."""
    condition = f"if arguments[0].step == {step - 1} and arguments[0].hierarchy.rank == 1:"
    return SIGNAL_AT.format(module="loop", name="start_step", condition=condition, act=act)


def checkpoints(folder, name):
    return sorted(path.name for path in (folder / name / "checkpoints").glob("step-*"))


def resume(folder, name, *overrides):
    return runs.run(
        folder / "config.yaml", RANKS, *SMALL, f"run.directory={folder}/{name}", *overrides
    )


@pytest.mark.parametrize(
    ("number", "whom"), [("SIGTERM", "getpid"), ("SIGTERM", "getppid"), ("SIGUSR1", "getpid")]
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_to_the_same_bits(
    folder, unbroken, number, whom
):
    """One rank is enough: the others learn of it in the sum that each step makes anyway."""
    name = f"{number}-{whom}"
    ended = train(folder, name, at_step(4, KILL.format(whom=whom, signal=number)))
    assert ended.returncode == STOPPED, ended.stderr
    assert ended.stderr == ""
    stopped = runs.metrics(folder / name)
    last = stopped[-1]["step"]
    assert last == 4 if whom == "getpid" else last in (4, 5), "the parent may take a moment"
    assert checkpoints(folder, name) == [f"step-{last:08d}"]
    assert f"stopped on request at step {last}; the same command goes on\n" in ended.stdout
    assert not runs.valid_losses(stopped), "there is no time for an evaluation"
    resumed = resume(folder, name)
    assert runs.losses(resumed) == runs.losses(unbroken)
    assert runs.valid_losses(resumed) == runs.valid_losses(unbroken)


def test_a_run_that_the_same_command_would_lead_back_again_says_so(folder):
    act = KILL.format(whom="getpid", signal="SIGUSR1")
    ended = train(folder, "anew", at_step(4, act), "checkpoint.resume=never")
    assert ended.returncode == STOPPED, ended.stderr
    assert "stopped on request at step 4; go on without checkpoint.resume\n" in ended.stdout


def test_a_checkpoint_just_written_for_that_step_is_kept_and_not_written_again(folder):
    act = KILL.format(whom="getpid", signal="SIGUSR1")
    chosen = ("checkpoint.every=4", "evaluate.every=4")
    ended = train(folder, "kept", at_step(4, act), *chosen)
    assert ended.returncode == STOPPED, ended.stderr
    assert ended.stdout.count("checkpoint ") == 1
    assert checkpoints(folder, "kept") == ["step-00000004"]


def test_a_run_whose_last_step_it_was_is_finished(folder, unbroken):
    ended = train(folder, "last", at_step(12, KILL.format(whom="getpid", signal="SIGTERM")))
    assert ended.returncode == 0, ended.stderr
    assert runs.valid_losses(runs.metrics(folder / "last")) == runs.valid_losses(unbroken)


def test_more_signals_during_the_save_change_nothing(folder, unbroken):
    """The first asks for the save; the others come while pieces are written and as it ends."""
    first = KILL.format(whom="getpid", signal="SIGUSR1")
    plant = at_step(3, first).replace("sys.exit(", PESTER + "\nsys.exit(")
    ended = train(folder, "pestered", plant)
    assert ended.returncode == STOPPED, ended.stderr
    assert checkpoints(folder, "pestered") == ["step-00000003"]
    assert ended.stdout.count("pestered") >= 4
    assert runs.losses(resume(folder, "pestered")) == runs.losses(unbroken)


PESTER = """
import importlib
write = importlib.import_module("megafrontier.checkpoint.save")
def pestered(act):
    def wrapped(*arguments):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            os.kill(os.getppid(), number)
        print("pestered", flush=True)
        return act(*arguments)
    return wrapped
for name in ("_start", "_write_own", "_finish", "_publish"):
    setattr(write, name, pestered(getattr(write, name)))
"""


def test_a_signal_during_evaluation_breaks_it_off_for_the_next_start_to_make(folder, unbroken):
    """There may be no time for it, nor for another step."""
    plant = SIGNAL_AT.format(
        module="callbacks.evaluate", name="evaluate", condition="if True:",
        act=KILL.format(whom="getpid", signal="SIGTERM"),
    )  # fmt: skip
    ended = train(folder, "evaluating", plant, "evaluate.every=5")
    assert ended.returncode == STOPPED, ended.stderr
    assert runs.valid_losses(runs.metrics(folder / "evaluating")) == []
    assert checkpoints(folder, "evaluating") == ["step-00000005"]
    lines = resume(folder, "evaluating", "evaluate.every=5")
    assert runs.losses(lines) == runs.losses(unbroken)
    assert 5 in [line["step"] for line in lines if "valid_loss" in line]


STARTING = """
import os, signal, sys
from importlib.abc import MetaPathFinder
class Signal(MetaPathFinder):
    def find_spec(self, name, *_):
        if name == {module!r}:
            assert {module!r} != "omegaconf" or "torch" not in sys.modules
            os.kill(os.getpid(), signal.SIGUSR1)
sys.meta_path.insert(0, Signal())
from megafrontier import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("module", ["omegaconf", "torch._dynamo"])
def test_a_run_that_is_asked_while_it_starts_makes_no_step_and_loses_nothing(folder, module):
    name = f"starting-{module}"
    command = [sys.executable, "-c", STARTING.format(module=module), *arguments(folder, name)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == STOPPED, ended.stderr
    assert "stopped on request at step 0" in ended.stdout
    assert runs.metrics(folder / name) == []
    assert checkpoints(folder, name) == []


def test_every_process_of_a_group_may_be_told_as_slurm_does(folder, unbroken):
    """TERM to parent, ranks and whatever they have started, at any moment, then again."""
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


def test_a_launchers_rank_that_is_asked_stops_them_all(folder):
    """One rank of a group that no parent of ours watches over."""
    script = at_step(3, KILL.format(whom="getpid", signal="SIGUSR1"))
    started = start(script, folder, "slurm", slurm, "train.steps=12")
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [STOPPED] * 2, errors
    assert checkpoints(folder, "slurm") == ["step-00000003"]
