"""Dense families with Llama's tensors both ways, with the logits of transformers."""

from copy import deepcopy

import pytest
import torch
import transformers

from megafrontier.common.errors import UserError
from megafrontier.config import AttentionConfig
from megafrontier.families import FAMILIES
from megafrontier.families.hf_io import described_model, export_model, import_model
from tests.families import test_experts
from tests.families.conftest import (
    assert_same_both_ways,
    assert_same_logits,
    change_config,
    loaded,
)
from tests.families.test_families import LLAMA3, ROTARY, SMALL_LLAMA

SMALL = SMALL_LLAMA | {"num_hidden_layers": 3, "num_key_value_heads": 2}
PLAIN = SMALL | {"rope_parameters": ROTARY}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "beta_fast": 3.0, "beta_slow": 1.0}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0}
GEMMA = SMALL | {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 5}
FOREIGN = {
    "Mistral": transformers.MistralConfig(**PLAIN, sliding_window=7),
    "Mistral without a window": transformers.MistralConfig(**PLAIN, sliding_window=None),
    "Ministral3": transformers.Ministral3Config(
        **SMALL,
        head_dim=16,
        rope_parameters={
            **YARN,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
        pad_token_id=0,
    ),
    "SmolLM3": transformers.SmolLM3Config(
        **PLAIN, no_rope_layer_interval=2, mlp_bias=True, pad_token_id=0
    ),
    "Qwen2": transformers.Qwen2Config(**PLAIN, tie_word_embeddings=True),
    "Qwen2 with windows": transformers.Qwen2Config(
        **PLAIN,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "Qwen3": transformers.Qwen3Config(**PLAIN, head_dim=16, attention_bias=True),
    "Gemma2": transformers.Gemma2Config(
        **GEMMA,
        rope_parameters=ROTARY,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=1.5,
        attention_bias=True,
    ),
    "Gemma3": transformers.Gemma3TextConfig(
        **GEMMA,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        tie_word_embeddings=False,
    ),
    "Gemma2 without windows": transformers.Gemma2Config(
        **GEMMA, layer_types=["full_attention"] * 3, rope_parameters=ROTARY
    ),
    "Gemma3 without windows": transformers.Gemma3TextConfig(
        **GEMMA, layer_types=["full_attention"] * 3
    ),
    "Gemma3 with windows alone": transformers.Gemma3TextConfig(
        **GEMMA, layer_types=["sliding_attention"] * 3
    ),
    "Olmo2": transformers.Olmo2Config(**PLAIN, pad_token_id=0, eos_token_id=1),
    "Olmo3": transformers.Olmo3Config(
        **SMALL,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {**YARN, "original_max_position_embeddings": 12},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        pad_token_id=0,
    ),
    "OlmoHybrid": transformers.OlmoHybridConfig(
        **SMALL | {"hidden_size": 64} | test_experts.HYBRID, rope_parameters=ROTARY, pad_token_id=0
    ),
    "OlmoHybrid without positions": transformers.OlmoHybridConfig(
        **SMALL,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        rope_parameters={"rope_theta": None, "rope_type": "default"},
        linear_allow_neg_eigval=False,
        pad_token_id=0,
    ),
    "Phi3": transformers.Phi3Config(
        **SMALL,
        rope_parameters={**ROTARY, "partial_rotary_factor": 0.75},
        sliding_window=6,
        pad_token_id=0,
    ),
    "StableLm": transformers.StableLmConfig(
        **SMALL,
        rope_parameters={**ROTARY, "partial_rotary_factor": 0.25},
        use_qkv_bias=True,
    ),
    "Qwen3_5": transformers.Qwen3_5TextConfig(
        **SMALL | test_experts.HYBRID,
        rope_parameters={**ROTARY, "partial_rotary_factor": 0.25},
    ),
    "Llama with YaRN": transformers.LlamaConfig(
        **SMALL, rope_parameters={**YARN, "original_max_position_embeddings": 12}
    ),
    "Llama with a factor of YaRN": transformers.LlamaConfig(
        **SMALL,
        mlp_bias=True,
        rope_parameters={
            **YARN,
            "original_max_position_embeddings": 12,
            "attention_factor": 1.7,
            "truncate": False,
        },
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_dense_families_have_the_logits_of_transformers_both_ways(name, tokens, tmp_path):
    architecture = assert_same_both_ways(FOREIGN[name], tokens, tmp_path)
    # A Mistral without a window is a Llama.
    own = f"{name.split()[0]}ForCausalLM"
    assert architecture == own or name == "Mistral without a window"


def test_the_text_of_a_mistral_with_images_is_imported(tokens, tmp_path):
    """As the published files of Ministral 3."""
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    whole = transformers.Mistral3Config(
        text_config=deepcopy(FOREIGN["Ministral3"]).to_dict(),
        vision_config=images | {"model_type": "pixtral", "num_attention_heads": 2},
        image_token_index=3,
    )
    torch.manual_seed(0)
    theirs = transformers.Mistral3ForConditionalGeneration(whole).eval()
    for parameter in theirs.model.language_model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    theirs.save_pretrained(tmp_path)
    assert_same_logits(loaded(*import_model(tmp_path)), theirs, tokens)


def test_an_olmo_hybrid_is_read_with_the_names_of_transformers_as_well(tmp_path):
    theirs = transformers.AutoModelForCausalLM.from_config(FOREIGN["OlmoHybrid"])
    theirs.save_pretrained(tmp_path / "published")
    theirs.save_pretrained(tmp_path / "own", save_original_format=False)
    (config, weights), (other, same) = (import_model(tmp_path / n) for n in ("published", "own"))
    assert other == config
    assert all(torch.equal(same[name], weights[name]) for name in weights)


SCALED = FOREIGN | {
    "Llama": transformers.LlamaConfig(**PLAIN),
    # YaRN of transformers' Mixtral needs the size.
    **{name: deepcopy(config) for name, config in test_experts.FOREIGN.items()},
    "MixtralForCausalLM": transformers.MixtralConfig(**test_experts.SMALL, head_dim=8),
}
UNSCALED = {"Phi3", "Ministral3", *(name for name in FOREIGN if " " in name)}
SCALINGS = {
    "linear": {"factor": 8.0},
    "yarn": {"factor": 4.0, "beta_fast": 3.0, "original_max_position_embeddings": 12},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 32},
}


def each_scaling():
    """Each family with one kind in turn, and with the others if `--exhaustive`."""
    for number, name in enumerate(name for name in SCALED if name not in UNSCALED):
        for i, kind in enumerate(SCALINGS):
            marks = () if (number + i) % len(SCALINGS) == 0 else pytest.mark.exhaustive
            yield pytest.param(name, kind, marks=marks)


@pytest.mark.parametrize(("name", "kind"), each_scaling())
def test_each_scaling_that_an_import_takes_has_the_same_logits_both_ways(
    name, kind, tokens, tmp_path
):
    """Phi-3, GPT-NeoX and GPT-2 have none, and Ministral 3 always has YaRN."""
    config = deepcopy(SCALED[name])
    rope = config.rope_parameters
    scaled = {"rope_theta": 100.0, "rope_type": kind, **SCALINGS[kind]}
    kept = {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
    is_by_layer = "full_attention" in rope
    config.rope_parameters = rope | {"full_attention": scaled} if is_by_layer else kept | scaled
    assert_same_both_ways(config, tokens, tmp_path)


def test_a_gemma_3_of_transformers_4_is_read_as_well(tmp_path):
    FOREIGN["Gemma3"].save_pretrained(tmp_path)
    change_config(
        tmp_path,
        rope_parameters=...,
        layer_types=...,
        sliding_window_pattern=3,
        rope_theta=5000.0,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    old = described_model(tmp_path)[1]
    FOREIGN["Gemma3"].save_pretrained(tmp_path)
    assert old == described_model(tmp_path)[1]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "Qwen2 with windows",
            {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            "layer_types: .*, need sliding_attention, with full_attention in the last of every n",
        ),
        (
            "OlmoHybrid",
            {"layer_types": ["linear_attention"] * 3},
            "layer_types: .*, need linear_attention and full_attention",
        ),
        (
            "Ministral3",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_type: 'linear', need 'yarn'",
        ),
        ("Gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping: 5.0, need None"),
        (
            "Olmo3",
            {"rope_parameters": {"sliding_attention": YARN}},
            "rope_parameters: 'yarn', need default in sliding_attention, or the same as in full",
        ),
        ("Phi3", {"rope_parameters": {"rope_type": "longrope"}}, "'longrope', need 'default'"),
        ("StableLm", {"qk_layernorm": True}, "qk_layernorm: True, need False"),
        ("SmolLM3", {"no_rope_layers": [0, 1, 1]}, r"no_rope_layers: \[0, 1, 1\], need 1, with 0"),
    ],
)
def test_what_gpt_cannot_express_is_refused_by_key(name, change, message, tmp_path):
    FOREIGN[name].save_pretrained(tmp_path)
    change_config(tmp_path, **change)
    with pytest.raises(UserError, match=message):
        import_model(tmp_path)


def test_no_family_ignores_an_option(make_config, tmp_path):
    """What no family has is refused, and named."""
    llama = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
    for key, value in (
        ("attention", AttentionConfig(sinks=True)),
        ("attention", AttentionConfig(window=4, global_every=2)),
        ("norm_unit_offset", True),
        ("logit_softcap", 3.0),
        ("scale_embedding", True),
    ):
        with pytest.raises(UserError, match=rf"model\.{key}.* cannot be exported: .*Llama"):
            export_model(make_config(**{**llama, key: value}), {}, tmp_path / "out")


def test_every_family_has_a_test():
    tested = {config.model_type for config in FOREIGN.values()}
    others = {"gpt2", "llama", "gpt_neox"}
    others |= {config.model_type for config in test_experts.FOREIGN.values()}
    assert tested | others == set(FAMILIES)
