"""A save that fails or is killed at any moment harms nothing that was there."""

import errno
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from megafrontier.checkpoint import folder, shard_file
from megafrontier.checkpoint import save as save_module
from megafrontier.checkpoint.commands import verify
from megafrontier.checkpoint.format import CheckpointWriteError
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.checkpoint.save import save
from megafrontier.common.checkpoints import list_checkpoints
from megafrontier.parallel.world import World
from tests.checkpoint.helpers import (
    ALL_IN_ONE,
    BY_BLOCK,
    assert_same,
    contents,
    load_all,
    make_layouts,
    make_manifest,
    make_shards,
    make_tensors,
    own_shard,
    run_threads,
    save_all,
)
from tests.processes import in_child


def _save_on_ranks(root: Path, step: int, num_shards: int = 4, attach=None) -> list:
    layouts = make_layouts(BY_BLOCK, num_shards)

    def body(world):
        shards = make_shards(layouts, make_tensors(step), world.rank, num_shards)
        own = [own_shard(layouts, shards, world.rank, num_shards)]
        return save(root, make_manifest(step), own, world, attach)

    return run_threads(num_shards, body)


def _assert_all_refused(results: list, reason: str) -> None:
    assert [type(result) for result in results] == [CheckpointWriteError] * len(results)
    assert {str(result) for result in results} == {str(results[0])}, "all ranks say the same"
    assert reason in str(results[0])


def test_a_full_disk_on_one_rank_stops_all_ranks_and_harms_nothing(tmp_path, monkeypatch):
    save_all(tmp_path, 100, 4)
    before = contents(tmp_path)
    real_write_shard = save_module.write_shard
    full_file = partial(open, mode="wb")  # "xb" would refuse the link.

    def full_disk(path, manifest, shard_set, number, read):
        if number == 2:
            path.symlink_to("/dev/full")
            monkeypatch.setattr(
                shard_file, "open", lambda path, _mode: full_file(path), raising=False
            )
        real_write_shard(path, manifest, shard_set, number, read)

    monkeypatch.setattr(save_module, "write_shard", full_disk)
    said = f"rank 2: {tmp_path}: No space left on device"
    _assert_all_refused(_save_on_ranks(tmp_path, 200), said)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000100"]
    monkeypatch.undo()
    assert _save_on_ranks(tmp_path, 200) == [tmp_path / "step-00000200"] * 4


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_an_error_at_any_system_call_of_any_rank_stops_all_ranks(tmp_path, monkeypatch, call):
    save_all(tmp_path, 100, 4)
    before = contents(tmp_path)
    owner = Path if call == "mkdir" else os
    real = getattr(owner, call)
    fails_at = 0
    while True:
        calls = []

        def failing(*args, calls=calls, fails_at=fails_at, **kwargs):
            calls.append(None)
            if len(calls) == fails_at + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, call, failing)
        results = _save_on_ranks(tmp_path, 200)
        monkeypatch.undo()
        if len(calls) <= fails_at:
            break
        _assert_all_refused(results, "No space left on device")
        if not (tmp_path / "step-00000200").exists():
            assert contents(tmp_path) == before
        else:  # Published in full; only that it survives a power cut is not sure.
            assert verify(tmp_path / "step-00000200").whole
            shutil.rmtree(tmp_path / "step-00000200")
        fails_at += 1
    assert fails_at >= {"fsync": 8, "rename": 1, "mkdir": 4}[call]
    assert results == [tmp_path / "step-00000200"] * 4


def test_a_save_that_cannot_replace_one_of_the_same_step_leaves_it(tmp_path, monkeypatch):
    for step in (100, 200):
        save_all(tmp_path, step, 4)
    before = contents(tmp_path)
    rename = os.rename

    def full(source, target):
        if Path(source).name.endswith(".partial"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    _assert_all_refused(_save_on_ranks(tmp_path, 200), "No space left on device")
    assert contents(tmp_path) == before


def test_a_failing_attach_is_a_failed_save_on_all_ranks(tmp_path):
    def attach(partial):
        raise RuntimeError("no tokenizer")

    _assert_all_refused(_save_on_ranks(tmp_path, 1, attach=attach), "RuntimeError: no tokenizer")
    assert list(tmp_path.iterdir()) == []


def test_a_shard_without_a_writer_or_with_two_is_not_published(tmp_path):
    layouts = make_layouts(BY_BLOCK, 2)

    def body(world):
        number = piece_of[world.rank]
        shards = make_shards(layouts, make_tensors(), number, 2)
        own = [own_shard(layouts, shards, number, 2, number in writers)]
        return save(tmp_path, make_manifest(1), own, world)

    piece_of, writers = [0, 1], {0}
    _assert_all_refused(run_threads(2, body), "1 shard files, need 2")
    piece_of, writers = [0, 0], {0}
    _assert_all_refused(run_threads(2, body), "File exists")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_published_before_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def rename(source, target):
        events.append("rename")
        needed = {str(source), *(str(path) for path in Path(source).rglob("*"))}
        assert needed <= set(events)
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save_all(tmp_path, attach=lambda path: (path / "note").write_text("x") and None)
    assert events[-2:] == ["rename", str(tmp_path)]


def test_a_kill_at_any_moment_of_a_save_leaves_only_whole_checkpoints(tmp_path):
    """Kills at the n-th call that changes the disk or reads a slice, for every n."""
    origin = save_all(tmp_path / "origin", 100, 1)
    layouts = make_layouts(ALL_IN_ONE, 1)
    shards = make_shards(layouts, make_tensors(200), 0, 1)
    manifest = make_manifest(200, slice_elements=1000)

    def killed_save(root: Path, at: int) -> int:
        def child() -> bool:
            kill_at_call(at)
            save(root, manifest, [own_shard(layouts, shards)], World.single())
            return True

        return in_child(child)

    at, outcomes = 1, set()
    while True:
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(origin.parent, root)
        code = killed_save(root, at)
        found = list_checkpoints(root)
        outcomes.add(tuple(path.name for path in found))
        assert all(verify(path).whole for path in found)
        assert found[0].name == "step-00000100"
        if code == 0:
            break
        assert code == -signal.SIGKILL
        save_all(root, 300, 1)
        assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
        assert_same(
            load_all(open_checkpoint(list_checkpoints(root)[-1]), 2, BY_BLOCK), make_tensors(300)
        )
        at += 1
    assert at > 12
    assert outcomes == {("step-00000100",), ("step-00000100", "step-00000200")}


def kill_at_call(at: int) -> None:
    """Kill this process at the `at`-th call of what a save does to the disk."""
    counter = [0]
    for owner, name in [
        (os, "fsync"),
        (os, "rename"),
        (Path, "mkdir"),
        (shard_file, "crc32_hex"),
    ]:
        kill_at(owner, name, counter, at)


def kill_at(owner, name: str, counter: list[int], at: int) -> None:
    real = getattr(owner, name)

    def counted(*args, **kwargs):
        counter[0] += 1
        if counter[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, counted)


def test_a_kill_during_a_deletion_leaves_no_half_of_a_checkpoint(tmp_path):
    for step in (1, 2, 3):
        save_all(tmp_path, step, 1)

    def child() -> bool:
        kill_at(shutil, "rmtree", [0], 1)
        folder.delete(folder.prune(tmp_path, 2, 0))
        return True

    assert in_child(child) == -signal.SIGKILL
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    folder.clean_hidden(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert all(verify(path).whole for path in list_checkpoints(tmp_path))
