"""muP and CompleteP: a model of another size learns as fast as the base model."""

from dataclasses import replace

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.config import (
    AttentionConfig,
    DeltaConfig,
    MoEConfig,
    OptimizerConfig,
    ScalingConfig,
)
from megafrontier.config.building import build
from megafrontier.families.hf_io import export_model, import_model
from megafrontier.model.flops import parameter_specs
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.optim.groups import OptimizerGroup, OptimizerGroups
from scripts.benchmarks.scaling.coordinate_check import (
    MEASURED,
    SCALING,
    measure_changes,
    resized,
    slope,
)
from tests.model.moe.shapes import mixture
from tests.model.small_models import SHAPES, filled, small_config

OTHER = ScalingConfig(
    base_hidden=8,
    base_layers=1,
    base_head_size=2,
    embedding_multiplier=3.0,
    output_multiplier=5.0,
)
"""Every constant of the forward pass is another number."""


def own_base(shape):
    return replace(shape, scaling=ScalingConfig("completep", shape.hidden, shape.layers))


@pytest.mark.parametrize("init", ["gpt2", "neox"])
def test_the_base_model_is_the_model_without_scaling(shape, init, tokens):
    shape.init = init
    results = []
    for config in (shape, own_base(shape)):
        model = GPT(config)
        initialise(model, seed=3)
        model(tokens, tokens).backward()
        results.append(list(model.parameters()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)
    adamw = OptimizerConfig()
    plain = OptimizerGroups(adamw, parameter_specs(shape).values())
    based = OptimizerGroups(adamw, parameter_specs(own_base(shape)).values())
    for name, number in plain.numbers.items():
        assert plain.groups[number] == based.groups[based.numbers[name]]


def test_the_factors_are_those_of_the_paper(make_config):
    """Dey et al. 2025, table 1 with alpha = 1, for 4 times the width and 6 times the depth."""
    config = make_config(layers=6, position="rotary")
    scaling = ScalingConfig(base_hidden=8, base_layers=1)
    adamw = OptimizerConfig(eps=1e-8, weight_decay=0.3, no_decay=[])
    expected = {
        "embedding.tokens.weight": (0.02, 1, 1e-8 / 4, 0.3),
        "blocks.0.norm1.weight": (0, 1, 1e-8 / 24, 0.3),
        "blocks.0.attention.qkv.weight": (0.02 / 2, 1 / 4, 1e-8 / 24, 1.2),
        "blocks.5.mlp.up.bias": (0, 1, 1e-8 / 24, 0.3),
        "blocks.5.mlp.down.weight": (0.02 / 2 / 2**0.5, 1 / 4, 1e-8 / 24, 1.2),
        "head.norm.weight": (0, 1, 1e-8 / 4, 0.3),
        "head.output.weight": (0.02, 1, 1e-8 / 4, 0.3),
    }
    specs = parameter_specs(replace(config, scaling=scaling))
    groups = OptimizerGroups(adamw, specs.values())
    for name, (std, *values) in expected.items():
        found = groups.groups[groups.numbers[name]]
        assert specs[name].init_std == pytest.approx(std), name
        assert [found.lr_scale, found.eps, found.weight_decay] == pytest.approx(values), name
    experts = replace(config, scaling=scaling, moe=MoEConfig(experts=4))
    specs = parameter_specs(experts)
    groups = OptimizerGroups(adamw, specs.values())
    for name, std, *values in (
        ("blocks.0.mlp.experts.up", 0.02 / 2, 1 / 4, 1e-8 / 24, 1.2),
        ("blocks.0.mlp.router.weight", 0.02 / 4, 1 / 4, 1e-8 / 6, 1.2),
    ):
        found = groups.groups[groups.numbers[name]]
        assert specs[name].init_std == pytest.approx(std), name
        assert [found.lr_scale, found.eps, found.weight_decay] == pytest.approx(values), name
    model = GPT(replace(config, scaling=scaling))
    assert [model.blocks[3].multiplier, model.head.multiplier] == [1 / 6, 1 / 4]
    # muP leaves the depth alone.
    config.scaling = ScalingConfig("mup", 8)
    assert GPT(config).blocks[3].multiplier == 1
    down = parameter_specs(config)["blocks.0.mlp.down.weight"]
    assert down.init_std == pytest.approx(0.02 / 2 / 12**0.5)


@pytest.mark.parametrize("pairs", [[(64, 2), (128, 2), (256, 2)], [(64, 2), (64, 4), (64, 8)]])
def test_activations_change_as_much_in_every_width_and_depth(pairs):
    factors = [hidden * layers for hidden, layers in pairs]

    def exponents(scaling):
        changes = [measure_changes(resized(*pair, scaling), steps=2) for pair in pairs]
        return [slope(factors, [change[name][-1] for change in changes]) for name in MEASURED]

    assert max(map(abs, exponents(SCALING))) < 0.25
    assert exponents(None)[0] > 0.5


OLMO = SHAPES["llama"] | {"norm_position": "after", "qk_norm": "full"}
HYBRID = OLMO | {
    "attention": AttentionConfig(
        pattern=["delta", "full"], delta=DeltaConfig(2, 4, 8, 6, norm_position="before")
    )
}
"""With norms at other places in some blocks."""


@pytest.mark.parametrize(
    "changes", [*SHAPES.values(), mixture(balance="none") | {"qk_norm": "head"}, OLMO, HYBRID]
)
def test_an_exported_model_has_the_constants_in_its_weights(changes, tokens, tmp_path):
    shape = small_config(**changes)
    shape.scaling = OTHER
    model = filled(shape)
    export_model(shape, model.state_dict(), tmp_path / "out")
    config, weights = import_model(tmp_path / "out")
    assert config.scaling is None
    plain = GPT(config).eval()
    plain.load_state_dict(weights)
    torch.testing.assert_close(plain(tokens), model(tokens), rtol=1e-4, atol=1e-4)
    unscaled = filled(replace(shape, scaling=None))
    assert (unscaled(tokens) - model(tokens)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        (
            {"name": "sgd"},
            "optimizer.name: sgd, need adamw for embedding.tokens.weight with model.scaling",
        ),
        (
            {"groups": [{"match": "matrix", "name": "muon"}]},
            "optimizer.groups[0]: muon, need adamw for head.output.weight with model.scaling",
        ),
        (
            {"groups": [{"match": "matrix:blocks.*", "name": "muon", "split_heads": True}]},
            "optimizer.groups[0]: split_heads, but heads need not widen, need false for "
            "blocks.0.attention.qkv.weight with model.scaling",
        ),
    ],
)
def test_an_optimizer_without_a_rule_is_refused_in_one_line(make_config, optimizer, line):
    specs = parameter_specs(make_config(scaling=OTHER)).values()
    with pytest.raises(UserError) as caught:
        OptimizerGroups(build(OptimizerConfig, optimizer), specs)
    assert str(caught.value) == line


def test_the_rate_of_muon_is_the_same_in_every_size(make_config):
    config = make_config(scaling=OTHER, layers=3)
    chosen = {"match": "matrix:blocks.*", "name": "muon", "lr": 0.02}
    muon = build(OptimizerConfig, {"groups": [chosen]})
    groups = OptimizerGroups(muon, parameter_specs(config).values())
    found = groups.groups[groups.numbers["blocks.2.mlp.up.weight"]]
    assert found == OptimizerGroup("muon", 0.02 / muon.lr, muon.betas, 1e-8, 0.95, 0.1, False)
