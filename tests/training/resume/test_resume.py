"""A resumed run continues like the unbroken one: bit by bit on the same layout, else closely."""

import shutil
from functools import cache

import pytest
import torch

from megafrontier.checkpoint.load import Checkpoint, open_checkpoint
from megafrontier.parallel.mesh import Mesh
from megafrontier.partition import STRATEGIES
from megafrontier.plan import assemble
from megafrontier.plan.resolve import resolve_plan
from megafrontier.training.callbacks.save import shards, start_saving
from megafrontier.training.loop import train_step
from megafrontier.training.resume.resume import resume
from megafrontier.training.trainer import build_trainer
from tests import runs
from tests.ranks import run_mesh

FOUR = ("machine.levels.node.size=1", "train.global_batch=8", "train.micro_batch=1")
"""Of four ranks, two nodes of a pair: a state can be sharded over none, two or all of them."""
SIZES = (2, 1, 2)


class Quiet:
    """A run logger that tolerates no damaged checkpoint."""

    def info(self, line):
        assert "refused" not in line


def build(config_file, mesh, *chosen):
    config = runs.load(config_file, *FOUR, *chosen)
    return build_trainer(config, resolve_plan(config, mesh.levels.ranks), mesh)


def differences(trainer, checkpoint, but=()):
    """The number of elements of this rank's shards, `but` those of some states, that are not those
    of the checkpoint's tensors."""
    different = 0
    found = {state: tensors for state, tensors in shards(trainer).items() if state not in but}
    for state, tensors in found.items():
        for unit, shard in zip(trainer.engine.units, tensors, strict=True):
            start, stop = unit.range
            for entry, first, last, at in unit.layout.within(start, stop):
                expected = checkpoint.tensor(state, entry.name).flatten()[first:last]
                different += int((shard[at : at + last - first] != expected).sum())
    return different


def broken_off(run, at, last):
    """The directory of a run that ended a few steps after its checkpoint at step `at`."""
    folder = run.with_name("broken-off")
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{last:08d}")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{at:08d}"]
    return f"run.directory={folder}"


@pytest.mark.parametrize(
    ("strategy", "wires", "grows"), [("topo", "exact", False), ("hpz", "zero++", True)]
)
def test_resume_on_the_same_layout_is_identical_to_the_last_bit(
    config_file, tmp_path, strategy, wires, grows
):
    """Also with wires that round the weights of every step and keep nothing of it, and while batch
    and blend change."""
    corpus = f"path: {tmp_path}/corpus"
    growing = (
        f"data.train=[{{{corpus}, weight: [[0, 1], [3, 0]]}}, {{{corpus}, weight: [[0, 1]]}}]",
        "train.batch_warmup={start: 4, step_by: 4, until: 3}", "schedule.by=tokens",
        "optimizer.ema=0.9",
    )  # fmt: skip
    chosen = (
        *FOUR, *(growing if grows else ()), f"partition.strategy={strategy}",
        f"partition.wires={wires}", "model.dropout=0.1", "train.steps=4", "checkpoint.every=2",
    )  # fmt: skip
    unbroken = runs.run(config_file, 4, *chosen)
    resumed = runs.run(config_file, 4, *chosen, broken_off(tmp_path / "run", at=2, last=4))
    for key in ("step", "loss", "grad_norm", "valid_loss"):
        assert [line.get(key) for line in resumed] == [line.get(key) for line in unbroken]
    assert [line["step"] for line in resumed if "loss" in line] == [1, 2, 3, 4]
    assert "at step 2" in runs.log(tmp_path / "broken-off")
    if grows:
        tokens = [line["tokens"] for line in unbroken if "loss" in line]
        ends = [
            open_checkpoint(tmp_path / run / "checkpoints" / "step-00000004").tensors(
                "ema", ["blocks.1.mlp.down.weight"]
            )
            for run in ("run", "broken-off")
        ]
        torch.testing.assert_close(*ends, rtol=0, atol=0)
        assert tokens == [16 * sequences for sequences in (4, 8, 12, 20)]


@pytest.mark.parametrize("is_new", [True, False])
def test_initial_values_are_drawn_only_for_a_run_that_begins(
    config_file, tmp_path, monkeypatch, is_new
):
    if not is_new:
        runs.run(config_file, None, *runs.ONE, "train.steps=2", "train.stop_at=1")
    drawn = []
    draw = assemble.initial_slice
    monkeypatch.setattr(
        assemble, "initial_slice", lambda *slice_: drawn.append(slice_) or draw(*slice_)
    )
    runs.run(config_file, None, *runs.ONE, "train.steps=2")
    assert bool(drawn) == is_new


