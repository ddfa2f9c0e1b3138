"""One job at a time on a run directory; a dead one keeps nobody away."""

import errno
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megafrontier.cli import main
from megafrontier.common.errors import UserError
from megafrontier.launch.health import run_lock as lease
from megafrontier.launch.health.run_lock import Holder, acquire
from tests import runs

HERE = Holder.present("here", {})


def elsewhere(**changes):
    """A holder on a machine whose processes cannot be seen from here."""
    return replace(HERE, host="elsewhere", machine="another boot", **changes)


@pytest.fixture(autouse=True)
def fast_heart(monkeypatch):
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 0.6)


@pytest.fixture
def said():
    return []


def in_child(body) -> int:
    """Run `body` in a forked process that then waits to be killed; returns once body is done."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        body()
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    return child


def test_a_storage_that_stands_still_is_no_sign_of_death(tmp_path, monkeypatch):
    """A look that takes longer than the wait has seen nothing of the holder meanwhile."""
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 0.3)
    held = acquire(tmp_path, elsewhere(), print)
    read, looks = lease._read, []

    def slowly(path):
        looks.append(1)
        if len(looks) == 2:  # an old beat, after a while
            time.sleep(0.5)
        holder, beat = read(path)
        return holder, f"{len(looks) // 3:020d}" if beat.strip() != "released" else beat

    monkeypatch.setattr(lease, "_read", slowly)
    with pytest.raises(UserError, match="is in use by"):
        acquire(tmp_path, HERE, print)
    held.release()


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def dead_lease(folder: Path, holder: Holder) -> None:
    """What a job leaves behind that was killed while it held the lease."""
    kill(in_child(lambda: acquire(folder, holder, print)))


def test_a_lease_that_is_given_back_is_free_at_once(tmp_path, said):
    for _ in range(3):
        acquire(tmp_path, HERE, said.append).release()
    acquire(tmp_path, elsewhere(), said.append).release()
    assert said == []
    assert len(list(tmp_path.iterdir())) == 1


def test_a_second_job_is_refused_and_told_who_holds_the_first(tmp_path, said):
    holder = replace(HERE, job="4711")
    held = acquire(tmp_path / "run" / "lease", holder, said.append)
    with pytest.raises(UserError) as refused:
        acquire(tmp_path / "run" / "lease", HERE, said.append)
    held.release()
    assert str(refused.value) == (
        f"run.directory: {tmp_path}/run is in use by here (pid {os.getpid()}, job 4711, since "
        f"{holder.since}); need another run.directory, or that job's end"
    )
    assert said == []


def test_a_holder_elsewhere_that_beats_is_refused_without_waiting_for_the_expiry(
    tmp_path, said, monkeypatch
):
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 60)
    held = acquire(tmp_path, elsewhere(), said.append)
    begin = time.monotonic()
    with pytest.raises(UserError, match="in use by elsewhere"):
        acquire(tmp_path, HERE, said.append)
    assert time.monotonic() - begin < 10
    held.release()


def test_a_killed_holder_on_this_machine_keeps_nobody_waiting(tmp_path, said, monkeypatch):
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 60)
    child = in_child(lambda: acquire(tmp_path, Holder.present("here", {}), print))
    with pytest.raises(UserError, match=f"pid {child}"):
        acquire(tmp_path, HERE, said.append)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # nobody has taken note of its end yet
    begin = time.monotonic()
    acquire(tmp_path, HERE, said.append).release()
    assert time.monotonic() - begin < 5
    os.waitpid(child, 0)
    assert said == []


def test_another_process_with_the_dead_holders_number_is_not_taken_for_it(tmp_path, said):
    dead_lease(tmp_path, replace(HERE, start="1"))
    acquire(tmp_path, HERE, said.append).release()
    assert said == []


def test_a_killed_holder_elsewhere_is_waited_for_aloud_and_no_longer_than_the_expiry(
    tmp_path, said
):
    dead_lease(tmp_path, elsewhere(job="12"))
    begin = time.monotonic()
    acquire(tmp_path, replace(HERE, job="13"), said.append).release()
    assert 0.6 <= time.monotonic() - begin < 20
    (line,) = said
    assert line.startswith("waiting up to 0.6 s for the lease of elsewhere (pid ")


def test_a_requeued_job_takes_over_from_its_own_earlier_start_at_once(tmp_path, said):
    dead_lease(tmp_path, elsewhere(job="12", restart="0"))
    acquire(tmp_path, replace(HERE, job="12", restart="1"), said.append).release()
    assert said == []


def test_a_copy_of_a_run_that_goes_on_is_free_at_once_and_the_run_is_not(
    tmp_path, said, monkeypatch
):
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 60)
    held = acquire(tmp_path / "run" / "lease", HERE, said.append)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    acquire(tmp_path / "copy" / "lease", HERE, said.append).release()
    with pytest.raises(UserError, match=f"{tmp_path}/run is in use by here"):
        acquire(tmp_path / "run" / "lease", HERE, said.append)
    held.release()
    assert said == []


def test_what_a_tool_has_put_beside_a_lease_is_passed_over(tmp_path, said):
    names = ["00000001 (copy)", "00000009.orig", ".00000007.swp", "00000003~", "5"]
    for name in names:
        (tmp_path / name).write_text("anything")
    for _ in range(2):
        acquire(tmp_path, HERE, said.append).release()
    assert {path.name for path in tmp_path.iterdir()} == {*names, "00000002"}
    assert said == []


def test_two_steps_of_one_job_are_kept_apart(tmp_path, said, monkeypatch):
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 60)  # a slow disk is not to end this process
    held = acquire(tmp_path, elsewhere(job="12", restart="1"), said.append)
    with pytest.raises(UserError, match="job 12"):
        acquire(tmp_path, replace(HERE, job="12", restart="1"), said.append)
    held.release()


@pytest.mark.parametrize("content", [b"", b"\x00garbage", b'{"host": "a", "later": 1}\n1'])
def test_a_lease_that_cannot_be_read_expires_like_any_other(tmp_path, said, content):
    (tmp_path / "00000007").write_bytes(content)
    acquire(tmp_path, HERE, said.append).release()
    assert [path.name for path in tmp_path.iterdir()] == ["00000008"]
    assert len(said) == 1


@pytest.mark.parametrize("left", [None, "near", "far"])
def test_of_many_starters_one_wins(tmp_path, left):
    if left is not None:
        dead_lease(tmp_path / "lease", replace(HERE, start="1") if left == "near" else elsewhere())

    def start():
        while not (tmp_path / "go").exists():
            time.sleep(0.001)
        try:
            acquire(tmp_path / "lease", Holder.present("here", {}), lambda _: None)
            word = "won"
        except UserError:
            word = "refused"
        (tmp_path / f"word-{os.getpid()}").write_text(word)
        signal.pause()

    children = [child for _ in range(6) if (child := _fork(start))]
    (tmp_path / "go").touch()
    while len(words := [p.read_text() for p in tmp_path.glob("word-*")]) < 6 or "" in words:
        time.sleep(0.01)
    for child in children:
        kill(child)
    assert sorted(words) == ["refused"] * 5 + ["won"]


def _fork(body) -> int:
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(1)  # never on as another pytest
    return child


def test_a_holder_that_was_given_up_for_dead_ends_before_it_writes_again(tmp_path, capfd):
    child = in_child(lambda: acquire(tmp_path / "lease", elsewhere(), print))
    os.kill(child, signal.SIGSTOP)  # as a node that hangs
    held = acquire(tmp_path / "lease", HERE, print)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    held.release()
    error = capfd.readouterr().err
    assert error.startswith(f"megafrontier: lease: {tmp_path} was taken over by here (pid ")
    assert error.count("\n") == 1


def assert_ends(tmp_path, child):
    """Of a holder that was given up for dead: it ends when it wakes up, with code 2."""
    os.kill(child, signal.SIGSTOP)
    held = acquire(tmp_path / "lease", HERE, print)
    os.kill(child, signal.SIGCONT)
    deadline, ended, status = time.monotonic() + 30, 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    held.release()
    if not ended:
        kill(child)
    assert ended, "it holds on"
    assert os.waitstatus_to_exitcode(status) == 2


def test_a_holder_that_was_given_up_for_dead_ends_though_it_cannot_say_so(tmp_path, monkeypatch):
    """Its terminal is closed, say, or its log lies on a disk that is full."""
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "__stderr__", full)
        child = in_child(lambda: acquire(tmp_path / "lease", elsewhere(), print))
    assert_ends(tmp_path, child)


def test_a_holder_that_was_given_up_for_dead_ends_though_it_cannot_beat(tmp_path):
    def hold():
        acquire(tmp_path / "lease", elsewhere(), print)._write = fail

    def fail(_beat):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    assert_ends(tmp_path, in_child(hold))


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


def test_a_lease_that_a_full_disk_has_no_room_for_keeps_nobody_waiting(tmp_path, monkeypatch, said):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(UserError, match="No space left on device"):
            acquire(tmp_path, HERE, said.append)
    acquire(tmp_path, elsewhere(), said.append).release()
    assert said == []


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "lease").touch()
    with pytest.raises(UserError, match="lease: File exists, need a folder to write"):
        acquire(tmp_path / "lease", HERE, print)
