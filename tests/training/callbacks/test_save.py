"""What checkpoints hold and when they are written, and that those of sound weights are kept."""

import math
import os

from megafrontier.training.callbacks import save as saving
from megafrontier.training.logging.sinks import JsonLines
from megafrontier.training.loop import train_step
from tests import runs
from tests.partition.tiny import watch_collectives
from tests.ranks import run_mesh

STEPS = ("machine=laptop", "train.steps=10", "evaluate.batches=0")


def checkpoints(folder):
    return sorted(os.listdir(folder / "run" / "checkpoints"))


def test_some_checkpoints_are_kept_for_good(config_file, tmp_path):
    chosen = ("train.steps=5", "checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=2")
    runs.run(config_file, 1, *runs.ONE, *chosen)
    assert checkpoints(tmp_path) == [f"step-{step:08d}" for step in (2, 4, 5)]


def test_errors_are_folded_into_a_checkpoint_outside_of_any_steps_traffic(config_file):
    config = runs.load(
        config_file, "partition.wires=low", "train.global_batch=8", "train.micro_batch=1"
    )

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            train_step(trainer)
            trainer.engine.finish_publishing()
            trainer.engine.ledger.take(wait=True)
            crossed = []
            watch_collectives(trainer.engine, lambda _, label: crossed.append(label))
            saving.start_saving(trainer).finish()
            sent, _ = trainer.engine.ledger.take(wait=True)
        return {label.split()[0] for label in crossed}, sent

    assert run_mesh((2, 2, 2), body) == [({"fold"}, [0, 0, 0])] * 8


def test_metrics_are_on_the_disk_before_a_checkpoint_that_continues_them(config_file, monkeypatch):
    order = []
    sync, start_saving = JsonLines.sync, saving.start_saving
    monkeypatch.setattr(JsonLines, "sync", lambda self: (order.append("sync"), sync(self)))
    monkeypatch.setattr(
        saving, "start_saving", lambda trainer: (order.append("save"), start_saving(trainer))[1]
    )
    runs.run(config_file, None, *runs.ONE, "train.steps=2", "checkpoint.every=1")
    assert order == ["sync", "save"] * 2


def test_checkpoints_of_sound_weights_are_not_replaced_by_those_of_a_broken_run(
    config_file, tmp_path, multiply_loss
):
    """By the time a run ends because of its losses, it would keep no other checkpoints."""
    multiply_loss(math.nan, 48, 64, 80)  # steps 4 to 6
    keep = ("checkpoint.every=2", "checkpoint.keep=1", "train.nonfinite_limit=4")
    runs.run(config_file, 1, *STEPS, *keep, "train.steps=8", "train.stop_at=6")
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000004", "step-00000006"]