def test_a_run_without_a_copy_of_the_weights_resumes_and_is_identical_to_one_with_it(
    config_file, tmp_path
):
    chosen = ("machine=laptop", "train.precision=bf16", "train.steps=3")
    expected = runs.run(config_file, None, *chosen, f"run.directory={tmp_path}/copy")
    leaner = (*chosen, "partition.weights_copy=false")
    runs.run(config_file, None, *leaner, "train.stop_at=2")
    found = runs.run(config_file, None, *leaner)
    assert runs.losses(found) == runs.losses(expected)
    assert runs.valid_losses(found)[-1:] == runs.valid_losses(expected)[-1:] != []
    assert "weights world (cast from the masters)" in runs.log(tmp_path / "run")


def test_resume_with_low_bit_wires_and_error_feedback_is_identical_too(config_file, tmp_path):
    """Published weights and errors are state. A save folds the errors in either run."""
    chosen = (*FOUR, "partition.wires=low", "train.steps=4", "checkpoint.every=2")
    unbroken = runs.run(config_file, 4, *chosen)
    resumed = runs.run(config_file, 4, *chosen, broken_off(tmp_path / "run", at=2, last=4))
    assert runs.losses(resumed) == runs.losses(unbroken)
    last = tmp_path / "broken-off" / "checkpoints" / "step-00000004"
    states = set(open_checkpoint(last).manifest.states)
    assert states == {"weight", "exp_avg", "exp_avg_sq", "published", "error"}
    elsewhere = runs.run(
        config_file, 2, *FOUR, "partition.strategy=zero3", "train.steps=5",
        f"checkpoint.resume={last}", f"run.directory={tmp_path}/elsewhere",
    )  # fmt: skip
    assert runs.losses(elsewhere)[-1] < runs.losses(unbroken)[0]


def test_errors_and_published_weights_reshard_like_every_other_state(config_file, tmp_path):
    """Bit by bit. Among replicas, only the first has the errors."""
    # Low-bit wires begin at the node level, so that has two ranks here.
    levels = ("machine.levels.pair.size=1", "machine.levels.node.size=2")
    low = (*levels, "partition.wires=low", "model.ffn_hidden=48", "train.steps=4")
    runs.run(config_file, 4, *FOUR, *low, "train.stop_at=3")
    saved = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003")

    def load(mesh, strategy):
        trainer = build(
            config_file, mesh, *low, f"partition.strategy={strategy}",
            "partition.error_feedback=true", f"checkpoint.resume={saved.path}",
            f"run.directory={tmp_path}/other",
        )  # fmt: skip
        resume(trainer, Quiet())
        errors = sum(unit.feedback.error.abs().sum().item() for unit in trainer.engine.units)
        is_first = trainer.engine.hierarchy.is_first_replica(trainer.engine.placement.optimizer)
        different = differences(trainer, saved, () if is_first else ("error",))
        trainer.close()
        return different, set(shards(trainer)), errors, is_first

    strategies = ("zero1", "mics", "zero3")
    ranks = run_mesh((1, 2, 2), lambda mesh: [load(mesh, strategy) for strategy in strategies])
    for strategy, found in zip(strategies, zip(*ranks, strict=True), strict=True):
        assert [different for different, *_ in found] == [0] * 4, strategy
        assert all("error" in states for _, states, *_ in found)
        assert ("published" in found[0][1]) == (strategy not in ("mics", "zero3"))
        assert sum(errors for *_, errors, is_first in found if is_first) > 0
        assert sum(errors for *_, errors, is_first in found if not is_first) == 0


def test_errors_are_scaled_with_the_loss(config_file, tmp_path):
    """They are in units of the loss scale, which fp16 has and the precision after it has not."""
    chosen = ("partition.wires=low", "optimizer.lr=0")

    def body(mesh):
        first = build(config_file, mesh, *chosen, "train.precision=fp16", "train.loss_scale=8")
        train_step(first)
        resumed = f"checkpoint.resume={start_saving(first).finish()}"
        second = build(config_file, mesh, *chosen, "train.precision=bf16", resumed)
        resume(second, Quiet())
        pairs = zip(first.engine.units, second.engine.units, strict=True)
        found = [(a.feedback.error.abs().sum(), b.feedback.error.abs().sum()) for a, b in pairs]
        first.close()
        second.close()
        return [(before.item(), after.item()) for before, after in found]

    found = run_mesh(SIZES, body)
    assert all(after == before / 8 for rank in found for before, after in rank)
    assert any(before for rank in found for before, _ in rank)


def test_a_run_handed_over_strategies_and_rank_counts_keeps_the_losses(config_file, tmp_path):
    short = (*FOUR, "train.steps=4", "evaluate.batches=0")
    alone = runs.run(
        config_file, 1, "machine=laptop", *short[1:], f"run.directory={tmp_path}/alone"
    )
    relay = [(4, "topo"), (2, "zero3"), (1, "ddp"), (4, "hpz")]
    for step, (ranks, strategy) in enumerate(relay, start=1):
        machine = ["machine=laptop", *short[1:]] if ranks == 1 else short
        handed = runs.run(
            config_file, ranks, *machine, f"train.stop_at={step}", f"partition.strategy={strategy}"
        )
    assert runs.losses(handed) == pytest.approx(runs.losses(alone), rel=1e-5)
    assert len(runs.losses(handed)) == 4


