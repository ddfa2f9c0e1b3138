"""The shipped model configs load, and are as large as they are called."""

from math import prod
from pathlib import Path

import pytest

from megafrontier.config import load_config, load_machine
from megafrontier.model.flops import flops_per_token, parameter_count, parameter_shapes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PARAMETERS = {
    "gpt-125m": 125e6,
    "gpt-350m": 350e6,
    "gpt-1.3b": 1.3e9,
    "gpt-10b": 10e9,
    "gpt-20b": 20.55e9,
    "llama-7b": 6.74e9,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_model_is_what_its_name_says(name):
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.run.name == name
    assert parameter_count(config.model) == pytest.approx(PARAMETERS[name], rel=0.03)
    assert 6 < flops_per_token(config.model) / parameter_count(config.model) < 8
    assert (config.train.activation_checkpointing == "block") == (PARAMETERS[name] > 1e9)
    levels = load_machine(config.machine).levels
    ranks_per_node = levels["pair"].size * levels["node"].size
    assert config.train.global_batch % (config.train.micro_batch * ranks_per_node) == 0


def test_7b_and_20b_are_the_published_shapes():
    llama = load_config(CONFIGS / "llama-7b.yaml").model
    assert parameter_count(llama) == 6_738_415_616
    neox = parameter_shapes(load_config(CONFIGS / "gpt-20b.yaml").model)
    assert sum(map(prod, neox.values())) == 20_554_567_680
