"""Muon for any module has the losses and weights of torch's Muon and AdamW on one process."""

import pytest
import torch
from torch import nn

import megafrontier
from megafrontier.common.errors import UserError
from tests.api.modules import STEPS, Regression, batch, run_script
from tests.api.test_refusals import sharded
from tests.torch_muon import iterations_in_fp32

MUON = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9}
ADAMW = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.2}


def train(model, optimizers, first, rank=0, size=1, is_sharded=False):
    clip = megafrontier.clip_grad_norm_ if is_sharded else plain_clip
    losses = []
    for step in range(first, first + STEPS):
        model(batch(step, rank, size)).backward()
        clip(model, 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        with torch.no_grad():
            losses.append(model(batch(100)).item())
    return losses


def plain_clip(model, max_norm):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def is_matrix(name, parameter):
    return name.startswith("blocks.") and parameter.dim() == 2


@pytest.fixture(scope="module")
def plain():
    """Losses and weights."""
    model = Regression()
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if is_matrix(name, p)]
    others = [p for name, p in named.items() if not is_matrix(name, p)]
    optimizers = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)]
    with iterations_in_fp32():
        losses = train(model, optimizers, 0) + train(model, optimizers, STEPS)
    return losses, model.state_dict()


def begin(mesh, placement, offload=False, **options):
    model = megafrontier.shard(Regression(), mesh, placement, "blocks.*", offload=offload)
    return model, megafrontier.Muon(model, **options)


def test_muon_is_that_of_torch_and_goes_on_from_a_checkpoint_of_other_ranks(plain, tmp_path):
    """The second ranks have masters and states in host memory."""

    def first_part(mesh):
        model, optimizer = begin(mesh, "topo", **MUON, adamw=ADAMW)
        assert isinstance(optimizer, torch.optim.Optimizer)
        losses = train(model, [optimizer], 0, mesh.data_rank, mesh.data_size, is_sharded=True)
        megafrontier.save(model, optimizer, tmp_path, STEPS)
        again = train(model, [optimizer], STEPS, mesh.data_rank, mesh.data_size, is_sharded=True)
        return losses + again

    def go_on(mesh):
        model, optimizer = begin(mesh, "zero3", offload=True)
        step = megafrontier.load(model, optimizer, tmp_path)
        states = {name for state in optimizer.state.values() for name in state}
        assert all(len(s) == 1 or "momentum_buffer" not in s for s in optimizer.state.values())
        losses = train(model, [optimizer], step, mesh.data_rank, mesh.data_size, is_sharded=True)
        return losses, model.state_dict(), states

    expected, weights = plain
    for losses in run_script((2, 2), first_part):
        assert losses == pytest.approx(expected, rel=1e-5)
    for losses, found, states in run_script((3,), go_on):
        assert losses == pytest.approx(expected[STEPS:], rel=1e-5)
        assert states == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
        for name, value in found.items():
            if "calls" not in name:
                assert torch.allclose(value, weights[name], rtol=1e-4, atol=1e-5), name


def test_groups_of_parameters_choose_their_optimizer(plain):
    model = sharded()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if not is_matrix(name, p)]}
        | {"optimizer": "adamw", **ADAMW},
        {"params": [p for name, p in named.items() if is_matrix(name, p)]},
    ]
    optimizer = megafrontier.Muon(model, groups, **MUON)
    assert train(model, [optimizer], 0, is_sharded=True) == pytest.approx(plain[0][:STEPS])


def test_what_muon_refuses():
    model = sharded()
    named = dict(model.named_parameters())
    line = r"params: blocks.0.norm.weight has shape \(10,\), need a matrix, or optimizer: adamw"
    with pytest.raises(UserError, match=line):
        megafrontier.Muon(model, [named["blocks.0.norm.weight"]])
    with pytest.raises(UserError, match="params: optimizer: sgd, need muon or adamw"):
        megafrontier.Muon(model, [{"params": model.parameters(), "optimizer": "sgd"}])
    with pytest.raises(UserError, match="params: none, need blocks with matrices, or param groups"):
        megafrontier.Muon(sharded(blocks=[]))
