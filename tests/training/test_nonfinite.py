"""A step that is not finite changes no weight, on all ranks alike, and is told of."""

import os
import signal

import pytest
import torch

from megafrontier.common.errors import STOPPED
from megafrontier.common.signals import stops_remembered
from megafrontier.launch.main import train
from megafrontier.model.gpt import GPT
from megafrontier.training import loop
from megafrontier.training.callbacks.evaluate import evaluate
from megafrontier.training.loop import train_step
from megafrontier.training.plan import resolve_plan
from megafrontier.training.trainer import build_trainer
from tests import runs
from tests.ranks import run_ranks

STEPS = ("train.steps=10", "evaluate.batches=0", "train.nonfinite_limit=3")


@pytest.fixture
def poison(monkeypatch):
    """Make the loss of the micro-batches that begin with these samples not a number; only one
    rank has each."""
    forward = GPT.forward
    current = []

    def choose(*samples):
        def note(_seed, batch):
            current[:] = [batch.first_sample]

        def poisoned(self, *arguments):
            loss = forward(self, *arguments)
            return loss * torch.nan if current[0] in samples else loss

        monkeypatch.setattr(loop, "seed_dropout", note)
        monkeypatch.setattr(GPT, "forward", poisoned)

    return choose


@pytest.mark.parametrize("wires", ["exact", "low"])
def test_one_ranks_nan_is_skipped_by_all_counted_and_logged_with_its_samples(
    config_file, tmp_path, poison, wires
):
    poison(32, 63, 100, 120)
    lines = runs.run(config_file, 4, *STEPS, f"partition.wires={wires}")
    skipped = {line["step"]: line["samples"] for line in lines if line.get("skipped")}
    assert skipped == {3: [32, 48], 4: [48, 64], 7: [96, 112], 8: [112, 128]}
    for line in lines:
        assert (line["loss"] is None) == (line["step"] in skipped)
    kept = [line["loss"] for line in lines if line["loss"] is not None]
    assert kept[-1] < kept[0]
    log = runs.log(tmp_path / "run")
    assert log.count("skipped: loss or gradient not finite") == 4


def test_the_number_to_skip_is_told_with_where_it_holds(config_file, tmp_path, poison):
    """A checkpoint from before the global batch changed would lead to other numbers."""
    poison(20, 56)
    runs.run(config_file, 4, *STEPS, "train.stop_at=3")
    runs.run(config_file, 4, *STEPS, "train.global_batch=8", "train.stop_at=6")
    said = [line for line in runs.log(tmp_path / "run").splitlines() if "data.skip" in line]
    assert [line.partition("which ")[2] for line in said] == [
        "data.skip=[[1,2]] leaves out",
        "data.skip=[[4,5]] leaves out, from checkpoints of step 3 on",
    ]


def test_steps_that_look_for_a_loss_scale_do_not_stop_the_run(config_file):
    """From 2^32 it falls in more steps than may be non-finite in a row."""
    chosen = ("train.precision=fp16", f"train.loss_scale={2.0**32}", "train.steps=40")
    lines = runs.run(config_file, 1, *STEPS, "machine=laptop", *chosen)
    skipped = [line["step"] for line in lines if line.get("skipped")]
    assert skipped == list(range(1, len(skipped) + 1))
    assert 10 < len(skipped) < 40


def test_a_finite_loss_is_told_though_its_gradient_is_not(config_file):
    """As in every step of fp16 that only lowers the loss scale."""
    chosen = ("train.precision=fp16", f"train.loss_scale={2.0**24}", "train.steps=6")
    lines = runs.run(config_file, 1, *STEPS, "machine=laptop", *chosen)
    skipped = [line for line in lines if line.get("skipped")]
    assert skipped
    assert all(0 < line["loss"] < 10 for line in skipped)
    log = (config_file.parent / "run" / "log.txt").read_text()
    assert log.count("gradient too large for fp16, loss scale lowered to") == len(skipped)
    assert "data.skip" not in log  # the samples are not to blame


@pytest.mark.parametrize("strategy", ["topo", "zero1"])
def test_a_skipped_step_leaves_nothing_unsaid_for_the_next(config_file, strategy):
    """A spike's rounding error, fed back, would be larger than the next gradient. With zero1 there
    are errors of two levels."""

    def body(hierarchy):
        # So wide that no rank sends padding alone, of which nothing is left unsaid.
        wide = "model.ffn_hidden=48"
        chosen = (f"partition.strategy={strategy}", "partition.wires=low")
        config = runs.load(config_file, wide, *chosen, "evaluate.batches=0")
        trainer = build_trainer(config, resolve_plan(config, hierarchy.size), hierarchy)
        judged, sizes = trainer.spikes.detect, []
        for is_spike in (0.0, 1.0):
            trainer.spikes.detect = lambda *found, spike=is_spike: judged(*found) + spike
            assert train_step(trainer).skipped == bool(is_spike)
            errors = (
                error for unit in trainer.engine.units for error in unit.feedback.errors.values()
            )
            sizes.append(sum(float(error.abs().sum()) for error in errors))
        trainer.close()
        return sizes

    for after_a_step, after_a_skipped_one in run_ranks((2, 2, 2), body):
        assert after_a_step > 0
        assert after_a_skipped_one == 0


