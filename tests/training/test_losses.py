"""What must not change the losses does not; what a run writes is what the documentation says."""

import pytest
import torch
from safetensors.torch import load_file

from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.cli import main
from megafrontier.comm.ledger import KINDS
from megafrontier.commands.checkpoints import load_model
from megafrontier.config import load_config
from megafrontier.data.sampling.loader import open_loader
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.optim.schedule import learning_rate
from megafrontier.parallel.param_spec import spec_of
from megafrontier.training.callbacks.log import step_metrics
from megafrontier.training.loop import train_step
from scripts.benchmarks.shared.step_bytes import step_bytes
from tests import runs
from tests.ranks import run_mesh

KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second",
    "tflops_per_device", "mfu", "memory_gib", "comm", "at", "between_seconds", "goodput",
    "clipped",
}  # fmt: skip
ONE_RANK = ("machine=laptop",)


@pytest.fixture(scope="module")
def train(folder):
    """Train in a directory of its own; the metrics."""

    def run(name, ranks, *overrides):
        directory = f"run.directory={folder}/{name}"
        return runs.run(folder / "config.yaml", ranks, directory, *overrides)

    return run


@pytest.fixture(scope="module")
def one(train):
    """A run on one rank."""
    return train("one", 1, *ONE_RANK)


@pytest.fixture(scope="module")
def four(train):
    """The run whose output the tests look at."""
    sinks = ("log.tensorboard=true", "log.wandb=offline", "log.every=2", "checkpoint.every=5")
    chosen = ("evaluate.every=3", "machine.device={peak_tflops: 0.5}", "train.micro_batch=2")
    return train("four", 4, *sinks, *chosen)


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        (1, (*ONE_RANK, "train.micro_batch=16")),
        (4, ("train.loss_chunk_tokens=7", "train.activation_checkpointing=block")),
    ],
)
def test_micro_batches_ranks_and_checkpointing_do_not_change_the_losses(train, one, ranks, chosen):
    found = train("-".join([str(ranks), *chosen]).replace("/", ""), ranks, *chosen)
    assert runs.losses(found) == pytest.approx(runs.losses(one), rel=1e-5)
    assert runs.valid_losses(found) == pytest.approx(runs.valid_losses(one), rel=1e-5)
    assert runs.losses(one)[-1] < runs.losses(one)[0] - 0.1


def test_steps_are_those_of_plain_pytorch(folder, train, capfd):
    """With effective clipping, an epsilon that shows a gradient's scale, weight decay of some
    parameters, and tokens without a loss."""
    chosen = (
        "data.document_mask=true", "train.clip_grad_norm=0.2", "optimizer.eps=0.01",
        "optimizer.weight_decay=0.3", "optimizer.no_decay=[norm]", "train.micro_batch=2",
        "evaluate.batches=0", "optimizer.ema=0.7",
    )  # fmt: skip
    lines = train("plain", 4, *chosen)
    config = runs.load(folder / "config.yaml", *chosen)
    no_decay = config.optimizer.no_decay
    model = GPT(config.model)
    initialise(model, config.run.seed)
    kinds = [(spec_of(name, p).kind in no_decay, p) for name, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for is_free, p in kinds if not is_free], "weight_decay": 0.3},
            {"params": [p for is_free, p in kinds if is_free], "weight_decay": 0.0},
        ],
        betas=tuple(config.optimizer.betas), eps=0.01,
    )  # fmt: skip
    samples, tokens = open_loader(config, "train", 0, 1).samples, 0
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step, line in enumerate(lines):
        batch = samples.batch(16 * step, 16)
        count = int((batch.targets >= 0).sum())
        loss = model(batch.tokens, batch.targets, batch.documents) / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        assert norm > 0.2
        lr = learning_rate(step, 8, config.optimizer, config.schedule)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            average[name] = 0.7 * average[name] + 0.3 * parameter.detach()
        tokens += count
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert (line["lr"], line["tokens"]) == (lr, tokens)
    assert tokens < len(lines) * batch.targets.numel()
    saved = open_checkpoint(folder / "plain" / "checkpoints" / "step-00000008")
    for name, expected in average.items():
        torch.testing.assert_close(saved.tensor("ema", name), expected, rtol=1e-4, atol=1e-6)
    valid = open_loader(config, "valid", 0, 1).samples.batch(0, 16)
    model.load_state_dict(average)
    with torch.no_grad():
        loss = model(valid.tokens, valid.targets, valid.documents) / (valid.targets >= 0).sum()
    loaded = load_model(saved.path, config, torch.device("cpu"), "ema")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-6)
    words = [str(folder / "plain"), "--weights", "ema"]
    sampling = ["--temperature", "0", "--max-new-tokens", "2"]
    assert main(["generate", *words, "--prompt", "a", *sampling]) == 0
    assert main(["evaluate", *words, "evaluate.batches=1"]) == 0
    assert float(capfd.readouterr().out.split("loss ")[-1].split()[0]) == pytest.approx(
        loss.item(), abs=1e-4
    )
    assert main(["export", *words, "--out", str(folder / "exported")]) == 0
    exported = load_file(folder / "exported" / "model.safetensors")["lm_head.weight"]
    torch.testing.assert_close(exported, average["head.output.weight"][:257], rtol=1e-4, atol=1e-6)


