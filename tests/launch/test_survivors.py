"""Ranks keep their process when another one is lost."""

import json
import os
import signal
import socket
import threading
import time
from itertools import pairwise

import pytest
import torch

from megafrontier.launch import survivors
from megafrontier.launch.local import fork_ranks_again
from megafrontier.launch.rendezvous import join
from megafrontier.parallel.env import RESTARTS, identify
from megafrontier.parallel.fault_injection import VARIABLE
from megafrontier.parallel.mesh import MeshShape
from tests import processes, runs
from tests.launch.dying import MOMENTS
from tests.processes import COMMAND
from tests.ranks import make_levels

STEPS = ("checkpoint.every=2", "evaluate.every=4", "log.callbacks=[tests.launch.dying.Dying]")
NOWHERE = [0, -1, ""]


def train(monkeypatch, folder, name, moments, *faults, code=0):
    """A run of 4 ranks, with one start for each of `moments` (`Dying`). `faults`: at which fault
    point which rank of which start is killed, too. `code`: the exit code."""
    kills = [{"at": at, "rank": rank, "restarts": n, "do": "kill"} for at, rank, n in faults]
    monkeypatch.setenv(VARIABLE, json.dumps(kills))
    monkeypatch.setenv(MOMENTS, json.dumps(moments))
    command = ["train", f"{folder}/config.yaml", "--nproc", "4", f"run.directory={folder}/{name}"]
    done = processes.run(COMMAND, [*command, "--restarts", str(len(moments) - 1), *STEPS])
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine may take long to write what a rank closes."""
    for module in ("local", "survivors"):
        monkeypatch.setattr(f"megafrontier.launch.{module}.LEAVE_SECONDS", 60.0)


def pids(folder, starts):
    """The process of each rank, by start."""
    read = lambda *names: (folder / "-".join(["pid", *map(str, names)])).read_text()  # noqa: E731
    return [[read(start, rank) for rank in range(4)] for start in starts]


@pytest.fixture(scope="module")
def unbroken(folder):
    """The losses of the same run without a failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MOMENTS, json.dumps([NOWHERE]))
        patch.setenv(RESTARTS, "0")
        path = folder / "config.yaml"
        return runs.losses(runs.run(path, 4, f"run.directory={folder}/unbroken", *STEPS))


def changed(before, after):
    """The ranks with another process."""
    return [rank for rank in range(4) if before[rank] != after[rank]]


def test_survivors_keep_their_process_wherever_in_a_step_a_rank_is_killed(
    folder, monkeypatch, unbroken
):
    """Several in a row, and each time another rank, with the losses of an unbroken run."""
    moments = [[3, 3, "forward"], [0, 4, "backward"], [1, 5, "optimizer"], NOWHERE]
    done = train(monkeypatch, folder, "steps", moments)
    assert done.stderr.count("3 of 4 ranks keep their process") == 3, done.stderr
    starts = pids(folder / "steps", range(4))
    assert [changed(*pair) for pair in pairwise(starts)] == [[3], [0], [1]]
    assert runs.losses(runs.metrics(folder / "steps")) == unbroken


def test_survivors_keep_their_process_between_steps_and_where_ranks_meet(
    folder, monkeypatch, unbroken
):
    moments = [NOWHERE, [2, 4, "evaluation"], *5 * [NOWHERE]]
    meetings = [("meet", 0, 2), ("meet", 3, 3), ("connections to all", 1, 4), ("check hosts", 0, 5)]
    done = train(monkeypatch, folder, "others", moments, ("save", 1, 0), *meetings)
    assert done.stderr.count("3 of 4 ranks keep their process") == 6, done.stderr
    before, evaluated, after = pids(folder / "others", (0, 1, 6))
    assert changed(before, evaluated) == [1]
    assert changed(evaluated, after) == [0, 1, 2, 3], "each was killed after that"
    assert runs.losses(runs.metrics(folder / "others")) == unbroken


def test_a_run_that_dies_in_the_same_place_is_given_up(folder, monkeypatch):
    """After `train.attempts` starts, whatever process they have."""
    done = train(monkeypatch, folder, "hopeless", 7 * [[1, 3, "forward"]], code=3)
    assert done.stderr.count("3 of 4 ranks keep their process") >= 5, done.stderr
    assert "step 4: the last 5 attempts ended without getting past it" in done.stderr


def meet(use):
    """Join the other ranks and call `use` with the mesh."""
    shape = MeshShape(make_levels([3]))
    with join(identify(os.environ), shape, torch.device("cpu")) as mesh:
        use(mesh.world)
    return 0


def die(rank, restarts):
    """End a rank in all starts but the last one."""
    if identify(os.environ).rank == rank and int(os.environ[RESTARTS]) < restarts:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_survivor_keeps_nothing_of_earlier_starts(tmp_path):
    restarts = 20

    def use(world):
        world.barrier()
        held = [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]
        with (tmp_path / f"{world.rank}-{os.getpid()}").open("a") as file:
            file.write(f"{held}\n")
        die(1, restarts)
        world.barrier()

    shared = sorted(os.listdir("/dev/shm"))
    assert fork_ranks_again(3, lambda: meet(use), restarts) == 0
    survivors_held = [path.read_text().splitlines() for path in tmp_path.glob("[02]-*")]
    assert [len(lines) for lines in survivors_held] == [restarts + 1] * 2
    assert all(lines[-1] == lines[1] for lines in survivors_held)
    assert sorted(os.listdir("/dev/shm")) == shared


def test_a_rank_that_cannot_leave_in_time_is_replaced_and_named(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("megafrontier.launch.local.LEAVE_SECONDS", 0.5)

    def use(world):
        (tmp_path / f"{os.environ[RESTARTS]}-{world.rank}").write_text(str(os.getpid()))
        world.barrier()
        die(1, 1)
        if world.rank == 2 and os.environ[RESTARTS] == "0":
            time.sleep(60)
        world.barrier()

    assert fork_ranks_again(3, lambda: meet(use), 1) == 0
    first, second = ([(tmp_path / f"{n}-{r}").read_text() for r in range(3)] for n in (0, 1))
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, False]
    said = capfd.readouterr().err
    assert "rank 2 on " in said
    assert ": has not abandoned its groups within 0.5 s, its process is replaced" in said
    assert "1 of 3 ranks keep their process" in said


def test_two_threads_that_notice_a_loss_abandon_the_groups_once(monkeypatch):
    monkeypatch.setattr(survivors, "_break_groups", lambda: None)
    parent, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    entered, calls = threading.Barrier(2, timeout=60), []
    with parent, own:
        survivor = survivors.Survivor(own)
        survivor.on_abandon(lambda: (calls.append(1), time.sleep(0.05)))

        def abandon():
            entered.wait()
            survivor.abandon()

        threads = [threading.Thread(target=abandon) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        parent.shutdown(socket.SHUT_RDWR)
    assert calls == [1]
