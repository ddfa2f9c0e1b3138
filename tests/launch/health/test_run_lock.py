"""Only one job at a time writes to a run directory, and a dead job does not block the next one."""

import errno
import os
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from megafrontier.cli import main
from megafrontier.common.errors import UserError
from megafrontier.launch.health import run_lock
from megafrontier.launch.health.run_lock import Holder, acquire
from tests import runs

HERE = Holder.current("here", {})
ELSEWHERE = replace(HERE, host="elsewhere")
FOREVER = 60.0


@pytest.fixture(autouse=True)
def fast_heartbeat(monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "EXPIRY_SECONDS", 0.6)
    monkeypatch.setattr(run_lock, "GONE_EXPIRY_SECONDS", 0.15)


@pytest.fixture
def no_expiry(monkeypatch):
    monkeypatch.setattr(run_lock, "EXPIRY_SECONDS", FOREVER)


@pytest.fixture
def lines():
    return []


@contextmanager
def child_that(body, is_awaited=True):
    """A forked process that runs `body` and then sleeps; it is killed afterwards."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            body()
            os.write(writer, b"x")
            signal.pause()
        finally:
            os._exit(1)  # never go on as another pytest
    if is_awaited:
        os.read(reader, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def killed_holder(folder, holder):
    """Leave the lock of a process that was killed while it held it."""
    with child_that(lambda: acquire(folder, replace(holder, pid=os.getpid()), print)) as child:
        return child


def test_a_released_lock_is_free_at_once(tmp_path, lines):
    for holder in (HERE, HERE, ELSEWHERE, HERE):
        acquire(tmp_path, holder, lines.append).release()
    assert lines == []
    assert [path.name for path in tmp_path.iterdir()] == ["00000004"]


@pytest.mark.parametrize("holder", [replace(HERE, job="4711"), replace(ELSEWHERE, job="4711")])
def test_a_second_job_is_refused_within_a_heartbeat_or_two(tmp_path, lines, no_expiry, holder):
    folder = tmp_path / "run" / "lease"
    held = acquire(folder, holder, lines.append)
    began = time.monotonic()
    with pytest.raises(UserError) as refused:  # also another step of the same start of a job
        acquire(folder, replace(HERE, job="4711"), lines.append)
    held.release()
    assert time.monotonic() - began < 10
    assert str(refused.value) == (
        f"run.directory: {tmp_path}/run is in use by {holder.host} (pid {os.getpid()}, job 4711, "
        f"since {holder.since}); need another run.directory, or that job's end"
    )


def test_a_killed_process_of_this_host_blocks_the_next_for_three_heartbeats(
    tmp_path, lines, no_expiry
):
    killed_holder(tmp_path, HERE)
    began = time.monotonic()
    acquire(tmp_path, HERE, lines.append).release()
    assert time.monotonic() - began < 10
    assert len(lines) == 1


def test_a_process_that_only_another_container_sees_keeps_its_lock(tmp_path, lines):
    """Both call their host the same, and have process numbers of their own."""
    held = acquire(tmp_path, replace(HERE, pid=2**22 + 1), lines.append)
    with pytest.raises(UserError, match="is in use by"):
        acquire(tmp_path, HERE, lines.append)
    held.release()


def test_a_killed_process_of_another_host_blocks_the_next_until_the_lock_expires(tmp_path, lines):
    killed_holder(tmp_path, replace(ELSEWHERE, job="12"))
    began = time.monotonic()
    acquire(tmp_path, replace(HERE, job="13"), lines.append).release()
    assert 0.6 <= time.monotonic() - began < 20
    (line,) = lines
    assert line.startswith("run lock: waiting up to 0.6 s for a heartbeat of elsewhere (pid ")


def test_a_requeued_job_takes_over_from_its_earlier_start_at_once(tmp_path, lines, no_expiry):
    killed_holder(tmp_path, replace(ELSEWHERE, job="12", restarts=[0, 0, 1]))
    acquire(tmp_path, replace(HERE, job="12", restarts=[1, 0, 0]), lines.append).release()
    assert lines == []


@pytest.mark.parametrize("content", [b"\x00garbage", b'{"host": "a", "later": 1}\n1'])
def test_a_lock_that_cannot_be_read_expires_like_any_other(tmp_path, lines, content):
    (tmp_path / "00000007").write_bytes(content)
    acquire(tmp_path, HERE, lines.append).release()
    assert [path.name for path in tmp_path.iterdir()] == ["00000008"]
    assert len(lines) == 1


def test_one_of_many_starters_wins(tmp_path):
    killed_holder(tmp_path / "lease", ELSEWHERE)

    def start():
        try:
            acquire(tmp_path / "lease", Holder.current("here", {}), lambda _: None)
            word = "won"
        except UserError:
            word = "refused"
        (tmp_path / f"word-{os.getpid()}").write_text(word)
        while len(list(tmp_path.glob("word-*"))) < 6:  # late starters may take it from a dead one
            time.sleep(0.01)

    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(child_that(start, is_awaited=False))
        while len(words := [p.read_text() for p in tmp_path.glob("word-*")]) < 6 or "" in words:
            time.sleep(0.01)
    assert sorted(words) == ["refused"] * 5 + ["won"]


def take_over_from(child, folder):
    """Take the lock while `child`, its holder, is stopped. Returns the exit code of the child."""
    os.kill(child, signal.SIGSTOP)  # like a node that hangs
    held = acquire(folder, HERE, print)
    os.kill(child, signal.SIGCONT)
    deadline = time.monotonic() + 30
    while not (found := os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG)):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.01)
    held.release()
    return found.si_status


def test_a_holder_that_lost_its_lock_ends_though_it_cannot_write_its_heartbeat(tmp_path, capfd):
    folder = tmp_path / "lease"

    def fail(_heartbeat):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def hold():
        acquire(folder, ELSEWHERE, print)._write = fail

    with child_that(hold) as child:
        assert take_over_from(child, folder) == 2
    assert capfd.readouterr().err == f"megafrontier: {tmp_path}: taken over by another job\n"


def test_a_run_directory_in_use_is_refused_with_code_2_in_one_line_on_all_ranks(tmp_path, capfd):
    config = runs.make_config_file(tmp_path)
    directory = tmp_path / "run"
    command = ["train", str(config), "--nproc", "2", "train.steps=2", "machine=laptop"]
    held = acquire(directory / "lease", HERE, print)
    assert main(command) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"megafrontier: run.directory: {directory} is in use by here (pid ")
    assert error.count("\n") == 1
    held.release()
    assert not (directory / "metrics.jsonl").exists()
    assert main(command) == 0


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "lease").touch()
    with pytest.raises(UserError, match="lease: File exists, need a folder to write"):
        acquire(tmp_path / "lease", HERE, print)
