"""The configurations of mixtures have the sizes of the published models, and fit the machine."""

import pytest

from megafrontier.config import load_config
from megafrontier.model.flops import flops_per_token, parameter_count
from megafrontier.plan.footprint import buffer_gib, state_gib
from megafrontier.plan.refuse import check_memory
from megafrontier.plan.resolve import resolve_plan


@pytest.mark.parametrize(
    ("name", "ranks", "billions", "active"),
    [("moe-8x7b", 128, 46.7, 12.9), ("moe-30b-a3b", 128, 30.5, 3.35), ("moe-200b", 512, 202, 20.4)],
)
def test_a_configuration_has_its_parameters_and_fits_frontier(name, ranks, billions, active):
    config = load_config(f"configs/{name}.yaml", ["tokenizer=none"])
    model = config.model
    assert parameter_count(model) == pytest.approx(billions * 1e9, rel=3e-3)
    attention = 6 * model.layers * model.heads * model.head_dim * model.sequence_length
    products = (flops_per_token(model) - attention) / 6
    embedding = model.vocab_size * model.hidden  # a lookup is no product
    assert products + embedding == pytest.approx(active * 1e9, rel=5e-3)
    plan = resolve_plan(config, ranks)
    check_memory(config, plan)
    assert state_gib(config, plan) + buffer_gib(config, plan) < 32, "half of a GCD"
