"""AdamW in learned sparse subspaces on the host: it trains, resumes, and sends few bytes."""

import pytest
import torch

from megafrontier.commands.checkpoints import load_model
from megafrontier.common.errors import BAD_INPUT, UserError
from megafrontier.config import SubspaceConfig
from megafrontier.launch.main import train
from megafrontier.optim.groups import OptimizerGroup
from megafrontier.optim.subspace import Subspace
from tests import runs

LSP = "optimizer.groups=[{match: 'matrix:blocks.*', name: lsp}]"
SHAPE = 48, 32


def subspace(**changes):
    group = OptimizerGroup("lsp", 1.0, (0.9, 0.95), 1e-8, 0.0, 0.0, False)
    return Subspace(SHAPE, SubspaceConfig(**changes), group, torch.device("cpu"), 0)


def error(found, gradient):
    """Of a gradient that goes to the host and back."""
    found.send(gradient)
    found.change.copy_(found.gradient)
    return ((found.receive() - gradient).norm() / gradient.norm()).item()


@pytest.mark.parametrize("compression", [2.0, 4.0, 8.0])
def test_as_many_times_fewer_bytes_cross_as_asked_for(compression):
    numel = SHAPE[0] * SHAPE[1]
    found = subspace(compression=compression)
    assert (4 + 2) * numel / (found.gradient.nbytes + found.change.nbytes) >= compression


def test_a_fit_brings_the_error_under_the_bound_and_keeps_moments_where_it_can():
    torch.manual_seed(0)
    gradient = torch.randn(SHAPE[0], 3) @ torch.randn(3, SHAPE[1])
    found = subspace(bias=0.6)
    assert error(found, gradient) > 1
    found.refit(gradient)
    assert error(found, gradient) <= 0.6
    values = found.state()["left"].clone()
    found.refit(gradient)
    assert torch.equal(found.state()["left"], values), "within the bound nothing changes"
    (moment,) = found.adamw.states["exp_avg"]
    moment.copy_(found.gradient)
    other = gradient + 0.6 * torch.randn(SHAPE)
    found.refit(other)
    assert not torch.equal(found.state()["left"], values)
    found.send(gradient)
    likeness = torch.nn.functional.cosine_similarity(moment, found.gradient, dim=0)
    assert likeness > 0.5


def test_a_run_learns_resumes_to_the_bit_and_its_checkpoint_is_loaded_by_others(
    config_file, tmp_path, capfd
):
    chosen = (LSP, *runs.ONE, "optimizer.subspace.refit_every=3", "train.micro_batch=8")
    chosen += ("partition.offload.optimizer=cpu",)  # of the other parameters
    unbroken = runs.run(config_file, 1, *chosen, f"run.directory={tmp_path}/unbroken")
    runs.run(config_file, 1, *chosen, "train.stop_at=4")
    assert runs.losses(runs.run(config_file, 1, *chosen)) == runs.losses(unbroken)
    assert runs.losses(unbroken)[-1] < runs.losses(unbroken)[0] - 0.3
    config = runs.load(config_file, *chosen)
    (newest,) = (tmp_path / "unbroken" / "checkpoints").glob("step-*8")
    assert sum(p.numel() for p in load_model(newest, config, torch.device("cpu")).parameters())
    assert train(runs.load(config_file, *runs.ONE, "train.steps=9"), 1) == BAD_INPUT
    assert "has states of lsp, need lsp" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("chosen", "ranks", "line"),
    [
        (LSP, 2, "optimizer.groups.0..name: lsp, need 1 rank, not 2"),
        ("optimizer.groups=[{match: norm, name: lsp}]", 1, "groups.0.: lsp, but .* need a matrix"),
    ],
)
def test_what_has_no_subspace_is_refused_in_one_line(config_file, chosen, ranks, line):
    with pytest.raises(UserError, match=line):
        runs.check(config_file, ranks, chosen, *runs.ONE)
