"""All ranks resume from the newest whole checkpoint."""

import os

import pytest
import torch

from megafrontier.checkpoint.commands import verify
from megafrontier.checkpoint.format import CheckpointCorrupt, Manifest
from megafrontier.checkpoint.load import load_checkpoint, open_checkpoint, open_newest
from megafrontier.checkpoint.sets import shard_path
from megafrontier.common.checkpoints import MANIFEST
from megafrontier.common.errors import StorageFailed, UserError
from megafrontier.parallel.world import World
from tests.checkpoint import helpers
from tests.checkpoint.helpers import (
    BY_BLOCK,
    flip,
    make_layouts,
    make_shards,
    make_tensors,
    run_threads,
    save_all,
)


def resume(root, ranks=4, open_near=lambda load, step: None):
    """The step that all ranks have loaded, and the warnings. Raises what all ranks raise."""
    warnings = []
    layouts = make_layouts(BY_BLOCK, ranks)

    def body(world):
        shards = make_shards(layouts, make_tensors(0), world.rank, ranks)
        checkpoint = open_newest(
            root,
            lambda found: found.fill(layouts, shards, world.rank, ranks),
            world,
            warnings.append,
            open_near,
        )
        if checkpoint is None:
            return None
        need = make_shards(layouts, make_tensors(checkpoint.manifest.step), world.rank, ranks)
        for state in need:
            assert all(map(torch.equal, shards[state], need[state]))
        return checkpoint.manifest.step

    results = run_threads(ranks, body)
    assert len({str(result) for result in results}) == 1, "all ranks agree"
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0], warnings


def test_the_newest_is_resumed_on_all_ranks(tmp_path):
    for step in (100, 200, 1000):
        save_all(tmp_path, step)
    assert resume(tmp_path) == (1000, [])


def test_without_checkpoints_training_begins_new(tmp_path):
    (tmp_path / ".step-00000100.partial").mkdir()
    assert resume(tmp_path) == (None, [])
    assert resume(tmp_path / "nowhere") == (None, [])


def test_a_newer_snapshot_comes_before_a_checkpoint_and_after_a_damaged_newer_one(tmp_path):
    for step in (100, 200, 300):
        save_all(tmp_path / "all", step)
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "all" / "step-00000200").rename(elsewhere)
    asked = []

    def open_near(load, step):
        asked.append(step)
        if step >= 200:
            return None
        load(found := open_checkpoint(elsewhere))
        return found

    assert resume(tmp_path / "all", 1, open_near) == (300, [])
    _flip_payload(tmp_path / "all" / "step-00000300")
    step, warnings = resume(tmp_path / "all", 1, open_near)
    assert (step, len(warnings)) == (200, 1)
    assert resume(tmp_path / "nowhere", 1, open_near) == (200, [])
    assert asked == [300, 300, 100, 0]


def _flip_payload(path):
    flip(path / shard_path(3), (path / shard_path(3)).stat().st_size - 1)


def _truncate(path):
    with open(path / shard_path(3), "ab") as file:
        file.truncate(300)


DAMAGES = {
    "flipped byte of a shard": _flip_payload,
    "flipped byte of the manifest": lambda path: flip(path / MANIFEST, 150),
    "truncated file": _truncate,
    "missing file": lambda path: (path / shard_path(3)).unlink(),
    "half-written folder": lambda path: (path / MANIFEST).unlink(),
    "foreign folder": lambda path: (path / MANIFEST).write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_resumed(tmp_path, damage):
    save_all(tmp_path, 100)
    DAMAGES[damage](save_all(tmp_path, 200))
    step, warnings = resume(tmp_path)
    assert step == 100
    assert len(warnings) == 1
    assert "step-00000200" in warnings[0]


def test_if_no_checkpoint_is_whole_training_does_not_start_over_in_silence(tmp_path):
    for step in (100, 200):
        _truncate(save_all(tmp_path, step))
    with pytest.raises(UserError, match=r"none of 2 .*step-00000200.*step-00000100.*run.name"):
        resume(tmp_path)


def test_a_checkpoint_of_another_model_stops_all_ranks_and_is_no_reason_to_go_back(
    tmp_path, monkeypatch
):
    save_all(tmp_path, 100)
    monkeypatch.setitem(helpers.SHAPES, "head.weight", (37, 14))
    save_all(tmp_path, 200)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"head\.weight: shape \[37, 14\] in the checkpoint"):
        resume(tmp_path)


def test_storage_that_fails_one_rank_does_not_lead_to_an_older_checkpoint(tmp_path, monkeypatch):
    save_all(tmp_path, 100)
    path = save_all(tmp_path, 200)
    reads = os.preadv

    def preadv(descriptor, buffers, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path / shard_path(3)):
            raise OSError(5, "Input/output error")
        return reads(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StorageFailed, match=r"step-00000200.*cannot read: Input/output"):
        resume(tmp_path)
    assert "Input/output error" in verify(path).problems[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_storage_that_does_not_list_checkpoints_is_an_error(tmp_path, monkeypatch, ranks):
    """Beginning at step 0 would set aside all checkpoints."""
    save_all(tmp_path, 100)

    def listdir(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(os, "listdir", listdir)
    results = run_threads(ranks, lambda world: open_newest(tmp_path, print, world, print))
    assert [type(result) for result in results] == [StorageFailed] * ranks
    assert str(results[-1]) == f"{tmp_path}: Input/output error"


def test_a_checkpoint_given_by_path_is_loaded_or_refused_but_never_replaced(tmp_path):
    save_all(tmp_path, 100)
    path = save_all(tmp_path, 200)
    steps = []
    load = lambda checkpoint: steps.append(checkpoint.manifest.step)  # noqa: E731
    assert load_checkpoint(tmp_path / "step-00000100", load, World.single()).manifest.step == 100
    _truncate(path)
    with pytest.raises(CheckpointCorrupt, match="step-00000200"):
        load_checkpoint(path, load, World.single())
    assert steps == [100]


def test_later_checkpoints_of_a_training_given_up_are_set_aside_and_not_resumed(tmp_path):
    """Going back to step 100 after a spike at 300 does not mix the two trainings."""
    for step in (100, 200, 300):
        save_all(tmp_path, step, tokens=1)
    save_all(tmp_path, 200, tokens=2)
    step, warnings = resume(tmp_path)
    assert (step, warnings) == (200, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000100",
        "step-00000200",
        "step-00000200.superseded",
        "step-00000300.superseded",
    ]
    assert (
        Manifest.decode((tmp_path / "step-00000200" / MANIFEST).read_bytes(), tmp_path).tokens == 2
    )
