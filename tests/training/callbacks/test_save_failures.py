"""A checkpoint that cannot be written or deleted costs no more than itself."""

import os
import signal
import threading

import pytest

from megafrontier.checkpoint import folder
from megafrontier.checkpoint import save as save_module
from megafrontier.cli import main
from megafrontier.common.errors import FAILED, LOST, STOPPED
from megafrontier.common.signals import record_stop_requests
from megafrontier.training import loop
from tests import runs

CHECKPOINTS = (
    *runs.ONE, "train.micro_batch=8", "checkpoint.every=2", "checkpoint.keep=2", "train.steps=6",
)  # fmt: skip


@pytest.fixture
def fail_to_write(monkeypatch):
    """Let a shard's file fail with an error number `if_(step, index)`, after it was written."""
    write = save_module.write_shard

    def choose(number, if_):
        def write_or_fail(path, manifest, shard_set, index, read):
            write(path, manifest, shard_set, index, read)
            if if_(manifest.step, index):
                raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(save_module, "write_shard", write_or_fail)

    return choose


def test_a_disk_that_fills_up_in_a_save_costs_only_that_checkpoint(
    config_file, tmp_path, fail_to_write
):
    fail_to_write(28, lambda step, index: step == 4 and index == 1)
    lines = runs.run(config_file, 2, *CHECKPOINTS)
    assert len(runs.losses(lines)) == 6
    log = runs.log(tmp_path / "run")
    assert "warning: no checkpoint at step 4: checkpoint not saved: rank 1: " in log
    assert "No space left on device" in log
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002", "step-00000006"]
    assert main(["checkpoint", "verify", str(checkpoints)]) == 0


@pytest.mark.parametrize(
    ("every", "unsaved_from", "number", "code"),
    [
        (0, 0, 122, FAILED),  # nothing was saved: a person is needed
        (2, 5, 122, LOST),  # only the end was not: another start may do better
        (0, 0, 5, LOST),  # storage that is away for a while needs no person either
    ],
)
def test_a_run_whose_end_cannot_be_saved_is_not_done(
    config_file, fail_to_write, capfd, every, unsaved_from, number, code
):
    fail_to_write(number, lambda step, _: step >= unsaved_from)
    config = runs.load(config_file, *CHECKPOINTS, f"checkpoint.every={every}")
    assert runs.train(config, 2) == code
    shown = capfd.readouterr()
    assert "warning: no checkpoint at step 6: " in shown.out
    assert shown.err.startswith("megafrontier: step 6: could not be saved; ")
    assert shown.err.count("\n") == 1


def test_a_run_stopped_without_room_for_its_last_step_says_from_where_it_goes_on(
    config_file, tmp_path, monkeypatch, fail_to_write
):
    begin_step(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    fail_to_write(28, lambda step, _: step == 5)
    with record_stop_requests():
        assert runs.train(runs.load(config_file, *CHECKPOINTS), 2) == STOPPED
    said = "stopped on request at step 5, saved at step 4; the same command goes on\n"
    assert said in runs.log(tmp_path / "run")


def test_old_checkpoints_that_cannot_be_deleted_do_not_end_the_run(
    config_file, tmp_path, monkeypatch
):
    delete = folder.delete

    def stuck(paths):
        paths = [*paths]
        if any(path.name.endswith(".removed") for path in paths):
            raise OSError(16, "Device or resource busy", "step-00000002")
        delete(paths)

    monkeypatch.setattr(folder, "delete", stuck)
    assert len(runs.losses(runs.run(config_file, 2, *CHECKPOINTS))) == 6
    log = runs.log(tmp_path / "run")
    assert "warning: old checkpoints not deleted: [Errno 16] Device or resource busy" in log
    found = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert len(found) == 3
    assert len([name for name in found if name.startswith("step-")]) == 2


def let_deletions_wait(monkeypatch, event):
    """Let deletions of old checkpoints wait for an event of their process."""
    delete = folder.delete

    def wait(paths):
        paths = [*paths]
        if any(path.name.endswith(".removed") for path in paths) and not event.wait(60):
            raise OSError(110, "Connection timed out")
        delete(paths)

    monkeypatch.setattr(folder, "delete", wait)


def begin_step(monkeypatch, step, act):
    """Call `act` at the beginning of a step, on each rank."""
    start_step = loop.start_step

    def begin(trainer, *others):
        if trainer.step == step - 1:
            act()
        return start_step(trainer, *others)

    monkeypatch.setattr(loop, "start_step", begin)


def test_no_step_waits_for_the_deletion_of_old_checkpoints(config_file, tmp_path, monkeypatch):
    """That of step 2, which begins after step 4, goes on until step 6 begins."""
    event = threading.Event()
    let_deletions_wait(monkeypatch, event)
    begin_step(monkeypatch, 6, event.set)
    runs.run(config_file, 2, *CHECKPOINTS, "checkpoint.keep=1", "checkpoint.asynchronous=false")
    assert "not deleted" not in runs.log(tmp_path / "run")
    found = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert found == ["step-00000006"], "the end of the run waits for it"


def test_a_run_that_is_stopped_leaves_deletions_to_its_next_start(
    config_file, tmp_path, monkeypatch
):
    one = (*CHECKPOINTS, "checkpoint.keep=1", "checkpoint.asynchronous=false")
    with monkeypatch.context() as patch, record_stop_requests():
        let_deletions_wait(patch, threading.Event())
        begin_step(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert runs.train(runs.load(config_file, *one), 2) == STOPPED
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / ".step-00000002.removed").exists()
    runs.run(config_file, 2, *one, "preflight.enabled=false")
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000006"]
