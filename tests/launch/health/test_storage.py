"""Before the first step the storage is tried: room for the checkpoints, and leave to write."""

from pathlib import Path

import pytest
import torch

from megafrontier.cli import main
from megafrontier.common.errors import BAD_INPUT
from megafrontier.launch.health import storage
from megafrontier.launch.health.storage import checkpoint_bytes
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.training.callbacks.save import save_trainer
from megafrontier.training.plan import resolve_plan
from megafrontier.training.trainer import build_trainer
from tests import runs

pytestmark = pytest.mark.usefixtures("no_training")
SHORT = ("train.steps=2", "evaluate.batches=0")


def train(config_file, ranks, *overrides):
    return main(["train", str(config_file), "--nproc", str(ranks), *SHORT, *overrides])


def test_storage_without_room_is_refused_with_what_is_needed(config_file, monkeypatch, capfd):
    config = runs.load(config_file)
    size = checkpoint_bytes(config, resolve_plan(config, 4))
    monkeypatch.setattr(storage, "_free_gib", lambda _: 2.5 * size / 2**30)
    assert train(config_file, 4, "train.steps=8", "checkpoint.every=3") == BAD_INPUT
    error = capfd.readouterr().err
    free, need = f"{2.5 * size / 2**30:.3g} GiB free", f"need {3 * size / 2**30:.3g} for"
    assert f"run.directory: {config.run.directory}: {free}, {need} 3 checkpoints" in error
    assert train(config_file, 4, "train.steps=8", "checkpoint.every=3", "checkpoint.keep=1") == 0
    assert train(config_file, 4, "train.steps=8", "checkpoint.every=3", "checkpoint.keep=0") == 0
    assert train(config_file, 4, "run.name=at-the-end") == 0


def test_room_is_looked_for_where_a_linked_folder_of_checkpoints_leads(
    config_file, tmp_path, monkeypatch, capfd
):
    root = Path(runs.load(config_file).run.directory) / "checkpoints"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root.parent.mkdir(parents=True)
    root.symlink_to(elsewhere)
    is_there = lambda path: path.resolve() == elsewhere  # noqa: E731
    monkeypatch.setattr(storage, "_free_gib", lambda path: 0 if is_there(path) else 1000)
    assert train(config_file, 4) == BAD_INPUT
    assert f"run.directory: {root}: 0 GiB free" in capfd.readouterr().err


def test_a_folder_of_checkpoints_that_cannot_be_written_is_told_before_the_first_step(
    config_file, monkeypatch, capfd
):
    """As a link to another's, or to a storage that is only read: nothing could be saved."""
    root = Path(runs.load(config_file).run.directory) / "checkpoints"
    root.parent.mkdir(parents=True)
    root.symlink_to("/proc/self")  # where root may not write either
    monkeypatch.setattr(storage, "_free_gib", lambda _: 1000)
    assert train(config_file, 4) == BAD_INPUT
    line = capfd.readouterr().err
    assert line.startswith(f"megafrontier: run.directory: {root}: ")
    assert line.endswith(", need a folder to write\n")


def test_the_room_of_a_save_that_was_killed_is_room(config_file, monkeypatch):
    config = runs.load(config_file)
    size = checkpoint_bytes(config, resolve_plan(config, 4))
    torn = Path(config.run.directory) / "checkpoints" / ".step-00000003.partial"
    torn.mkdir(parents=True)
    free = lambda _: (2.5 if torn.exists() else 3.5) * size / 2**30  # noqa: E731
    monkeypatch.setattr(storage, "_free_gib", free)
    assert train(config_file, 4) == 0


def test_a_checkpoint_is_as_large_as_it_is_taken_to_be(config_file):
    config = runs.load(config_file, "machine=laptop")
    plan = resolve_plan(config, 1)
    trainer = build_trainer(config, plan, Hierarchy.single(plan.levels, torch.device("cpu")))
    folder = save_trainer(trainer)
    trainer.close()
    found = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert found == pytest.approx(checkpoint_bytes(config, plan), rel=0.25)
