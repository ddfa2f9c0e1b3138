"""Initial weights are a pure function of (seed, spec, element)."""

import itertools
from dataclasses import replace
from math import prod, sqrt

import pytest
import torch

from megafrontier.model import init as module
from megafrontier.model.flops import parameter_specs
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initial_slice, initialise

UP = "blocks.0.mlp.up.weight"
KNOWN = [0.002406746, 0.02491387, -0.005563564]


def whole(config, name, seed=3):
    spec = parameter_specs(config)[name]
    return initial_slice(seed, spec, 0, prod(spec.shape))


def test_any_cut_gives_the_same_values(make_config, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1000)
    cuts = (0, 1, 100, 999, 1000, 1001, 2500, 2501, 5000, 9000)
    config = make_config(hidden=128, vocab_size=77)
    for name, spec in parameter_specs(config).items():
        numel = prod(spec.shape)
        edges = [c for c in cuts if c < numel] + [numel]
        parts = [initial_slice(3, spec, a, b) for a, b in itertools.pairwise(edges)]
        assert torch.equal(torch.cat(parts), whole(config, name)), name


@pytest.mark.parametrize("dim", [0, 1])
def test_a_box_has_the_elements_of_the_global_tensor(dim, make_config, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1000)
    config = make_config()
    for name, spec in parameter_specs(config).items():
        if len(spec.shape) > dim:
            size = spec.shape[dim]
            box = [(0, n) for n in spec.shape]
            box[dim] = (size // 4, size)
            part = replace(spec, box=tuple(box))
            values = whole(config, name).view(spec.shape).narrow(dim, size // 4, size - size // 4)
            numel = prod(part.local_shape)
            middle = initial_slice(3, part, numel // 3, numel - 1)
            assert torch.equal(middle, values.flatten()[numel // 3 : numel - 1]), name


def test_several_cores_draw_the_same_values(make_config, monkeypatch):
    config = make_config(hidden=128)
    monkeypatch.setattr(module, "CHUNK", 1000)
    found = []
    for cores in (1, 4):
        monkeypatch.setattr(module, "own_cores", lambda environment, cores=cores: cores)
        found.append(whole(config, UP))
    assert torch.equal(*found)


def test_a_slice_draws_only_the_chunks_it_overlaps(make_config, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1000)
    drawn, normal = [], torch.Tensor.normal_

    def counted(tensor, **options):
        drawn.append(tensor.numel())
        return normal(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "normal_", counted)
    spec = parameter_specs(make_config())[UP]
    initial_slice(3, spec, 1500, 2500)
    assert sum(drawn) == 2000
    drawn.clear()
    initial_slice(3, replace(spec, box=((0, 128), (16, 32))), 0, 128 * 16)
    assert sum(drawn) == 128 * 32  # each chunk once, and not once a row


def test_seed_name_and_chunk_each_give_other_values(make_config, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1024)
    config = make_config()
    first = whole(config, UP)
    assert not torch.equal(first, whole(config, UP, seed=4))
    assert not torch.equal(first, whole(config, "blocks.1.mlp.up.weight"))
    assert not torch.equal(first[:1024], first[1024:2048])


def test_a_model_is_filled_with_the_slices(shape):
    model = GPT(shape)
    initialise(model, seed=3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.flatten(), whole(shape, name)), name


@pytest.mark.parametrize("init", ["gpt2", "neox"])
def test_standard_deviations_are_those_of_the_papers(init, make_config):
    config = make_config(init=init, hidden=256, layers=3, vocab_size=1000)
    plain = 0.02 if init == "gpt2" else sqrt(2 / (5 * 256))
    residual = 0.02 / sqrt(6) if init == "gpt2" else 2 / (3 * 16)
    expected = {
        "blocks.1.attention.qkv.weight": plain,
        "blocks.1.mlp.up.weight": plain,
        "blocks.1.attention.out.weight": residual,
        "blocks.1.mlp.down.weight": residual,
        "head.output.weight": plain,
    }
    for name, deviation in expected.items():
        values = whole(config, name)[: 1000 * 256]
        assert values.std().item() == pytest.approx(deviation, rel=0.02), name
        assert abs(values.mean().item()) < 5 * deviation / sqrt(values.numel()), name
    positions = whole(config, "embedding.positions.weight")
    assert positions.std().item() == pytest.approx(0.02, rel=0.05)


def test_no_parameter_is_without_a_spec_of_its_own(shape):
    for name, spec in parameter_specs(shape).items():
        assert (spec.init_std > 0) == (len(spec.shape) == 2), name
        assert (spec.init_mean == 1) == (spec.kind == "norm" and "weight" in name), name


def test_norms_are_1_and_biases_and_padded_rows_0(make_config):
    config = make_config()
    assert (whole(config, "blocks.0.norm1.weight") == 1).all()
    assert not whole(config, "head.norm.bias").any()
    assert not whole(config, "blocks.0.attention.qkv.bias").any()
    for name in ("embedding.tokens.weight", "head.output.weight"):
        values = whole(config, name).view(64, 32)
        assert values[:50].all()
        assert not values[50:].any()
        tail = initial_slice(3, parameter_specs(config)[name], 50 * 32 - 5, 50 * 32 + 5)
        assert tail.bool().tolist() == [True] * 5 + [False] * 5


def test_initial_values_never_change(make_config):
    """A seed in an old config must give the same weights."""
    values = initial_slice(1234, parameter_specs(make_config())[UP], 0, 3)
    torch.testing.assert_close(values, torch.tensor(KNOWN), rtol=1e-5, atol=0)


def test_kinds_decide_weight_decay(make_config):
    kinds = {
        "embedding.tokens.weight": "embedding",
        "embedding.positions.weight": "embedding",
        "blocks.1.norm1.weight": "norm",
        "blocks.1.norm2.bias": "norm",
        "blocks.1.attention.qkv.weight": "matrix",
        "blocks.1.attention.qkv.bias": "bias",
        "blocks.1.mlp.down.bias": "bias",
        "head.norm.weight": "norm",
        "head.output.weight": "matrix",
    }
    specs = parameter_specs(make_config())
    assert {name: specs[name].kind for name in kinds} == kinds
