"""GPT in the engine: built on the meta device, unsharded unit by unit."""

from functools import partial

import pytest
import torch

from megafrontier.data.sampling.samples import document_starts
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initial_slice, initialise
from megafrontier.partition import Placement, shard
from tests.model.small_models import SHAPES, small_config
from tests.partition.tiny import backward
from tests.ranks import run_ranks

STEPS, RATE, BATCH = 4, 0.5, 8


def global_batch(step):
    """Tokens and document numbers [8, 24], with two documents per row."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 50, (BATCH, 24), generator=generator)
    start = torch.randint(1, 24, (BATCH, 1), generator=generator)
    return tokens, (torch.arange(24) >= start).long()


def summed_loss(model, tokens, numbers):
    return model(tokens[:, :-1], tokens[:, 1:], document_starts(numbers[:, :-1]))


def losses_alone(config):
    model = GPT(config)
    initialise(model, seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE / (BATCH * 23))
    losses = []
    for step in range(STEPS):
        loss = summed_loss(model, *global_batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_sharded(config, strategy, hierarchy, **options):
    with torch.device("meta"):
        model = GPT(config, loss_chunk_tokens=10, **{"checkpointing": "block", **options})
    engine = shard(
        model,
        model.units(),
        Placement.named(strategy, hierarchy.levels),
        hierarchy,
        initial=partial(initial_slice, 7),
    )
    optimizer = torch.optim.SGD([u.master for u in engine.units], lr=RATE / (BATCH * 23))
    losses = []
    for step in range(STEPS):
        total = torch.zeros(1)
        mine = [part.chunk(hierarchy.size)[hierarchy.rank] for part in global_batch(step)]
        for micro in zip(*(part.chunk(2) for part in mine), strict=True):
            loss = summed_loss(model, *micro)
            backward(engine, loss)
            total += loss.detach()
        for unit, gradient in zip(engine.units, engine.finish_gradients(), strict=True):
            unit.master.grad = gradient
        optimizer.step()
        engine.clear_gradients()
        engine.publish()
        losses.append(hierarchy.world.sum(total).item())
    return losses


def test_every_shape_trains_sharded_as_on_one_process():
    """2 × 2 ranks with checkpointed blocks, documents and accumulation, against none of these."""
    configs = {name: small_config(**shape) for name, shape in SHAPES.items()}
    alone = {name: losses_alone(config) for name, config in configs.items()}

    def body(hierarchy):
        return {n: losses_sharded(c, "topo", hierarchy) for n, c in configs.items()}

    for rank in run_ranks((2, 2), body):
        for name, losses in rank.items():
            assert losses == pytest.approx(alone[name], rel=1e-5), name
            assert losses[0] != losses[-1]