# Of each two strategies one loads the other's: these are a difference set modulo 7.
LOADED = [(i, (i + step) % 7) for step in (0, 1, 2, 4) for i in range(7)]


def test_every_strategy_loads_every_other_strategys_checkpoint(config_file, tmp_path):
    """State by state and bit by bit, after two steps, so that moments are not zero. Each strategy
    has its own seed, so that what an earlier load left behind would be seen."""
    assert len(STRATEGIES) == 7

    def body(mesh):
        opened = cache(read_once)
        trainers = [
            build(
                config_file, mesh, f"partition.strategy={strategy}", f"run.seed={seed}",
                f"run.directory={tmp_path}/{strategy}", "train.global_batch=4",
                "optimizer.ema=0.9",
            )
            for seed, strategy in enumerate(STRATEGIES)
        ]  # fmt: skip
        for trainer in trainers:
            for _ in range(2):
                train_step(trainer)
            start_saving(trainer).finish()
        different, names = 0, [*STRATEGIES]
        for by, of in LOADED:
            trainer = trainers[by]
            path = tmp_path / names[of] / "checkpoints" / "step-00000002"
            trainer.step = 0
            trainer.config.checkpoint.resume = str(path)
            trainer.config.run.directory = f"{tmp_path}/none of its own"
            resume(trainer, Quiet())
            assert trainer.step == 2
            different += differences(trainer, opened(path))
        for trainer in trainers:
            trainer.close()
        return different

    assert run_mesh(SIZES, body) == [0] * 4


def read_once(path):
    """A checkpoint that keeps the tensors it has read."""
    checkpoint = open_checkpoint(path)
    checkpoint.tensor = cache(checkpoint.tensor)
    return checkpoint


def test_replicas_get_their_state_from_the_first_one_and_not_from_the_files(
    config_file, tmp_path, monkeypatch
):
    """Hundreds of replicas would read the same few files."""
    chosen = ("partition.strategy=mics", "train.steps=3")
    runs.run(config_file, 4, *FOUR, *chosen, "train.stop_at=2")
    path = tmp_path / "run" / "checkpoints" / "step-00000002"

    def body(mesh):
        calls = []
        read = Checkpoint.read
        monkeypatch.setattr(
            Checkpoint, "read", lambda self, asked: calls.extend(asked[:1]) or read(self, asked)
        )
        trainer = build(
            config_file, mesh, *chosen, "run.seed=1", f"checkpoint.resume={path}",
            f"run.directory={tmp_path}/other",
        )  # fmt: skip
        resume(trainer, Quiet())
        count = len(calls)
        different = differences(trainer, open_checkpoint(path))
        trainer.close()
        return different, count

    found = run_mesh(SIZES, body)
    assert [different for different, _ in found] == [0] * 4
    assert sorted(calls for _, calls in found) == [0, 0, 1, 1]


def test_masters_are_not_overwritten_by_published_weights_that_are_the_masters(
    config_file, tmp_path
):
    """On one rank, in fp32, a model computes with the masters; delta wires left copies behind."""
    chosen = ("machine=laptop", "partition.strategy=zero1", "partition.wires=low", "train.steps=5")
    runs.run(config_file, 2, *chosen, "train.stop_at=4")
    checkpoint = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000004")
    assert any(
        not torch.equal(checkpoint.tensor("weight", name), checkpoint.tensor("published", name))
        for name in checkpoint.shapes
    )
    resumed = f"checkpoint.resume={checkpoint.path}"
    config = runs.load(config_file, *chosen, resumed, f"run.directory={tmp_path}/alone")
    trainer = build_alone(config)
    resume(trainer, Quiet())
    assert differences(trainer, checkpoint) == 0
    trainer.close()


def build_alone(config):
    plan = resolve_plan(config, 1)
    return build_trainer(config, plan, Mesh.single(plan.levels, torch.device("cpu")))


def test_nothing_is_left_of_a_checkpoint_that_turned_out_to_be_damaged(config_file, tmp_path):
    """The checkpoint before it may lack states that it had."""
    runs.run(config_file, 4, *FOUR, "train.steps=2")
    path = tmp_path / "run" / "checkpoints" / "step-00000002"

    def body(mesh):
        resumed = (f"checkpoint.resume={path}", f"run.directory={tmp_path}/other")
        trainer = build(config_file, mesh, "partition.wires=low", *resumed)
        errors = [error for unit in trainer.engine.units for error in unit.feedback.errors.values()]
        for error in errors:
            error.fill_(1.0)
        resume(trainer, Quiet())
        trainer.close()
        return len(errors) > 0, sum(error.abs().sum().item() for error in errors)

    assert run_mesh(SIZES, body) == [(True, 0.0)] * 4
