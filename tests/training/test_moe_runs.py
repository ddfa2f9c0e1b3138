"""Real runs of a mixture of experts: metrics, checkpoints, placements of its own, upcycling."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.commands.checkpoints import load_model
from megafrontier.common.checkpoints import list_checkpoints
from megafrontier.common.errors import UserError
from megafrontier.data.sampling.loader import open_loader
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.model.moe.router import Router
from megafrontier.optim.gradients import global_norm
from megafrontier.parallel.mesh import Mesh, Splits
from megafrontier.plan.resolve import resolve_plan
from megafrontier.training.loop import train_step
from megafrontier.training.resume.resume import check_own
from tests import runs
from tests.ranks import run_mesh

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
    start += ("checkpoint.weights_only=true",)
    with pytest.raises(UserError, match=r"model\.moe\.bias: True, need false, because"):
        check_own(runs.load(config_file, *start, "model.moe.bias=true"))
    mixture = runs.run(config_file, 4, *start, "partition.strategy=zero3")
    assert runs.valid_losses(mixture) == pytest.approx(runs.valid_losses(dense), rel=1e-6)
    (path,) = list_checkpoints(tmp_path / "mixture" / "checkpoints")
    assert open_checkpoint(path).tensor("weight", "blocks.1.mlp.router.weight").std() > 0.01


LOSSES = (
    "model.moe={experts: 8, active: 2, ffn_hidden: 20, balance: loss, loss_coefficient: 0.5, "
    "z_loss: 0.1}",
    "model.heads=4", "model.init_std=0.2", "train.clip_grad_norm=0", "schedule.warmup_steps=0",
    "optimizer={name: sgd, lr: 0.1}", "train.global_batch=8", "train.micro_batch=1",
    "model.sequence_length=24", "run.seed=1", "data.document_mask=true", "data.packing=best_fit",
)  # fmt: skip
"""Router losses with large factors, and sequences with padding."""
PREDICTS = "model.prediction={coefficient: 0.5}"


@pytest.fixture(scope="module")
def masked_file(tmp_path_factory):
    """A configuration of a corpus of which one token in ten is a target."""
    folder = tmp_path_factory.mktemp("masked")
    path = runs.make_config_file(folder)
    tokens = (folder / "corpus.bin").stat().st_size // 2
    (folder / "corpus.mask").write_bytes(bytes(i % 10 == 3 for i in range(tokens)))
    return path


def routers_of(model):
    return [module for module in model.modules() if isinstance(module, Router)]


def train_steps(config, mesh):
    """Loss, gradient norm, and the norm of the weights after each of two steps, and the tokens of
    each expert."""
    with runs.open_trainer(config, mesh) as trainer:
        units, found = trainer.engine.trained_units, []
        for router in routers_of(trainer.model):
            router.load.copy_(torch.linspace(0, 0.25, 8))
        for _ in range(2):
            result = train_step(trainer)
            masters = [unit.master for unit in units], [unit.counts for unit in units]
            norm = global_norm(*masters, mesh.world).item()
            tokens = result.metrics["expert_tokens"]
            found.append([result.loss, result.grad_norm, norm, *tokens])
        return found


def train_alone(config):
    return train_steps(config, Mesh.single(resolve_plan(config, 1).levels, torch.device("cpu")))


def test_losses_of_routers_are_means_over_the_tokens_that_count(masked_file):
    """The first step beside plain PyTorch, which has no micro-batches."""
    config = runs.load(masked_file, ONE, *LOSSES, PREDICTS, "train.micro_batch=4")
    model, seen = GPT(config.model), []
    initialise(model, config.run.seed)
    for router in routers_of(model):
        router.load.copy_(torch.linspace(0, 0.25, 8))
        router.loss_scale = torch.zeros(())  # because they follow here
        router.register_forward_hook(lambda router, inputs, _: seen.append((router, inputs[0])))
    batch = open_loader(config, "train", 0, 1).samples.batch(0, 8)
    targets, text = (batch.targets >= 0).sum(), ~batch.padding.flatten()
    assert targets < 0.15 * text.sum()
    assert not text.all()
    total = model(batch.tokens, batch.targets, batch.documents) / targets
    documents = [range(*bounds) for bounds in pairwise(batch.documents.tolist())]
    followed = [i for of in documents for i in of[:-1] if text[i]]
    for (router, tokens), counted in zip(seen, (text, text, followed), strict=True):
        logits = tokens[counted] @ router.weight.t()
        total = total + 0.1 * logits.logsumexp(-1).square().mean()
        total = total + 0.5 * 8 * (logits.softmax(-1).mean(0) * router.load).sum()
    total.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    _, found, _, *counts = train_alone(config)[0]
    assert found == pytest.approx(norm, rel=1e-5)
    assert sum(counts) == 2 * (2 * text.sum() + len(followed))


@pytest.fixture(scope="module")
def one_process(masked_file):
    """Two steps in micro-batches of one sequence, with `PREDICTS` and without."""
    return {
        predicts: train_alone(runs.load(masked_file, ONE, *LOSSES, *predicts))
        for predicts in ((PREDICTS,), ())
    }


def assert_same(found, expected):
    assert found == [pytest.approx(step, rel=1e-5) for step in expected]


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_micro_batches_change_nothing_in_routers(masked_file, one_process, micro_batch):
    config = runs.load(masked_file, ONE, *LOSSES, PREDICTS, f"train.micro_batch={micro_batch}")
    assert_same(train_alone(config), one_process[PREDICTS,])


@pytest.mark.parametrize(
    ("splits", "chosen"),
    [
        (Splits(expert=2), (PREDICTS, "partition.strategy=zero3")),
        (Splits(tensor=2, context=2, expert=2), (PREDICTS, "train.micro_batch=4")),
        (Splits(pipeline=2, expert=2), ("train.micro_batch=2",)),
    ],
    ids=["data and expert", "tensor, context and expert", "pipeline and expert"],
)
def test_splits_change_nothing_in_routers(masked_file, one_process, splits, chosen):
    sizes = [f"parallel.{name}={size}" for name, size in vars(splits).items()]
    machine = "machine={levels: {pair: {size: 2}, world: {}}}"
    config = runs.load(masked_file, *LOSSES, machine, *sizes, *chosen)
    for found in run_mesh((2, 2), partial(train_steps, config), splits=splits):
        assert_same(found, one_process[tuple({PREDICTS} & {*chosen})])
