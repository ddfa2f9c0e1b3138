"""A step that is not finite, a spike or without a target changes no weight, on all ranks alike."""

import math

import pytest
import torch

from megafrontier.training.callbacks.evaluate import evaluate
from megafrontier.training.loop import train_step
from tests import runs
from tests.data.corpora import write_corpus
from tests.ranks import run_mesh

STEPS = ("train.steps=10", "evaluate.batches=0")
PIPELINE = ("parallel.pipeline=2", "parallel.schedule=zero_bubble")
SPIKES = ("train.steps=12", "evaluate.batches=0", "machine=laptop", "train.spike_window=4")


def skipped_lines(lines):
    return [line for line in lines if line.get("skipped")]


@pytest.mark.parametrize("chosen", ["partition.wires=low", "parallel.pipeline=2"])
def test_one_ranks_nan_is_skipped_by_all_ranks_and_logged_with_its_samples(
    config_file, tmp_path, multiply_loss, chosen
):
    multiply_loss(math.nan, 32, 62, 100, 120)
    lines = runs.run(config_file, 4, *STEPS, "train.nonfinite_limit=3", chosen)
    skipped = {line["step"]: line["samples"] for line in skipped_lines(lines)}
    assert skipped == {3: [32, 48], 4: [48, 64], 7: [96, 112], 8: [112, 128]}
    for line in lines:
        assert (line["loss"] is None) == (line["step"] in skipped)
    kept = [line["loss"] for line in lines if line["loss"] is not None]
    assert kept[-1] < kept[0]
    assert runs.log(tmp_path / "run").count("skipped: loss or gradient not finite") == 4


def test_a_skipped_step_changes_nothing_and_the_next_one_goes_on(config_file):
    config = runs.load(config_file, *STEPS)

    def state(trainer):
        moments = trainer.optimizer.states.values()
        masters = [unit.master for unit in trainer.engine.units]
        tensors = [*masters, *(t for shards in moments for t in shards)]
        # The loss shows the computing weights, which the engine refreshes when it likes.
        loss = evaluate(trainer.runner, trainer.valid_loader, trainer.mesh, 1).loss
        return [tensor.clone() for tensor in tensors], (trainer.optimizer.steps, loss)

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            train_step(trainer)
            before, expected = state(trainer)
            forward = trainer.model.head.forward
            if mesh.rank == 2:
                trainer.model.head.forward = lambda *a: forward(*a) * torch.inf
            skipped = train_step(trainer)
            trainer.model.head.forward = forward
            after, found = state(trainer)
            result = train_step(trainer)
            same = all(map(torch.equal, before, after)) and found == expected
            return same, skipped.skipped, result.skipped, trainer.step, trainer.tokens, result.loss

    found = run_mesh((2, 2, 1), body)
    assert [rank[:5] for rank in found] == [(True, True, False, 3, 3 * 256)] * 4
    assert len({rank[5] for rank in found}) == 1


def test_a_skipped_step_leaves_no_errors_for_the_next(config_file):
    """A spike's rounding error, fed back, would be larger than the next gradient. With zero1 there
    are errors of two levels."""
    # So wide that no rank sends only padding, which has no error.
    chosen = ("partition.strategy=zero1", "partition.wires=low", "model.ffn_hidden=48")
    config = runs.load(config_file, *chosen, "evaluate.batches=0")

    def body(mesh):
        sizes = []
        with runs.open_trainer(config, mesh) as trainer:
            detect = trainer.spikes.detect
            for is_spike in (0.0, 1.0):
                trainer.spikes.detect = lambda *found, spike=is_spike: detect(*found) + spike
                assert train_step(trainer).skipped == bool(is_spike)
                errors = (
                    error
                    for unit in trainer.engine.units
                    for error in unit.feedback.errors.values()
                )
                sizes.append(sum(float(error.abs().sum()) for error in errors))
        return sizes

    for after_a_step, after_a_skipped_one in run_mesh((2, 2, 2), body):
        assert after_a_step > 0
        assert after_a_skipped_one == 0


@pytest.mark.parametrize("chosen", [(), PIPELINE])
def test_a_spike_is_skipped_and_logged_with_its_samples(
    config_file, tmp_path, multiply_loss, chosen
):
    multiply_loss(100, 6 * 16 + 8)  # in the seventh step, on one rank
    lines = runs.run(config_file, 2, *SPIKES, *chosen, "train.spike_loss=2")
    (skipped,) = skipped_lines(lines)
    assert (skipped["step"], skipped["samples"], skipped["spike"]) == (7, [96, 112], True)
    assert skipped["loss"] > 5 * lines[5]["loss"]
    log = runs.log(tmp_path / "run")
    assert "skipped: spike in loss or gradient" in log
    assert "step 7 changed no weight; it read samples 96 to 111, which data.skip=[[6,7]] " in log


def test_the_spike_rule_goes_on_after_a_restart(config_file, tmp_path, multiply_loss):
    multiply_loss(100, 8 * 16 + 2)
    chosen = (*SPIKES, "train.spike_grad_norm=3")
    unbroken = runs.run(config_file, 2, *chosen, f"run.directory={tmp_path}/unbroken")
    assert [line["step"] for line in skipped_lines(unbroken)] == [9]
    runs.run(config_file, 2, *chosen, "train.stop_at=7")
    resumed = runs.run(config_file, 2, *chosen)
    assert runs.losses(resumed) == runs.losses(unbroken)
    assert [line["step"] for line in skipped_lines(resumed)] == [9]


MASK = ("machine=laptop", "data.document_mask=true", "log.every=1")


def test_a_step_without_a_target_is_skipped_and_counted(config_file, tmp_path):
    """Eight windows of documents of one token, and eight of one long document."""
    documents = [[[i % 61]] for i in range(128)] + [[[i % 61 for i in range(129)]]]
    path = write_corpus(tmp_path / "half", documents)
    chosen = (
        "train.global_batch=1", "train.micro_batch=1", "train.steps=16", "data.split=[1,0]",
        "evaluate.batches=0",
    )  # fmt: skip
    limit = "train.nonfinite_limit=1"  # these steps do not count
    lines = runs.run(config_file, 1, *MASK, *chosen, limit, f"data.train=[{{path: {path}}}]")
    skipped = skipped_lines(lines)
    assert len(lines) == 16
    assert [line["loss"] for line in skipped] == [None] * 8
    assert all(line["loss"] > 0 for line in lines if line not in skipped)
    assert lines[-1]["tokens"] == 8 * 16
    log = runs.log(tmp_path / "run")
    assert log.count("skipped: no token has a target") == 8
    assert "loss 0.000" not in log