def test_evaluation_does_not_disturb_training_and_has_no_dropout(train):
    """At a learning rate that changes nothing, all evaluations are the same."""
    chosen = ("train.micro_batch=2", "model.dropout=0.1", "evaluate.every=3", "evaluate.batches=2")
    evaluated = train("evaluated", 4, *chosen)
    without = train("without", 4, *chosen, "evaluate.batches=0")
    assert runs.losses(evaluated) == runs.losses(without)
    assert runs.valid_losses(without) == []
    still = runs.valid_losses(train("unmoved", 4, *chosen, "optimizer.lr=1e-30"))
    assert len(still) == 3
    assert len({*still}) == 1


def test_the_loss_of_later_tokens_is_reported_beside_the_loss(train):
    chosen = ("model.position=rotary", "model.prediction={}", "train.steps=2")
    steps = [line for line in train("prediction", 1, *ONE_RANK, *chosen) if "loss" in line]
    assert [line["prediction_loss"] for line in steps] == pytest.approx(
        [line["loss"] for line in steps], abs=0.1
    )
    assert all(line["prediction_loss"] != line["loss"] for line in steps)


def test_skipped_batches_are_left_out_and_later_steps_move_up(train):
    """At a rate of 0 a step's loss depends on its batch alone."""
    still = ("optimizer.lr=0", "evaluate.batches=0", "train.micro_batch=4")
    every = runs.losses(train("still", 4, *still))
    skipping = runs.losses(train("skipping", 4, *still, "data.skip=[[1,3],[5,6]]", "train.steps=5"))
    assert skipping == [every[i] for i in (0, 3, 4, 6, 7)]
    assert len(set(every)) == len(every)


def test_a_metrics_line_has_the_documented_keys_and_no_others(four):
    steps = [line for line in four if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    for line in steps:
        assert set(line) == KEYS
        assert list(line["comm"]) == ["pair", "node", "world"]
        for level in line["comm"].values():
            kinds = {kind: level[kind] for kind in KINDS if kind in level}
            assert set(level) == {"bytes", "seconds", *kinds}
            for part in ("bytes", "seconds"):
                assert sum(of[part] for of in kinds.values()) == pytest.approx(level[part])
            assert all(0 <= of["hidden"] <= of["seconds"] * (1 + 1e-9) for of in kinds.values())
        assert {"weights", "gradients"} < {*line["comm"]["pair"]}
        assert line["tokens"] == line["step"] * 16 * 16
        assert line["lr"] > 0
        assert line["memory_gib"] > 0
        speed = line["tokens_per_second"]
        assert speed == pytest.approx(16 * 16 / line["step_seconds"])
        assert line["mfu"] == pytest.approx(line["tflops_per_device"] / 0.5)


def test_evaluations_come_when_due_and_at_the_end_and_are_no_steps_traffic(four):
    steps = [line for line in four if "loss" in line]
    sent = [[level["bytes"] for level in line["comm"].values()] for line in steps]
    assert sent[1:] == [sent[1]] * 7
    evaluations = [line for line in four if "valid_loss" in line]
    assert [line["step"] for line in evaluations] == [3, 6, 8]
    assert all(set(line) == {"step", "valid_loss", "tokens"} for line in evaluations)


def test_a_run_leaves_its_log_its_resolved_config_and_what_wandb_and_tensorboard_read(four, folder):
    directory = folder / "four"
    log = runs.log(directory).splitlines()
    steps = [line.split()[1] for line in log if line.startswith("step") and " loss" in line]
    assert [s for s in steps if s != "3/8"] == ["2/8", "4/8", "6/8", "6/8", "8/8", "8/8"]
    for step in (5, 8):
        assert f"checkpoint {directory}/checkpoints/step-0000000{step}" in log
    assert "communicators: 4 a rank (2 control, 2 tensor+context+data)" in log
    saved = load_config(directory / "config.yaml")
    assert saved.model == load_config(folder / "config.yaml").model
    assert (saved.train.micro_batch, saved.log.tensorboard) == (2, True)
    assert list((directory / "tensorboard").glob("events.*"))
    assert list((directory / "wandb").glob("offline-run-*/*.wandb"))


def test_bytes_in_the_metrics_are_those_of_the_formulas(folder):
    config = runs.load(folder / "config.yaml", "train.precision=bf16")

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            train_step(trainer)  # publishes weights in the next step
            line = step_metrics(trainer, train_step(trainer))
            formula = step_bytes(trainer.engine, trainer.loader.micro_batches)
        return [level["bytes"] for level in line["comm"].values()], formula

    for counted, formula in run_mesh((2, 2, 1), body):
        assert counted == formula
        assert counted[0] > 0
        assert counted[2] == 0
