"""A resumed run goes on as the unbroken one: to the bit on the same layout, else closely."""

import shutil
from functools import cache, partial
from itertools import product

import pytest
import torch

from megafrontier.checkpoint.load import Checkpoint, open_checkpoint
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.partition import STRATEGIES
from megafrontier.training.callbacks.save import checkpoint_root, save_trainer, shards
from megafrontier.training.loop import train_step
from megafrontier.training.plan import resolve_plan
from megafrontier.training.resume.resume import resume
from megafrontier.training.trainer import build_trainer
from tests import runs
from tests.ranks import run_ranks


def broken_off(run, at, last):
    """What is left where an unbroken run ends some steps after its checkpoint at step `at`."""
    folder = run.with_name("broken-off")
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{last:08d}")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{at:08d}"]
    return f"run.directory={folder}"


@pytest.mark.parametrize(
    ("strategy", "wires"),
    [("topo", "exact"), ("mics", "exact"), ("hpz", "zero++")],
)
def test_resume_on_the_same_layout_is_identical_to_the_last_bit(
    config_file, tmp_path, strategy, wires
):
    """With wires, too, that round the weights of every step and keep nothing of it."""
    chosen = (
        f"partition.strategy={strategy}", f"partition.wires={wires}", "model.dropout=0.1",
        "train.steps=4", "checkpoint.every=2",
    )  # fmt: skip
    unbroken = runs.run(config_file, 8, *chosen)
    resumed = runs.run(config_file, 8, *chosen, broken_off(tmp_path / "run", at=2, last=4))
    assert runs.losses(resumed) == runs.losses(unbroken)
    assert runs.valid_losses(resumed)[-1] == runs.valid_losses(unbroken)[-1]
    assert [line["step"] for line in resumed if "loss" in line] == list(range(1, 5))
    assert [line["grad_norm"] for line in resumed if "loss" in line] == [
        line["grad_norm"] for line in unbroken if "loss" in line
    ]
    assert "at step 2" in runs.log(tmp_path / "broken-off")


def test_resume_with_low_bit_wires_and_their_error_feedback_is_identical_too(config_file, tmp_path):
    """Published weights and unsaid errors are state; saving folds the errors in either run."""
    chosen = ("partition.wires=low", "train.steps=6", "checkpoint.every=3")
    unbroken = runs.run(config_file, 8, *chosen)
    resumed = runs.run(config_file, 8, *chosen, broken_off(tmp_path / "run", at=3, last=6))
    assert runs.losses(resumed) == runs.losses(unbroken)
    last = tmp_path / "broken-off" / "checkpoints" / "step-00000006"
    manifest = open_checkpoint(last).manifest
    assert set(manifest.states) == {"weight", "exp_avg", "exp_avg_sq", "published", "error"}
    elsewhere = runs.run(
        config_file, 4, "partition.strategy=zero3", "train.steps=7",
        f"checkpoint.resume={last}", f"run.directory={tmp_path}/elsewhere",
    )  # fmt: skip
    assert runs.losses(elsewhere)[-1] < runs.losses(unbroken)[0]
    dropped = "error feedback: none on these levels; the errors kept so far are dropped"
    assert dropped in runs.log(tmp_path / "elsewhere")
    assert dropped not in runs.log(tmp_path / "broken-off")


LOW = ("partition.wires=low", "model.ffn_hidden=48")