def test_so_many_in_a_row_stop_the_run_with_code_3_and_one_line(config_file, poison, capfd):
    poison(64, 80, 96)
    assert train(runs.load(config_file, *STEPS), 4) == 3
    error = capfd.readouterr().err
    assert error == (
        "megafrontier: step 7: the last 3 steps had a non-finite loss or gradient "
        "(train.nonfinite_limit), the newest with samples 96 to 111\n"
    )
    assert runs.metrics(config_file.parent / "run")[-1]["step"] == 7


def test_checkpoints_of_sound_weights_are_not_pushed_out_by_what_a_broken_run_saves(
    config_file, tmp_path, poison
):
    """By the time a run ends for its losses, all that it keeps would be of these."""
    poison(48, 64, 80)  # steps 4 to 6
    keep = ("checkpoint.every=2", "checkpoint.keep=2", "train.nonfinite_limit=4")
    runs.run(config_file, 4, *STEPS[:2], *keep, "train.steps=8", "train.stop_at=6")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    # The last one may be sound, and is what the run would lose; nothing went for it.
    assert kept == ["step-00000002", "step-00000006"]
    log = runs.log(tmp_path / "run")
    assert log.count("no checkpoint at step 4, whose loss is not finite: after the next") == 1


def test_a_request_to_stop_among_broken_steps_leaves_the_sound_checkpoint(
    config_file, tmp_path, poison, monkeypatch
):
    """Also where none was due among them yet."""
    poison(*range(48, 128, 16))  # steps 4 and later
    start_step = loop.start_step

    def stopped(trainer, *others):
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return start_step(trainer, *others)

    monkeypatch.setattr(loop, "start_step", stopped)
    keep = ("checkpoint.every=3", "checkpoint.keep=1", "train.nonfinite_limit=4")
    with stops_remembered():
        assert train(runs.load(config_file, *STEPS[:2], *keep, "machine=laptop"), 1) == STOPPED
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000005"]


def test_a_checkpoint_that_was_due_is_made_up_for_at_the_next_finite_loss(
    config_file, tmp_path, poison
):
    poison(48, 64)  # steps 4 and 5
    runs.run(config_file, 4, *STEPS[:2], "checkpoint.every=4", "checkpoint.keep=0", "train.steps=7")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000007"]


def test_a_skipped_step_changes_nothing_and_the_next_is_as_if_it_had_not_been(config_file):
    config = runs.load(config_file, *STEPS)

    def state(trainer):
        moments = trainer.optimizer.moments.values()
        masters = [unit.master for unit in trainer.engine.units]
        tensors = [*masters, *(t for shards in moments for t in shards)]
        # What the computing weights are shows in a loss; when they are refreshed is the engine's.
        loss = evaluate(trainer.model, trainer.valid_loader, trainer.hierarchy, 1).loss
        return [tensor.clone() for tensor in tensors], (trainer.optimizer.steps, loss)

    def body(hierarchy):
        trainer = build_trainer(config, resolve_plan(config, 4), hierarchy)
        train_step(trainer)
        before, expected = state(trainer)
        forward = trainer.model.head.forward
        if hierarchy.rank == 2:
            trainer.model.head.forward = lambda *a: forward(*a) * torch.inf
        skipped = train_step(trainer)
        trainer.model.head.forward = forward
        after, found = state(trainer)
        result = train_step(trainer)
        trainer.close()
        same = all(map(torch.equal, before, after)) and found == expected
        return same, skipped.skipped, result.skipped, trainer.step, trainer.tokens, result.loss

    found = run_ranks((2, 2, 1), body)
    assert [rank[:5] for rank in found] == [(True, True, False, 3, 3 * 256)] * 4
    assert len({rank[5] for rank in found}) == 1


def test_fp16_finds_its_scale_by_skipping_alike_on_all_ranks_and_then_learns(config_file):
    config = runs.load(
        config_file, "train.precision=fp16", f"train.loss_scale={2.0**32}", "train.steps=100",
        "train.micro_batch=4",
    )  # fmt: skip

    def body(hierarchy):
        trainer = build_trainer(config, resolve_plan(config, 4), hierarchy)
        results, scales, unchanged = [], [], []
        for _ in range(45):
            before = [unit.master.clone() for unit in trainer.engine.units]
            results.append(train_step(trainer))
            scales.append(trainer.loss_scale.scale.item())
            now = [unit.master for unit in trainer.engine.units]
            unchanged.append(all(map(torch.equal, before, now)))
        trainer.close()
        return [r.skipped for r in results], scales, unchanged, [r.loss for r in results]

    found = run_ranks((2, 2, 1), body)
    skipped, scales, unchanged, losses = found[0]
    assert all(rank[:3] == found[0][:3] for rank in found)
    count = skipped.index(False)
    assert 5 < count < 35
    assert unchanged == skipped
    for step, scale in enumerate(scales[:count], start=1):
        assert scale == 2.0 ** (32 - step)
    assert losses[-1] < losses[0] - 0.2


def test_fp16_trains_from_the_default_scale_and_tells_it(config_file):
    chosen = ("train.precision=fp16", "train.steps=12", "evaluate.batches=0")
    lines = runs.run(config_file, 4, *chosen)
    found = [line["loss"] for line in lines if line["loss"] is not None]
    assert found[-1] < found[0] - 0.1
    assert all(line["loss_scale"] >= 1 for line in lines)
