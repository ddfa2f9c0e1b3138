"""A save that goes on behind the caller saves what there was when it began."""

import os
import secrets
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megafrontier.checkpoint import save as save_module
from megafrontier.checkpoint.commands import verify
from megafrontier.checkpoint.format import CheckpointWriteError, Manifest
from megafrontier.checkpoint.host_copy import HostCopy
from megafrontier.checkpoint.load import read_manifest
from megafrontier.checkpoint.save import PendingSave
from megafrontier.checkpoint.shard_file import slice_of, slices_of
from megafrontier.common.checkpoints import MANIFEST, list_checkpoints
from megafrontier.parallel.world import World
from megafrontier.partition.layout import Layout
from scripts.benchmarks.shared.measuring import resident_bytes
from tests.checkpoint.helpers import (
    ALL_IN_ONE,
    BY_BLOCK,
    contents,
    make_layouts,
    make_manifest,
    make_shards,
    make_tensors,
    own_shard,
    run_threads,
    save_all,
)
from tests.checkpoint.test_save import kill_at_call
from tests.processes import in_child


def save_behind(root, step=100, num_shards=4):
    """Save on ranks that are threads, and change everything before the saves are finished."""
    layouts = make_layouts(BY_BLOCK, num_shards)

    def body(world):
        shards = make_shards(layouts, make_tensors(step), world.rank, num_shards)
        own = [own_shard(layouts, shards, world.rank, num_shards)]
        manifest = make_manifest(step, extra={"callbacks": {"counts": [step]}})
        pending = PendingSave(root, manifest, own, world)
        pending.write_behind()
        manifest.extra["callbacks"]["counts"].append(7)
        for tensors in shards.values():
            for tensor in tensors:
                tensor.fill_(7.0)
        assert not list_checkpoints(root)
        return pending.finish()

    return run_threads(num_shards, body)


def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda n: "0123456789abcdef")
    path = save_all(tmp_path / "waited", 100, 4, extra={"callbacks": {"counts": [100]}})
    assert save_behind(tmp_path / "behind") == [tmp_path / "behind" / path.name] * 4
    found, need = contents(tmp_path / "behind"), contents(tmp_path / "waited")
    extras = [read_manifest(tmp_path / kind / path.name).extra for kind in ("behind", "waited")]
    assert extras[0] == extras[1]
    manifest = f"{path.name}/{MANIFEST}"  # has the time in it
    assert found.pop(manifest)
    assert need.pop(manifest)
    assert found == need


def test_a_thread_that_cannot_write_is_a_failed_save_on_all_ranks(tmp_path, monkeypatch):
    write = save_module.write_shard

    def full(path, manifest, shard_set, index, read):
        write(path, manifest, shard_set, index, read)
        if index == 2:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(save_module, "write_shard", full)
    results = save_behind(tmp_path)
    assert [type(result) for result in results] == [CheckpointWriteError] * 4
    assert {str(result) for result in results} == {
        f"checkpoint not saved: rank 2: {tmp_path}: No space left on device"
    }
    assert list(tmp_path.iterdir()) == []


def test_memory_that_does_not_suffice_for_the_copies_is_a_failed_save(tmp_path, monkeypatch):
    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr(save_module, "HostCopy", no_memory)
    results = save_behind(tmp_path)
    assert {str(result) for result in results} == {"checkpoint not saved: rank 0: MemoryError:"}
    assert list(tmp_path.iterdir()) == []


def test_a_kill_at_any_moment_leaves_only_whole_checkpoints(tmp_path):
    origin = save_all(tmp_path / "origin", 100, 1)
    layouts = make_layouts(ALL_IN_ONE, 1)
    own = [own_shard(layouts, make_shards(layouts, make_tensors(200), 0, 1))]
    manifest = make_manifest(200, slice_elements=1000)

    def killed(root: Path, at: int) -> int:
        def child() -> bool:
            kill_at_call(at)
            pending = PendingSave(root, manifest, own, World.single())
            pending.write_behind()
            pending.finish()
            return True

        return in_child(child)

    at, code, outcomes = 0, -signal.SIGKILL, set()
    while code != 0:
        at += 2
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(origin.parent, root)
        code = killed(root, at)
        found = list_checkpoints(root)
        outcomes.add(tuple(path.name for path in found))
        assert all(verify(path).whole for path in found)
    assert at > 12
    assert outcomes == {("step-00000100",), ("step-00000100", "step-00000200")}


def _big(elements):
    layouts = [Layout.build("unit", [("a", (elements // 1024, 1024))], 1)]
    return own_shard(layouts, {"weight": [torch.randn(elements)]})


def test_the_host_holds_at_most_a_tenth_more_than_the_shard(tmp_path):
    def grown_mib(folder: Path, elements: int) -> float:
        own = _big(elements)
        before = resident_bytes("VmHWM")
        pending = PendingSave(folder, Manifest(1, 0, slice_elements=2**16), [own], World.single())
        pending.write_behind()
        pending.finish()
        return (resident_bytes("VmHWM") - before) / 2**20

    def child() -> bool:
        grown_mib(tmp_path / "small", 2**17)  # brings in the code that the real one will use
        # Less than the shard if the process has free memory.
        return grown_mib(tmp_path / "large", 2**24) < 1.1 * 64

    assert in_child(child) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_gpu_come_in_pieces_of_pinned_memory():
    own = _big(2**22 + 1024)
    on_gpu = {"weight": [own.shards["weight"][0].cuda()]}
    slices = slices_of(own.shard_set, 0, 2**19 + 3)
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    copies = HostCopy(on_gpu, slices)
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) - before
    on_gpu["weight"][0].zero_()
    assert pinned <= 0.1 * 4 * (2**22 + 1024)
    for part in slices:
        assert torch.equal(copies.take(part), slice_of(own.shards, part))
