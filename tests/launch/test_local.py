"""Local ranks: their exit codes, which of them prints, and that none outlives the others."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megafrontier.common.errors import STOPPED, RankError, RunFailed, UserError
from megafrontier.launch.health.timeouts import LOCAL_GRACE
from megafrontier.launch.local import fork_ranks
from megafrontier.parallel.env import identify
from tests.processes import alive, children, wait_for

FOREVER = 120


def my_rank():
    return identify(os.environ).rank


def read_pids(folder, count):
    def numbers():
        return [path.read_text() for path in folder.glob("pid-*")]

    wait_for(lambda: len(numbers()) == count and all(numbers()), "not every rank has started")
    return [int(number) for number in numbers()]


def write_pid(folder):
    (folder / f"pid-{my_rank()}").write_text(str(os.getpid()))


@pytest.fixture(autouse=True)
def no_child_is_left():
    before = children(os.getpid())
    yield
    assert children(os.getpid()) == before


def test_success_of_all_ranks_is_code_0_and_each_knows_its_rank(tmp_path):
    def body():
        found = identify(os.environ)
        (tmp_path / str(found.rank)).write_text(f"{found.source} {found.world_size}")
        return 0

    assert fork_ranks(4, body) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2", "3"]
    assert {p.read_text() for p in tmp_path.iterdir()} == {"local 4"}


def test_threads_of_a_rank_may_begin_to_compute_at_the_same_time():
    torch.arange(1 << 17)  # this process has computed, as the parent of a run may have

    def body():
        barrier = threading.Barrier(4)

        def compute(_):
            barrier.wait()
            return torch.arange(1 << 17)[-1].item()

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(compute, range(4))) == {(1 << 17) - 1}
        return 0

    assert fork_ranks(8, body) == 0


def test_if_one_rank_cannot_be_forked_the_others_are_killed(monkeypatch):
    fork, blocked = os.fork, signal.pthread_sigmask(signal.SIG_BLOCK, ())
    left = iter([fork, fork])
    monkeypatch.setattr(os, "fork", lambda: next(left)())
    with pytest.raises(StopIteration):
        fork_ranks(4, lambda: time.sleep(FOREVER) or 0)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked


def test_an_error_of_one_rank_is_printed_by_that_rank(capfd):
    def body():
        if my_rank() == 2:
            raise RankError("rank 2: corpus.bin: byte 8: token id 900")
        time.sleep(FOREVER)
        return 0

    assert fork_ranks(3, body) == 2
    assert capfd.readouterr().err == "megafrontier: rank 2: corpus.bin: byte 8: token id 900\n"


def test_a_bug_keeps_its_traceback_and_ends_the_other_ranks(capfd):
    def body():
        if my_rank() == 1:
            raise ZeroDivisionError("the culprit")
        time.sleep(FOREVER)
        return 0

    assert fork_ranks(4, body) == 1
    error = capfd.readouterr().err
    assert "ZeroDivisionError: the culprit" in error
    assert error.count("Traceback") == 1


def test_a_killed_rank_is_named_and_the_others_end_at_once(tmp_path, capfd):
    def body():
        write_pid(tmp_path)
        if my_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(FOREVER)
        return 0

    begin = time.monotonic()
    assert fork_ranks(4, body) == 128 + signal.SIGKILL
    assert time.monotonic() - begin < 10
    reported = capfd.readouterr().err
    assert (
        reported == f"megafrontier: rank 1 on {socket.gethostname()} was lost: signal 9, Killed\n"
    )


def test_ranks_that_stop_on_request_are_not_killed():
    def body():
        time.sleep(1.0 * my_rank())
        return STOPPED

    assert LOCAL_GRACE < 1
    assert fork_ranks(2, body) == STOPPED


def test_the_rank_that_prints_the_error_of_all_ranks_is_not_killed(capfd):
    """It may have to hand over metrics first, while the others end at once."""

    def body():
        time.sleep(0 if my_rank() else 2 * LOCAL_GRACE)
        raise UserError("train.steps: 0,\n need at least 1")

    assert fork_ranks(3, body) == 2
    assert capfd.readouterr().err == "megafrontier: train.steps: 0, need at least 1\n"


def test_the_first_failure_decides_the_exit_code(tmp_path):
    def body():
        write_pid(tmp_path)
        if my_rank() == 1:
            return 5
        others = [pid for pid in read_pids(tmp_path, 2) if pid != os.getpid()]
        wait_for(lambda: not os.path.exists(f"/proc/{others[0]}"), "the parent has not noticed")
        return 9

    assert fork_ranks(2, body) == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_parent_reaches_every_rank(tmp_path, number):
    def body():
        caught = []
        signal.signal(number, lambda *_: caught.append(1))
        write_pid(tmp_path)
        if my_rank() == 0:
            read_pids(tmp_path, 3)
            os.kill(os.getppid(), number)
        wait_for(lambda: caught, "no signal came")
        return 0

    before = signal.getsignal(number)
    assert fork_ranks(3, body) == 0
    assert signal.getsignal(number) == before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


SCRIPT = """
import os, signal, sys, time, types
# fork_ranks imports it before it forks, which takes seconds, and nothing here uses it.
sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
# A shell's background jobs, and so whoever runs these tests, may have Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from megafrontier.launch.local import fork_ranks
def body():
    Path(sys.argv[1], "pid-" + os.environ["MEGAFRONTIER_LOCAL"][0]).write_text(str(os.getpid()))
    {body}
    return 0
{before}
sys.exit(fork_ranks(3, body))
"""


def start(tmp_path, body, before="", **options):
    command = [sys.executable, "-c", SCRIPT.format(body=body, before=before), str(tmp_path)]
    environment = os.environ | {"PYTHONUNBUFFERED": ""}  # or a rank would write at once
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, **options)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_its_parent(tmp_path, number):
    parent = start(tmp_path, f"time.sleep({FOREVER})")
    ranks = read_pids(tmp_path, 3)
    parent.send_signal(number)
    parent.communicate(timeout=60)
    wait_for(lambda: not any(alive(pid) for pid in ranks), "a rank lives on")


def test_an_interrupt_while_ranks_are_forked_is_not_lost(tmp_path):
    """Python ignores exceptions in the functions that it calls at a fork."""
    interrupt = "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))"
    parent = start(tmp_path, f"time.sleep({FOREVER})", before=interrupt)
    _, error = parent.communicate(timeout=60)
    assert parent.returncode != 0
    assert error.endswith(b"KeyboardInterrupt\n")


def test_ranks_whose_output_is_a_closed_pipe_still_end(tmp_path):
    """A rank whose last flush failed would go on as a second parent process."""
    read, write = os.pipe()
    os.close(read)
    parent = start(tmp_path, "sys.stdout.write('x')", stdout=write)
    os.close(write)
    parent.communicate(timeout=60)
    ranks = read_pids(tmp_path, 3)
    assert not any(alive(pid) for pid in ranks)
    assert parent.returncode == 0


def test_an_error_that_cannot_be_printed_keeps_its_exit_code(tmp_path):
    body = "from megafrontier.common.errors import RunFailed; raise RunFailed('a reason')"
    parent = start(tmp_path, body, before="os.dup2(os.open('/dev/full', os.O_WRONLY), 2)")
    parent.communicate(timeout=60)
    assert parent.returncode == RunFailed.code
