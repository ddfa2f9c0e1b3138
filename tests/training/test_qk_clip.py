"""QK-clip scales the heads that it should, and every layout trains as one process does."""

from dataclasses import asdict

import pytest
import torch

from megafrontier.parallel.mesh import Splits
from megafrontier.training.loop import train_step
from tests import runs
from tests.ranks import run_mesh

LIMIT = 4.0
"""Logits near 0 have log-sums up to log(16) = 2.77."""
LATENT = "{query: 12, key_value: 8, rope_size: 4, nope_size: 4, value_size: 6}"
MODELS = {
    "grouped": ("model.kv_heads=2", "model.bias=true", "model.attention.window=9"),
    "latent": (f"model.attention.latent={LATENT}", "model.init_std=0.27"),
}
CHOSEN = (
    f"optimizer.qk_clip={LIMIT}", "optimizer.groups=[{match: 'matrix:blocks.*', name: muon}]",
    "optimizer.eps=1e-3", "model.heads=4", "model.init_std=0.2", "train.micro_batch=4",
    "model.moe={experts: 4, active: 2, ffn_hidden: 16, every: 2}", "model.prediction={}",
    "data.document_mask=true",
)  # fmt: skip


def steps(folder, mesh, *chosen, count=3):
    """The loss, the number of clipped heads and the largest log-sums of some steps."""
    sizes = [f"parallel.{name}={size}" for name, size in asdict(mesh.splits).items() if size > 1]
    config = runs.load(folder / "config.yaml", *CHOSEN, *sizes, *chosen)
    with runs.open_trainer(config, mesh) as trainer:
        found = [train_step(trainer) for _ in range(count)]
        return [
            (one.loss, one.metrics["clipped_heads"], one.metrics["attention_log_sum"])
            for one in found
        ]


@pytest.fixture(scope="module")
def alone(folder):
    """The steps of one process, by model."""

    def body(mesh):
        one = ("machine=laptop", "train.micro_batch=16")
        return {name: steps(folder, mesh, *one, *model) for name, model in MODELS.items()}

    return run_mesh((1,), body)[0]


@pytest.mark.parametrize("model", MODELS)
def test_some_heads_are_clipped_and_others_are_not(alone, model):
    clipped = [clipped for _, clipped, _ in alone[model]]
    assert 0 < clipped[0] < 12
    assert any(clipped[1:])
    assert [*alone[model][0][2]] == ["blocks.0", "blocks.1", "prediction"]


@pytest.mark.parametrize("model", MODELS)
def test_logits_of_a_head_shrink_by_the_limit_over_its_largest_log_sum(folder, model):
    """With the same tokens, without any other update. Logits of other heads stay."""
    chosen = *CHOSEN, *MODELS[model], *runs.ONE, "train.micro_batch=16", "data.document_mask=false"

    def body(mesh):
        config = runs.load(folder / "config.yaml", *chosen, "optimizer.lr=0")
        with runs.open_trainer(config, mesh) as trainer:
            before, after = (_logits_of_a_step(trainer) for _ in range(2))
            masters = [unit.master.clone() for unit in trainer.engine.units]
            flags = torch.ones(()), torch.ones(())
            gradients = [torch.zeros_like(master) for master in masters]
            trainer.optimizer.step(gradients, 1.0, *flags)  # a step that is skipped
            for unit, master in zip(trainer.engine.units, masters, strict=True):
                assert torch.equal(unit.master, master)
        return before, after

    ((before, after),) = run_mesh((1,), body)
    largest = before.logsumexp(-1).amax((0, 2))
    shrink = torch.where(largest > LIMIT, LIMIT / largest, 1.0)
    assert 0 < (shrink < 1).sum() < 4
    expected = before * shrink[:, None, None]
    seen = expected.isfinite()
    torch.testing.assert_close(after[seen], expected[seen], rtol=1e-5, atol=1e-6)
    assert after.amax() < LIMIT


def _logits_of_a_step(trainer):
    """The logits [b, heads, s, s] of the first block in a step."""
    attention, found = trainer.model.blocks[0].attention, []
    project = type(attention)._project

    def noted(*inputs):
        (query, key, value), gate = project(attention, *inputs)
        keys = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, keys) / query.shape[-1] ** 0.5
        distances = torch.arange(16)[:, None] - torch.arange(16)
        is_seen = (distances >= 0) & (distances < (attention.window or 16))
        found.append(scores.detach().masked_fill(~is_seen, -torch.inf))
        return (query, key, value), gate

    attention._project = noted
    train_step(trainer)
    trainer.step = 0  # to the same tokens
    del attention._project
    return found[0]


@pytest.mark.parametrize(
    ("model", "sizes", "splits", "chosen"),
    [
        ("grouped", (2, 2, 1), Splits(tensor=4), ()),
        (
            "grouped",
            (2, 2, 1),
            Splits(context=2, expert=2),
            ("partition.strategy=zero3", "partition.overlap_update=true"),
        ),
        ("latent", (2, 2, 1), Splits(tensor=2, pipeline=2), ("parallel.schedule=zero_bubble",)),
        (
            "latent",
            (2, 2, 1),
            Splits(),
            ("partition.offload.optimizer=cpu", "train.activation_checkpointing=selective"),
        ),
    ],
)
def test_every_layout_trains_as_one_process(folder, alone, model, sizes, splits, chosen):
    def body(mesh):
        return steps(folder, mesh, *MODELS[model], "train.micro_batch=2", *chosen)

    for found in run_mesh(sizes, body, splits=splits):
        for (loss, clipped, largest), expected in zip(found, alone[model], strict=True):
            assert loss == pytest.approx(expected[0], rel=1e-5)
            assert clipped == expected[1]
            assert largest == pytest.approx(expected[2], rel=1e-5)
