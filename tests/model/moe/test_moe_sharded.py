"""A mixture of experts on any mesh and placement gives one process's losses and gradients, and its
routers stay the same on all ranks."""

import pytest
import torch

from megafrontier.data.sampling.samples import Batch
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.model.loss import IGNORE_INDEX
from megafrontier.model.moe.balance import Balance
from megafrontier.parallel.mesh import Splits
from megafrontier.pipeline.work import count_routed
from tests.model.moe.shapes import BIAS, EMPTY, LOSS, SHARED
from tests.model.small_models import small_config
from tests.ranks import run_mesh
from tests.splits import matrix
from tests.splits.matrix import CLIP, RATE, ROWS, SEED, Case, assert_equal, batch, split_model

NO = torch.zeros((), dtype=torch.float64)

CASES = [
    ((2, 2), Splits(), "topo", Case(BIAS, accumulation=2, steps=3)),
    ((2, 2), Splits(), "zero3", Case(LOSS, masks="empty rows", steps=3)),
    ((4,), Splits(), "zero2", Case(EMPTY, steps=3)),
    ((2, 2), Splits(tensor=2), "mics", Case(LOSS, accumulation=2, steps=3)),
    (
        (2, 2),
        Splits(tensor=2, context=2),
        "zero3",
        Case(SHARED, steps=3, options={"overlap": "full"}),
    ),
    ((2, 2, 2), Splits(tensor=2, context=2), "hpz", Case(BIAS, masks="one token", steps=3)),
]


def count(case, step):
    """The targets and routed tokens of a step."""
    return count_routed(Batch(*batch(case, step), None, 0))


def train_alone(case):
    """The reference: plain PyTorch on one process."""
    config = small_config(**case.changes)
    model = GPT(config, loss_chunk_tokens=16)
    initialise(model, SEED)
    balance = Balance(model, config.moe, config.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    steps, counts = [], []
    for step in range(case.steps):
        tokens, targets = batch(case, step)
        balance.scale_losses(1 / (targets != IGNORE_INDEX).sum(), count(case, step))
        loss = model(tokens, targets) / (targets != IGNORE_INDEX).sum()
        optimizer.zero_grad()
        loss.backward()
        gradients = {name: p.grad.flatten().clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        counts.append(balance.take(torch.device("cpu")))
        balance.update(counts[-1], NO)
        steps.append((loss.item(), norm.item(), gradients))
    return steps, counts, dict(model.named_buffers())


def train_split(case, strategy, mesh):
    model, engine, specs = split_model(case, strategy, mesh)
    config = small_config(**case.changes)
    balance = Balance(model, config.moe, config.layers)
    optimizer = torch.optim.SGD([u.master for u in engine.units], lr=RATE, momentum=0.9)
    steps, counts = [], []
    for step in range(case.steps):
        balance.scale_losses(torch.ones(()), count(case, step))
        steps.append(matrix.train_step(case, step, mesh, model, engine, optimizer, specs))
        counts.append(mesh.world.sum(balance.take(mesh.device)))
        balance.update(counts[-1], NO)
    return steps, counts, dict(model.named_buffers())


@pytest.mark.parametrize(("sizes", "splits", "strategy", "case"), CASES)
def test_a_mixture_gives_one_processs_losses_gradients_and_counts(sizes, splits, strategy, case):
    found = run_mesh(sizes, lambda mesh: train_split(case, strategy, mesh), splits=splits)
    expected, counts, buffers = train_alone(case)
    moe = small_config(**case.changes).moe
    total = ROWS * 24 * moe.active * (small_config(**case.changes).layers // moe.every)
    assert counts[0].view(-1, moe.experts + 1)[:, :-1].sum() == total
    assert_equal([steps for steps, *_ in found], expected)
    for _, own_counts, own_buffers in found:
        torch.testing.assert_close(own_counts, counts, rtol=1e-5, atol=0)
        torch.testing.assert_close(own_buffers, buffers, rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("changes", [BIAS, LOSS, SHARED, EMPTY])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "mics", "hpz", "topo"])
@pytest.mark.parametrize("splits", [Splits(), Splits(tensor=2), Splits(tensor=2, context=2)])
def test_every_placement_and_split_gives_one_processs_losses_gradients_and_counts(
    splits, strategy, changes, accumulation
):
    """168 combinations, a few seconds each."""
    case = Case(changes, "empty rows", accumulation, steps=4)
    test_a_mixture_gives_one_processs_losses_gradients_and_counts((2, 2), splits, strategy, case)
