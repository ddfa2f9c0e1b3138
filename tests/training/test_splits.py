"""A run whose work is divided over ranks has the losses of one rank, and its checkpoints load on
any other division."""

import math

import pytest
import torch

from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.common.checkpoints import newest
from tests import runs

CHOSEN = (
    "machine={levels: {pair: {size: 2}, world: {}}}", "model.heads=4", "model.kv_heads=2",
    "train.clip_grad_norm=0.5", "data.document_mask=true", "partition.strategy=topo",
    "train.z_loss=0.01", "train.steps=4", "train.micro_batch=4",
)  # fmt: skip
MIXTURE = (
    "model.moe={experts: 8, active: 3, ffn_hidden: 16, shared_experts: 1, z_loss: 0.001, "
    "bias_rate: 0.05}"
)
HYBRID = (
    "model.attention={pattern: [delta, full], delta: {key_heads: 4, value_heads: 8, key_size: 4, "
    "value_size: 3, norm_eps: 0.01}}"  # a smaller one amplifies rounding
)


def numbers(lines, *keys):
    return [line[key] for key in keys for line in lines if key in line]


def test_a_run_with_tensor_and_context_parallelism_has_the_losses_of_one_rank(
    config_file, tmp_path
):
    tokens = (tmp_path / "corpus.bin").stat().st_size // 2
    (tmp_path / "corpus.mask").write_bytes(bytes(i % 5 > 1 for i in range(tokens)))
    alone = runs.run(config_file, 1, *CHOSEN, "machine=laptop", f"run.directory={tmp_path}/alone")
    assert alone[-1]["tokens"] < 0.65 * 4 * 16 * 16
    # At first all tokens are about as likely.
    assert alone[0]["z_loss"] == pytest.approx(0.01 * math.log(257) ** 2, rel=0.01)
    chosen = "parallel.tensor=pair", "parallel.context=2", "partition.overlap=full"
    split = runs.run(config_file, 4, *CHOSEN, *chosen)
    keys = ("loss", "valid_loss", "grad_norm", "total_tokens", "z_loss")
    assert numbers(split, *keys) == pytest.approx(numbers(alone, *keys), rel=1e-5)
    assert "tensor 2, context 2" in runs.log(tmp_path / "run")


def test_a_run_with_context_parallelism_has_the_losses_of_one_rank(config_file, tmp_path):
    chosen = (*CHOSEN, "data.packing=best_fit")
    alone = runs.run(config_file, 1, *chosen, "machine=laptop", f"run.directory={tmp_path}/alone")
    split = runs.run(config_file, 4, *chosen, "parallel.context=pair", "partition.overlap=full")
    keys = ("loss", "valid_loss", "grad_norm", "total_tokens", "z_loss")
    assert numbers(split, *keys) == pytest.approx(numbers(alone, *keys), rel=1e-5)
    found = numbers(split, "context_imbalance")
    assert len(found) == 4
    assert all(0 <= imbalance <= 0.05 for imbalance in found)
    log = runs.log(tmp_path / "run")
    assert "context 2" in log
    assert f"imbalance {found[-1]:.1%}" in log
    assert "attention: chunks, flash" in log


def test_a_run_with_a_pipeline_has_the_losses_of_one_rank(config_file, tmp_path):
    growing = "train.batch_warmup={start: 8, step_by: 4, until: 3}"
    chosen = (*CHOSEN, growing, "model.layers=4", "train.micro_batch=2", "model.prediction={}")
    alone = runs.run(config_file, 1, *chosen, "machine=laptop", f"run.directory={tmp_path}/alone")
    zero_bubble = (
        "parallel.schedule=zero_bubble", "parallel.stages_per_rank=2", "partition.overlap=full",
    )  # fmt: skip
    for name, schedule in (("1f1b", ()), ("zero_bubble", zero_bubble)):
        own = (f"run.directory={tmp_path}/{name}", "parallel.pipeline=2", *schedule)
        split = runs.run(config_file, 4, *chosen, *own)
        keys = ("loss", "valid_loss", "grad_norm", "total_tokens", "z_loss", "prediction_loss")
        assert numbers(split, *keys) == pytest.approx(numbers(alone, *keys), rel=1e-5)
        assert "pipeline 2" in runs.log(tmp_path / name)


def test_checkpoints_move_between_splits(config_file, tmp_path):
    """On 4 ranks with tensor 2, then on 1 rank, on 2 that share each sequence, on pipelines, and on
    4 that share each matrix. Blocks are stored by their numbers in the whole model: a stage that
    took another one's would not go on with the losses of one rank."""
    common = (
        *CHOSEN, "optimizer.ema=0.9", "train.steps=6", "model.layers=5",
        "model.tie_embeddings=true", HYBRID,
    )  # fmt: skip
    alone = runs.run(config_file, 1, *common, "machine=laptop", f"run.directory={tmp_path}/alone")
    relay = (
        (4, "parallel.tensor=2", "train.stop_at=1"),
        (4, "parallel.pipeline=4", "parallel.layers=[2,1,1,1]", "train.stop_at=2"),
        (1, "machine=laptop", "train.stop_at=3"),
        (4, "parallel.pipeline=2", "parallel.schedule=zero_bubble", "parallel.stages_per_rank=2",
         "train.stop_at=4"),
        (2, "parallel.context=2", "train.stop_at=5"),
        (4, "parallel.tensor=4", "partition.strategy=zero1"),
    )  # fmt: skip
    for ranks, *chosen in relay:
        lines = runs.run(config_file, ranks, *common, *chosen)
    for key in ("loss", "grad_norm"):
        assert numbers(lines, key) == pytest.approx(numbers(alone, key), rel=1e-5)
    found, expected = (numbers(of, "valid_loss")[-1] for of in (lines, alone))
    assert found == pytest.approx(expected, rel=1e-5)
    averages = [open_checkpoint(newest(tmp_path / name)) for name in ("run", "alone")]
    for name in averages[0].shapes:
        torch.testing.assert_close(*(one.tensor("ema", name) for one in averages))


def test_checkpoints_of_a_mixture_of_experts_move_between_splits(config_file, tmp_path):
    chosen = (*CHOSEN, MIXTURE)
    alone = runs.run(config_file, 1, *chosen, "machine=laptop", f"run.directory={tmp_path}/alone")
    relay = (
        (4, "parallel.expert=4", "train.stop_at=1"),
        (
            4,
            "parallel.tensor=2",
            "parallel.expert=2",
            "partition.strategy=zero1",
            "train.stop_at=2",
        ),
        (1, "machine=laptop", "train.stop_at=3"),
        (2, "parallel.context=2", "parallel.expert=2", "partition.strategy=zero3"),
    )
    for ranks, *more in relay:
        lines = runs.run(config_file, ranks, *chosen, *more)
    for key in ("loss", "grad_norm"):
        assert numbers(lines, key) == pytest.approx(numbers(alone, key), rel=1e-5)


def test_a_run_with_dropout_draws_the_same_masks_again(config_file, tmp_path):
    """And other masks on each tensor rank, which has other heads and tokens."""
    chosen = (*CHOSEN, "parallel.tensor=2", "model.dropout=0.3", "train.steps=2")
    found = [
        numbers(runs.run(config_file, 2, *chosen, f"run.directory={tmp_path}/{i}"), "loss")
        for i in range(2)
    ]
    assert found[0] == found[1]