@pytest.fixture(scope="module")
def low_bit(folder):
    """A checkpoint of eight ranks whose wires left something unsaid."""
    runs.run(folder / "config.yaml", 8, *LOW, "train.steps=3")
    return open_checkpoint(folder / "run" / "checkpoints" / "step-00000003")


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(4, "topo"), (8, "zero1"), (8, "mics"), (4, "zero3")]
)
def test_errors_and_published_weights_reshard_like_every_other_state(
    config_file, tmp_path, low_bit, ranks, strategy
):
    """Bit by bit; of replicas the first one has the errors."""

    def body(hierarchy):
        config = runs.load(
            config_file, *LOW, f"partition.strategy={strategy}", "partition.error_feedback=true",
            f"checkpoint.resume={low_bit.path}", f"run.directory={tmp_path}/other",
        )  # fmt: skip
        trainer = build_trainer(config, resolve_plan(config, ranks), hierarchy)
        resume(trainer, Quiet())
        states, errors = (
            set(shards(trainer)),
            [unit.feedback.error for unit in trainer.engine.units],
        )
        is_first = hierarchy.is_first_replica(trainer.engine.placement.optimizer)
        different = differences(trainer, low_bit, () if is_first else ("error",))
        trainer.close()
        return different, states, sum(error.abs().sum().item() for error in errors), is_first

    found = run_ranks((2, 2, ranks // 4), body)
    assert [different for different, *_ in found] == [0] * ranks
    assert all("error" in states for _, states, *_ in found)
    assert ("published" in found[0][1]) == (strategy not in ("mics", "zero3"))
    assert sum(unsaid for *_, unsaid, is_first in found if is_first) > 0
    assert sum(unsaid for *_, unsaid, is_first in found if not is_first) == 0


def test_what_gradients_left_unsaid_is_scaled_with_the_loss(config_file, tmp_path):
    """It is in units of the loss scale, which fp16 has and the precision after it has not."""

    def build(hierarchy, *chosen):
        chosen = ("partition.wires=low", "train.global_batch=8", "optimizer.lr=0", *chosen)
        config = runs.load(config_file, *chosen)
        return build_trainer(config, resolve_plan(config, hierarchy.size), hierarchy)

    def body(hierarchy):
        first = build(hierarchy, "train.precision=fp16", "train.loss_scale=256")
        train_step(first)
        save_trainer(first)
        path = tmp_path / "run" / "checkpoints" / "step-00000001"
        second = build(hierarchy, "train.precision=bf16", f"checkpoint.resume={path}")
        resume(second, Quiet())
        said = (
            [u.feedback.error for u in first.engine.units],
            [u.feedback.error for u in second.engine.units],
        )
        first.close()
        second.close()
        return [(a.abs().sum().item(), b.abs().sum().item()) for a, b in zip(*said, strict=True)]

    found = run_ranks((2, 2, 2), body)
    assert all(scaled == saved / 256 for rank in found for saved, scaled in rank)
    assert any(saved for rank in found for saved, _ in rank)


def test_a_run_handed_over_strategies_and_rank_counts_keeps_the_losses(config_file, tmp_path):
    one_level = "machine=laptop"
    short = ("train.steps=7", "train.global_batch=8", "evaluate.batches=0")
    alone = runs.run(config_file, 1, one_level, *short, f"run.directory={tmp_path}/alone")
    relay = [
        (8, "topo"), (4, "zero3"), (1, "ddp"), (8, "hpz"), (4, "mics"), (1, "zero1"), (8, "zero2"),
    ]  # fmt: skip
    for step, (ranks, strategy) in enumerate(relay, start=1):
        machine = [one_level] if ranks == 1 else []
        handed = runs.run(
            config_file, ranks, *machine, *short, f"train.stop_at={step}",
            f"partition.strategy={strategy}",
        )  # fmt: skip
    assert runs.losses(handed) == pytest.approx(runs.losses(alone), rel=1e-5)
    assert len(runs.losses(handed)) == 7


class Quiet:
    def info(self, line):
        assert "refused" not in line


def test_every_strategy_loads_every_other_strategys_checkpoint(config_file, tmp_path):
    """State by state and bit by bit, after two steps so that the moments hold something. Each has a
    seed of its own: what an earlier load left behind would be seen. On nodes of one pair each state
    is still cut over none, some and all of the ranks."""

    configs = [
        runs.load(
            config_file, f"partition.strategy={strategy}", f"run.directory={tmp_path}/{strategy}",
            f"run.seed={seed}", "train.global_batch=4", "machine.levels.node.size=1",
        )
        for seed, strategy in enumerate(STRATEGIES)
    ]  # fmt: skip

    def body(hierarchy):
        opened = cache(read_once)
        trainers = [build_trainer(c, resolve_plan(c, hierarchy.size), hierarchy) for c in configs]
        for trainer in trainers:
            for _ in range(2):
                train_step(trainer)
            save_trainer(trainer)
        worst = 0
        for trainer, source in product(trainers, STRATEGIES):
            path = tmp_path / source / "checkpoints" / "step-00000002"
            trainer.step = 0
            trainer.config.checkpoint.resume = str(path)
            trainer.config.run.directory = f"{tmp_path}/none of its own"
            resume(trainer, Quiet())
            assert trainer.step == 2
            worst += differences(trainer, opened(path))
        for trainer in trainers:
            trainer.close()
        return worst

    assert run_ranks((2, 1, 2), body) == [0] * 4


def read_once(path):
    """A checkpoint that keeps the tensors it is asked for."""
    checkpoint = open_checkpoint(path)
    checkpoint.tensor = cache(checkpoint.tensor)
    return checkpoint


def differences(trainer, checkpoint, but=()):
    """Elements of this rank's shards, `but` of these states, that are not those of the global
    tensors."""
    different = 0
    found = {state: tensors for state, tensors in shards(trainer).items() if state not in but}
    for state, tensors in found.items():
        for unit, shard in zip(trainer.engine.units, tensors, strict=True):
            start, stop = unit.range
            for entry, first, last, at in unit.layout.within(start, stop):
                expected = checkpoint.tensor(state, entry.name).flatten()[first:last]
                different += int((shard[at : at + last - first] != expected).sum())
    return different


@pytest.mark.parametrize("strategy", ["mics", "ddp"])
def test_replicas_have_their_state_from_the_first_one_and_not_from_the_files(
    config_file, tmp_path, strategy, monkeypatch
):
    """Of hundreds of replicas each would read all of the same few files."""
    chosen = (f"partition.strategy={strategy}", "train.steps=3", "train.global_batch=8")
    runs.run(config_file, 8, *chosen)
    path = tmp_path / "run" / "checkpoints" / "step-00000003"

    def body(hierarchy):
        read = []
        fill = Checkpoint.fill
        monkeypatch.setattr(Checkpoint, "fill", lambda *a: read.append(a) or fill(*a))
        config = runs.load(
            config_file, *chosen, "run.seed=1", f"checkpoint.resume={path}",
            f"run.directory={tmp_path}/other", "train.steps=4",
        )  # fmt: skip
        trainer = build_trainer(config, resolve_plan(config, 8), hierarchy)
        resume(trainer, Quiet())
        different = differences(trainer, open_checkpoint(path))
        trainer.close()
        return different, len(read)

    found = run_ranks((2, 2, 2), body)
    assert [different for different, _ in found] == [0] * 8
    readers = 4 if strategy == "mics" else 1
    assert [reads for _, reads in found] == [1] * readers + [0] * (8 - readers)


def test_masters_are_not_overwritten_by_published_weights_where_both_are_one(config_file, tmp_path):
    """On one rank, in fp32, a model computes with the masters; delta wires left copies behind."""
    chosen = ("machine=laptop", "partition.strategy=zero1", "partition.wires=low", "train.steps=4")
    runs.run(config_file, 2, *chosen)
    path = tmp_path / "run" / "checkpoints" / "step-00000004"
    checkpoint = open_checkpoint(path)
    assert any(
        not torch.equal(checkpoint.tensor("weight", name), checkpoint.tensor("published", name))
        for name in checkpoint.shapes
    )

    def body(hierarchy):
        config = runs.load(
            config_file, *chosen, "train.steps=5", f"checkpoint.resume={path}",
            f"run.directory={tmp_path}/alone",
        )  # fmt: skip
        trainer = build_trainer(config, resolve_plan(config, 1), hierarchy)
        resume(trainer, Quiet())
        different = differences(trainer, checkpoint)
        trainer.close()
        return different

    assert run_ranks((1,), body) == [0]


def test_nothing_is_left_of_a_checkpoint_that_proved_damaged_half_way(config_file, tmp_path):
    """One before it may lack states that it had."""
    runs.run(config_file, 8, "train.steps=2")
    path = tmp_path / "run" / "checkpoints" / "step-00000002"

    def body(hierarchy):
        config = runs.load(
            config_file, "partition.wires=low", f"checkpoint.resume={path}",
            f"run.directory={tmp_path}/other",
        )  # fmt: skip
        trainer = build_trainer(config, resolve_plan(config, 8), hierarchy)
        errors = [error for unit in trainer.engine.units for error in unit.feedback.errors.values()]
        for left in errors:
            left.fill_(1.0)
        resume(trainer, Quiet())
        trainer.close()
        return len(errors) > 0, sum(error.abs().sum().item() for error in errors)

    assert run_ranks((2, 2, 2), body) == [(True, 0.0)] * 8


def test_one_rank_writes_and_reads_without_a_process_group(config_file):
    config = runs.load(config_file, "machine=laptop")
    plan = resolve_plan(config, 1)
    hierarchy = Hierarchy.single(plan.levels, torch.device("cpu"))
    trainer = build_trainer(config, plan, hierarchy)
    train_step(trainer)
    path = save_trainer(trainer)
    trainer.close()
    assert path.parent == checkpoint_root(trainer.config)
    again = build_trainer(config, plan, hierarchy)
    partial(resume, again)(Quiet())
    assert differences(again, open_checkpoint(path)) == 0
    again.close()
