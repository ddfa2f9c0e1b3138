"""What certificates hold one process against: experts, routers and Muon without our code."""

import pytest
import torch

from megafrontier.certify.compare import gap_of_tensors
from megafrontier.certify.plain import _orthogonal, _plain_optimizers, plain_gradients
from megafrontier.certify.runs import write_corpora
from megafrontier.config import CorpusConfig
from megafrontier.data.sampling.loader import open_loader
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.model.moe import dispatch
from megafrontier.model.moe.balance import Balance
from megafrontier.optim.muon import orthogonalize
from megafrontier.pipeline.work import count_routed
from tests import runs

pytestmark = pytest.mark.fast
MIXTURE = (
    "model.moe={experts: 4, active: 2, ffn_hidden: 16, balance: loss, z_loss: 0.01}",
    "model.sequence_length=32",
    "model.init_std=0.2",
    "data.document_mask=true",
    "data.packing=best_fit",
    "train.micro_batch=8",
)


@pytest.fixture
def config(tmp_path):
    config = runs.load(runs.make_config_file(tmp_path), *MIXTURE)
    config.data.train = [CorpusConfig(str(tmp_path / "train"))]
    write_corpora(config)
    return config


def _own_gradients(config):
    """The gradients of the model's own loss, with the losses of its routers."""
    model = GPT(config.model)
    initialise(model, config.run.seed)
    loader = open_loader(config, "train", 0, 1)
    batches = loader.step(0)
    loader.close()
    counts = torch.stack([count_routed(batch) for batch in batches]).sum(0)
    Balance(model, config.model.moe, config.model.layers).scale_losses(torch.ones(()), counts)
    for batch in batches:
        model(batch.tokens, batch.targets, batch.documents, padding=batch.padding).backward()
    return {n: p.grad.flatten() / counts[0].item() for n, p in model.named_parameters()}


def test_plain_experts_and_routers_have_the_gradients_of_ours_and_notice_one_that_is_lost(
    config, monkeypatch
):
    _, plain = plain_gradients(config)
    assert gap_of_tensors(_own_gradients(config), plain).value < 1e-5
    whole = dispatch._Combine.backward
    lost = staticmethod(lambda *of: (whole(*of)[0], torch.zeros_like(whole(*of)[1]), *[None] * 3))
    monkeypatch.setattr(dispatch._Combine, "backward", lost)
    assert gap_of_tensors(_own_gradients(config), plain).value > 1e-3


def test_plain_muon_orthogonalizes_as_ours_does():
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize(matrix)
    assert (_orthogonal(matrix) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_plain_optimizers_have_the_values_of_the_groups(config):
    config.optimizer.weight_decay = 0.1
    muon = {"match": "matrix:blocks.*", "name": "muon", "lr": 0.01, "weight_decay": 0.2}
    vectors = {"match": "norm", "weight_decay": 0.3}
    path = runs.make_config_file(runs.Path(config.run.directory).parent)
    grouped = runs.load(path, *MIXTURE, f"optimizer.groups={[muon, vectors]}")
    parameters = {
        name: torch.nn.Parameter(p.detach().flatten())
        for name, p in GPT(grouped.model).named_parameters()
    }
    adamw, own = sorted(_plain_optimizers(grouped, parameters), key=lambda o: type(o).__name__)
    decays = {group["weight_decay"] for group in adamw.param_groups}
    assert decays == {0.0, 0.1, 0.3}  # of the embedding, of experts, of norms
    assert {(g["weight_decay"], g["lr_scale"]) for g in own.param_groups} == {(0.2, 2.0)}
