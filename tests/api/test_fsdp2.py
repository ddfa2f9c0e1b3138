"""The same module and loop under torch's fully_shard and under `shard` have the same losses."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megafrontier
from tests.api.modules import STEPS, Regression, batch, run_script


def train_fsdp2(mesh):
    model = Regression()
    devices = init_device_mesh("cpu", (mesh.world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=devices)
    fully_shard(model, mesh=devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = model(batch(step, mesh.data_rank, mesh.data_size))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_ours(mesh):
    model = megafrontier.shard(Regression(), mesh, blocks="blocks.*")
    optimizer = megafrontier.AdamW(model, lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = model(batch(step, mesh.data_rank, mesh.data_size))
        loss.backward()
        megafrontier.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_fully_shard():
    for ours, theirs in run_script((2,), lambda mesh: (train_ours(mesh), train_fsdp2(mesh))):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert ours[-1] != pytest.approx(ours[0], rel=1e-2)
