"""A resumed run goes on as the unbroken one: to the bit on the same layout, else closely."""

from functools import partial
from itertools import product

import pytest
import torch

from megafrontier.checkpoint.read import open_checkpoint
from megafrontier.cluster.hierarchy import Hierarchy
from megafrontier.partition import STRATEGIES
from megafrontier.training.arrangement import arrange
from megafrontier.training.loop import train_step
from megafrontier.training.saving import checkpoint_root, resume, save_trainer, shards
from megafrontier.training.trainer import build_trainer
from tests.ranks import run_ranks
from tests.training import runs


@pytest.fixture
def config_file(tmp_path):
    return runs.make_config_file(tmp_path)


@pytest.mark.parametrize("strategy", ["topo", "hpz", "mics", "zero1"])
def test_resume_on_the_same_layout_is_identical_to_the_last_bit(config_file, tmp_path, strategy):
    chosen = (f"partition.strategy={strategy}", "model.dropout=0.1", "train.steps=6")
    unbroken = runs.run(config_file, 8, *chosen, f"run.directory={tmp_path}/unbroken")
    runs.run(config_file, 8, *chosen, "train.stop_at=3")
    resumed = runs.run(config_file, 8, *chosen)
    assert runs.losses(resumed) == runs.losses(unbroken)
    assert runs.valid_losses(resumed)[-1] == runs.valid_losses(unbroken)[-1]
    assert [line["step"] for line in resumed if "loss" in line] == list(range(1, 7))
    assert [line["grad_norm"] for line in resumed if "loss" in line] == [
        line["grad_norm"] for line in unbroken if "loss" in line
    ]


def test_resume_with_low_bit_wires_and_their_error_feedback_is_identical_too(config_file, tmp_path):
    """Published weights and unsaid errors are state; saving folds the errors in either run."""
    chosen = ("partition.wires=low", "checkpoint.every=3")
    unbroken = runs.run(config_file, 8, *chosen, f"run.directory={tmp_path}/unbroken")
    runs.run(config_file, 8, *chosen, "train.stop_at=3")
    resumed = runs.run(config_file, 8, *chosen)
    assert runs.losses(resumed) == runs.losses(unbroken)
    manifest = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000008").manifest
    assert set(manifest.states) == {"weight", "exp_avg", "exp_avg_sq", "published", "error"}
    elsewhere = runs.run(
        config_file, 4, "partition.strategy=zero3", "train.steps=9",
        f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000008",
        f"run.directory={tmp_path}/elsewhere",
    )  # fmt: skip
    assert runs.losses(elsewhere)[-1] < runs.losses(unbroken)[0]


def test_a_run_handed_over_strategies_and_rank_counts_keeps_the_losses(config_file, tmp_path):
    one_level = "machine=laptop"
    short = ("train.steps=10", "train.global_batch=8", "evaluate.batches=0")
    alone = runs.run(config_file, 1, one_level, *short, f"run.directory={tmp_path}/alone")
    relay = [
        (8, "topo"), (4, "zero3"), (1, "ddp"), (8, "hpz"), (4, "mics"),
        (1, "zero1"), (8, "zero2"), (4, "hpz"), (1, "topo"), (8, "ddp"),
    ]  # fmt: skip
    for step, (ranks, strategy) in enumerate(relay, start=1):
        machine = [one_level] if ranks == 1 else []
        handed = runs.run(
            config_file, ranks, *machine, *short, f"train.stop_at={step}",
            f"partition.strategy={strategy}",
        )  # fmt: skip
    assert runs.losses(handed) == pytest.approx(runs.losses(alone), rel=1e-5)
    assert len(runs.losses(handed)) == 10


class Quiet:
    def remark(self, line):
        assert "refused" not in line


def test_every_strategy_loads_every_other_strategys_checkpoint(config_file, tmp_path):
    """State by state and bit by bit, after two steps so that the moments hold something. Each has a
    seed of its own: what an earlier load left behind would be seen."""

    def build(hierarchy, strategy, seed):
        config = runs.load(
            config_file, f"partition.strategy={strategy}", f"run.directory={tmp_path}/{strategy}",
            f"run.seed={seed}", "train.global_batch=8",
        )  # fmt: skip
        return build_trainer(config, arrange(config, hierarchy.size), hierarchy)

    def body(hierarchy):
        trainers = [build(hierarchy, name, seed) for seed, name in enumerate(STRATEGIES)]
        for trainer in trainers:
            for _ in range(2):
                train_step(trainer)
            save_trainer(trainer)
        worst = 0
        for trainer, source in product(trainers, STRATEGIES):
            path = tmp_path / source / "checkpoints" / "step-00000002"
            trainer.step = 0
            trainer.config.checkpoint.resume = str(path)
            resume(trainer, Quiet())
            assert trainer.step == 2
            worst += differences(trainer, open_checkpoint(path))
        for trainer in trainers:
            trainer.close()
        return worst

    assert run_ranks((2, 2, 2), body) == [0] * 8


def differences(trainer, checkpoint):
    """Elements of this rank's shards that are not those of the global tensors."""
    different = 0
    for state, tensors in shards(trainer).items():
        for unit, shard in zip(trainer.engine.units, tensors, strict=True):
            start, stop = unit.range
            for entry, first, last in unit.layout.within(start, stop):
                at = entry.offset + first - start
                expected = checkpoint.tensor(state, entry.name).flatten()[first:last]
                different += int((shard[at : at + last - first] != expected).sum())
    return different


def test_auto_falls_back_to_the_newest_whole_checkpoint_with_a_warning(config_file, tmp_path):
    unbroken = runs.run(config_file, 2, "machine=laptop", f"run.directory={tmp_path}/unbroken")
    chosen = ("machine=laptop", "checkpoint.every=2", "checkpoint.keep=0")
    runs.run(config_file, 2, *chosen, "train.stop_at=6")
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    damaged = next(newest.glob("pieces/*/00000001.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    resumed = runs.run(config_file, 2, *chosen)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "refused" in log
    assert damaged.name in log
    assert "resumed from" in log
    assert "step-00000004 at step 4" in log
    assert runs.losses(resumed) == runs.losses(unbroken)


def test_a_finished_run_that_is_started_again_changes_nothing(config_file):
    finished = runs.run(config_file, 1, "machine=laptop", "train.steps=2")
    assert runs.run(config_file, 1, "machine=laptop", "train.steps=2") == finished


def test_resume_never_refuses_a_directory_that_holds_another_runs_checkpoints(
    config_file, tmp_path, capfd
):
    runs.run(config_file, 1, "machine=laptop", "train.steps=2")
    config = runs.load(config_file, "machine=laptop", "checkpoint.resume=never")
    assert runs.train(config, 1) == 2
    assert "checkpoint.resume: never, but" in capfd.readouterr().err
    assert checkpoint_root_exists(tmp_path)


def checkpoint_root_exists(tmp_path):
    return (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def test_one_rank_writes_and_reads_without_a_process_group(config_file):
    config = runs.load(config_file, "machine=laptop")
    arrangement = arrange(config, 1)
    hierarchy = Hierarchy(arrangement.levels, 0, (None,), torch.device("cpu"))
    trainer = build_trainer(config, arrangement, hierarchy)
    train_step(trainer)
    path = save_trainer(trainer)
    trainer.close()
    assert path.parent == checkpoint_root(trainer)
    again = build_trainer(config, arrangement, hierarchy)
    partial(resume, again)(Quiet())
    assert differences(again, open_checkpoint(path)) == 0
    again.close()
