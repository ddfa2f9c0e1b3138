"""Counts of parameters and FLOPs, and the sizes of the shipped configs."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from megafrontier.config import AttentionConfig, ModelConfig, load_config, load_machine
from megafrontier.families import family_for
from megafrontier.model.flops import flops_per_token, parameter_count, parameter_shapes
from tests.model.small_models import DELTA, LATENT_QUERIES, small_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PARAMETERS = {
    "gpt-125m": 125e6,
    "gpt-350m": 350e6,
    "gpt-1.3b": 1.3e9,
    "gpt-10b": 10e9,
    "gpt-20b": 20.55e9,
    "llama-7b": 6.74e9,
    "llama-8b-128k": 8.03e9,
    "llama-70b": 70.55e9,
    "llama-175b": 175.2e9,
}


PRESETS = {
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "glm-4.5": 352_797_814_784,
    "glm-4.5-air": 106_852_245_504,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "llama-2-13b": 13_015_864_320,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "olmo-2-7b": 7_298_617_344,
    "olmo-3-32b": 32_233_522_176,
    "olmo-3-7b": 7_298_011_136,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-3-mini": 3_821_079_552,
    "pythia-1.4b": 1_414_647_808,
    "pythia-160m": 162_322_944,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3-8b": 8_190_735_360,
    "smollm3-3b": 3_075_098_624,
    "stablelm-2-1.6b": 1_644_515_328,
}
"""Parameters in the published weights, tied matrices once."""


def test_parameters_are_those_of_the_model(shape, make_model):
    assert parameter_count(shape) == sum(p.numel() for p in make_model(shape).parameters())


def test_gpt2_small_by_hand():
    config = ModelConfig(vocab_size=50257, vocab_multiple=1, tie_embeddings=True)
    assert parameter_count(config) == 124_439_808
    blocks, head = 12 * 12 * 768**2, 50257 * 768
    assert flops_per_token(config) == 6 * (blocks + head) + 6 * 12 * 768 * 1024


def test_flops_are_those_torch_counts(shape, make_model, tokens):
    """Except attention, which torch counts without causality, and 2.5 times in backward because it
    recomputes the scores."""
    shape.vocab_multiple = 1
    model = make_model(shape).train()
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for operation, n in counted.items() if "attention" not in str(operation))
    width = shape.heads * (shape.head_size or shape.hidden // shape.heads)
    attention = 6 * shape.layers * width * shape.sequence_length
    assert products / tokens.numel() == pytest.approx(flops_per_token(shape) - attention)


def test_latent_attention_by_hand():
    config = small_config(**LATENT_QUERIES, ffn_hidden=40, vocab_multiple=1)
    latents = 32 * 16 + 16 * 4 * (4 + 6) + 32 * (12 + 4) + 12 * 4 * (6 + 8) + 4 * 8 * 32
    products = 2 * (latents + 3 * 32 * 40) + 50 * 32
    norms = 2 * (16 + 12 + 2 * 32) + 32
    assert parameter_count(config) == products + norms + 50 * 32
    attention = 2 * (4 * 10 + 4 * 8) * 24 / 2
    assert flops_per_token(config) == 6 * (products + attention)


def test_delta_attention_by_hand():
    """Of one of two blocks, whose states cost the same for any number of tokens."""
    config = small_config(**DELTA, ffn_hidden=40, vocab_multiple=1)
    delta = 32 * (2 * 16 + 2 * 24 + 2 * 4) + 24 * 32
    products = delta + 5 * 32 * 32 + 2 * 3 * 32 * 40 + 50 * 32
    assert flops_per_token(config) == 6 * (products + 32 * 24) + 18 * 4 * 8 * 6


def test_a_window_costs_the_pairs_that_it_has():
    """In 2 of 3 blocks. A pair of a token with itself counts half, as without a window."""
    length, window = 96, 20
    sizes = {"layers": 3, "hidden": 32, "heads": 4, "sequence_length": length}
    whole = ModelConfig(**sizes)
    part = ModelConfig(**sizes, attention=AttentionConfig(window, global_every=3))
    pairs = sum(min(i, window) if i >= window else i + 0.5 for i in range(length))
    saved = length / 2 - pairs / length
    assert flops_per_token(whole) - flops_per_token(part) == pytest.approx(2 * 12 * 32 * saved)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_model_is_what_its_name_says(name):
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.run.name == name
    assert parameter_count(config.model) == pytest.approx(PARAMETERS[name], rel=0.03)
    model = config.model
    attention = 6 * model.layers * model.heads * model.head_dim * model.sequence_length
    products = flops_per_token(model) - attention
    assert 5 < products / parameter_count(model) <= 6
    levels = load_machine(config.machine).levels
    ranks_per_node = levels["pair"].size * levels["node"].size
    assert config.train.global_batch % (config.train.micro_batch * ranks_per_node) == 0


def test_presets_have_the_published_number_of_parameters_and_a_family():
    names = {path.stem for path in (CONFIGS / "models").glob("*.yaml")}
    assert names == set(PRESETS)
    for name, count in PRESETS.items():
        changes = [f"model={name}", "model.vocab_multiple=1"]
        model = load_config(CONFIGS / "quickstart.yaml", changes).model
        # Blocks of these have equally many parameters, but for those before the first experts, and
        # the pattern of kinds of attention.
        first = 0 if model.moe is None else model.moe.first
        size = len(model.attention.pattern) or 1
        one, two = (parameter_count(replace(model, layers=first + n * size)) for n in (1, 2))
        periods, rest = divmod(model.layers - first, size)
        assert (rest, one + (periods - 1) * (two - one)) == (0, count), name
        assert family_for(model).architecture


def test_7b_and_20b_are_the_published_shapes():
    llama = load_config(CONFIGS / "llama-7b.yaml").model
    assert parameter_count(llama) == 6_738_415_616
    neox = parameter_shapes(load_config(CONFIGS / "gpt-20b.yaml").model)
    assert sum(map(prod, neox.values())) == 20_554_567_680
