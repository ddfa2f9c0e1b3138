"""Compiled, partly frozen, and adapted modules train as in plain PyTorch."""

import pytest
import torch
from torch import nn

import megafrontier
from tests.api.modules import Regression, batch, run_script

STEPS = 3


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank adapter (LoRA), whose second factor begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 3)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def adapted():
    """Everything is frozen but adapters and the last block's norm; the first layer is frozen
    alone outside of blocks."""
    model = Regression().requires_grad_(False)
    for block in model.blocks:
        block.mlp[0] = Adapted(block.mlp[0])
    model.blocks[2].norm.requires_grad_(True)
    return model


def train(model, optimizer, clip, rank=0, size=1):
    losses = []
    for step in range(STEPS):
        loss = model(batch(step, rank, size))
        loss.backward()
        clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_plain(make):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = train(
        model, optimizer, lambda m, limit: nn.utils.clip_grad_norm_(m.parameters(), limit)
    )
    return losses, model.state_dict()


def compiled_first(model, mesh):
    return megafrontier.shard(torch.compile(model, backend="aot_eager"), mesh, blocks="blocks.*")


def compiled_afterwards(model, mesh):
    sharded = megafrontier.shard(model, mesh, blocks="blocks.*")
    return torch.compile(sharded, backend="aot_eager")


def compiled_blocks(model, mesh):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager")
    return megafrontier.shard(model, mesh, blocks="blocks.*")


def as_it_is(model, mesh):
    return megafrontier.shard(model, mesh, blocks="blocks.*")


@pytest.mark.parametrize(
    ("make", "prepare"),
    [
        (Regression, compiled_first),
        (Regression, compiled_blocks),
        (adapted, as_it_is),
        (adapted, compiled_afterwards),
    ],
)
def test_it_trains_as_in_plain_pytorch(make, prepare):
    def body(mesh):
        model = prepare(make(), mesh)
        optimizer = megafrontier.Optimizer(
            model, torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9
        )
        clip = megafrontier.clip_grad_norm_
        losses = train(model, optimizer, clip, mesh.data_rank, mesh.data_size)
        weights = {name.replace("_orig_mod.", ""): w for name, w in model.state_dict().items()}
        return losses, weights

    results = run_script((2,), body)
    losses, weights = train_plain(make)
    mean = torch.tensor([rank_losses for rank_losses, _ in results]).mean(0)
    assert torch.allclose(mean, torch.tensor(losses), rtol=1e-5)
    for _, found in results:
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            if "calls" not in name:
                assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name
