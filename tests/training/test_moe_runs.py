"""Real runs of a mixture of experts: metrics, checkpoints, placements of its own, upcycling."""

import pytest
import torch

from megafrontier.checkpoint.folder import list_checkpoints
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.commands.checkpoints import load_model
from megafrontier.common.errors import UserError
from megafrontier.training.resume.resume import check_own
from tests import runs

MOE = "model.moe={experts: 8, active: 2, ffn_hidden: 20, bias_rate: 0.003}"
ONE = "machine=laptop"


def newest(directory):
    return list_checkpoints(directory / "checkpoints")[-1]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    return runs.make_config_file(tmp_path_factory.mktemp("moe"))


def test_a_run_resumes_with_its_routers_on_another_layout_and_evaluates_with_them(
    config_file, tmp_path
):
    def run(name, ranks, *overrides):
        where = f"run.directory={tmp_path / name}"
        lines = runs.run(config_file, ranks, MOE, where, "train.micro_batch=2", *overrides)
        checkpoint = open_checkpoint(newest(tmp_path / name))
        buffers = checkpoint.tensors("buffer", checkpoint.manifest.buffers)
        return lines, buffers

    whole, biases = run("whole", 1, ONE)
    assert set(biases) == {"blocks.0.mlp.router.bias", "blocks.1.mlp.router.bias"}
    assert all(bias.abs().max() > 0.001 for bias in biases.values())
    parts = ("partition.strategy=topo", "partition.experts={strategy: zero1}")
    run("moved", 4, "train.stop_at=4", *parts)
    run("moved", 4, ONE, "train.stop_at=6", "parallel.pipeline=2", "parallel.expert=2")
    moved, found = run("moved", 4, ONE, "parallel.tensor=2", "parallel.expert=2")
    torch.testing.assert_close(found, biases, rtol=0, atol=0)
    assert runs.losses(moved) == pytest.approx(runs.losses(whole), rel=1e-5)
    assert runs.valid_losses(moved)[-1:] == pytest.approx(runs.valid_losses(whole), rel=1e-5)
    model = load_model(newest(tmp_path / "moved"), runs.load(config_file, MOE), torch.device("cpu"))
    assert torch.equal(model.blocks[1].mlp.router.bias, biases["blocks.1.mlp.router.bias"])
    step = whole[0]
    assert sum(step["expert_tokens"]) == 16 * 16 * 2 * 2  # sequences, tokens, active, blocks
    assert step["dropped_tokens"] == 0
    assert all(1 <= value <= 4 for value in step["expert_imbalance"])
    assert all(1.5 < value <= 2.08 for value in step["router_entropy"])  # log(8) = 2.079


def test_a_dense_checkpoint_becomes_a_mixture_that_computes_the_same(config_file, tmp_path):
    dense = runs.run(config_file, 1, ONE, f"run.directory={tmp_path / 'dense'}", "train.steps=3")
    start = (
        "model.moe={experts: 4, active: 2, every: 2}",
        f"checkpoint.resume={tmp_path / 'dense'}",
        "optimizer.lr=0",
        "train.steps=1",
        "schedule.warmup_steps=0",
        f"run.directory={tmp_path / 'mixture'}",
    )
    with pytest.raises(UserError, match=r"checkpoint.weights_only: False, need true, because"):
        check_own(runs.load(config_file, *start))
    mixture = runs.run(
        config_file, 4, *start, "checkpoint.weights_only=true", "partition.strategy=zero3"
    )
    assert runs.valid_losses(mixture) == pytest.approx(runs.valid_losses(dense), rel=1e-6)
    (path,) = list_checkpoints(tmp_path / "mixture" / "checkpoints")
    assert open_checkpoint(path).tensor("weight", "blocks.1.mlp.router.weight").std() > 0.01
