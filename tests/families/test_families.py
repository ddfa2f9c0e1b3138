"""Each family has the logits of transformers, and what it cannot express is refused by key."""

from dataclasses import replace

import pytest
import torch
import transformers

from megafrontier.common.errors import UserError
from megafrontier.config import RotaryScalingConfig
from megafrontier.families.hf_io import export_model, import_model
from tests.families.conftest import (
    assert_same_logits,
    change_config,
    load_reference,
    loaded,
)
from tests.model.small_models import SHAPES

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROTARY = {"rope_type": "default", "rope_theta": 5000.0}
SMALL_LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 88,
    "max_position_embeddings": 24,
    "vocab_size": 50,
}
FOREIGN = {
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=24, vocab_size=50),
    "gpt2 untied, exact gelu": transformers.GPT2Config(
        n_embd=24,
        n_layer=1,
        n_head=2,
        n_inner=40,
        layer_norm_epsilon=0.01,
        n_positions=24,
        vocab_size=50,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
    "neox parallel, 4.64 rotating dimensions": transformers.GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=72,
        max_position_embeddings=24,
        vocab_size=50,
        layer_norm_eps=0.01,
        rope_parameters={**ROTARY, "partial_rotary_factor": 0.29},
    ),
    "neox sequential, tied, whole heads rotate": transformers.GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=24,
        vocab_size=50,
        hidden_act="gelu_fast",
        use_parallel_residual=False,
        tie_word_embeddings=True,
        rope_parameters={**ROTARY, "partial_rotary_factor": 1.0},
    ),
    "llama": transformers.LlamaConfig(
        **SMALL_LLAMA,
        rms_norm_eps=0.1,
        rope_parameters=ROTARY,
    ),
    "llama grouped, tied, biases, wide heads": transformers.LlamaConfig(
        **SMALL_LLAMA,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=ROTARY,
    ),
    "llama 3.1 scaling: high, low and interpolated frequencies": (
        transformers.LlamaConfig(
            **SMALL_LLAMA,
            rope_parameters={
                **LLAMA3,
                "factor": 5.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 10.0,
            },
        )
    ),
}
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "neox": "GPTNeoXForCausalLM", "llama": "Llama"}


def test_exported_logits_equal_those_of_transformers(shape, make_model, tokens, tmp_path, request):
    model = make_model(shape)
    architecture = export_model(shape, model.state_dict(), tmp_path / "out")
    family = request.node.callspec.id.split()[0]
    assert architecture.startswith(ARCHITECTURES[family])
    theirs = load_reference(tmp_path / "out")
    assert type(theirs).__name__ == architecture
    assert_same_logits(model, theirs, tokens)


@pytest.mark.parametrize("config", FOREIGN.values(), ids=FOREIGN.keys())
def test_imported_logits_equal_those_of_transformers(config, tokens, tmp_path):
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    theirs.save_pretrained(tmp_path)
    assert_same_logits(loaded(*import_model(tmp_path)), theirs, tokens)


def test_an_exported_model_is_imported_unchanged(shape, make_model, tmp_path):
    shape.vocab_multiple = 128
    weights = make_model(shape).state_dict()
    for name in ("embedding.tokens.weight", "head.output.weight"):
        if name in weights:
            weights[name][shape.vocab_size :] = 0
    export_model(shape, weights, tmp_path / "out")
    config, back = import_model(tmp_path / "out")
    assert list(back) == list(weights)
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    sizes = {"ffn_hidden": config.ffn_hidden, "kv_heads": config.kv_heads}
    assert config == replace(shape, **sizes, init=config.init)


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": False},
        {"bias": False, "position": "rotary", "rotary_fraction": 0.5},
        # 0.24 of 8 dimensions is 1.92: we round it to 2, transformers to 1.
        {"position": "rotary", "rotary_fraction": 0.24},
    ],
    ids=["gpt2 without biases", "neox without biases", "a fraction that we round up"],
)
def test_what_a_family_writes_otherwise_gives_the_same_logits(
    changes, make_config, make_model, tokens, tmp_path
):
    """A model without biases gets zero biases if its family always has them."""
    model = make_model(make_config(**changes))
    export_model(model.config, model.state_dict(), tmp_path / "out")
    theirs = load_reference(tmp_path / "out")
    assert_same_logits(model, theirs, tokens)
    assert_same_logits(loaded(*import_model(tmp_path / "out")), theirs, tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "rmsnorm"}, "model.norm: rmsnorm .* GPT2LMHeadModel, which needs layernorm"),
        ({"activation": "swiglu"}, "model.activation: swiglu .* needs gelu or gelu_tanh"),
        ({"activation": "relu2"}, "model.activation: relu2 .* needs gelu or gelu_tanh"),
        ({"parallel_residual": True}, "model.parallel_residual: True .* needs False"),
        ({"kv_heads": 2}, "model.kv_heads: 2 .* needs 4"),
        ({"position": "rotary", "head_size": 16}, "model.head_size: 16 .* GPTNeoX.* needs 8"),
        (
            {"position": "rotary", "rotary_scaling": RotaryScalingConfig()},
            "model.rotary_scaling: .* GPTNeoX.* needs None",
        ),
        (
            {"position": "rotary", "norm": "rmsnorm"},
            "model.activation: gelu .* LlamaForCausalLM, which needs swiglu",
        ),
        (
            {
                "position": "rotary",
                "norm": "rmsnorm",
                "activation": "swiglu",
                "rotary_fraction": 0.5,
            },
            "model.rotary_fraction: 0.5 .* needs 1.0",
        ),
    ],
)
def test_a_model_of_no_family_is_refused_by_key(changes, message, make_config, tmp_path):
    with pytest.raises(UserError, match=message):
        export_model(make_config(**changes), {}, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "bert"},
            "model_type: 'bert', need 'deepseek_v2' or .*'gpt2' or 'gpt_neox'",
        ),
        ({"n_embd": "wide"}, "n_embd: 'wide', need a number"),
        ({"n_head": 5}, "model.heads: 5"),
        ({"n_layer": 3}, "transformer.h.2.ln_1.weight: missing"),
        ({"n_layer": 1}, "transformer.h.1.* not part of a GPT2LMHeadModel"),
        ({"vocab_size": 49}, "wte.weight: .*50 rows, need vocab_size"),
        ({"n_positions": 25}, r"embedding.positions.weight: shape \[24, 32\], need \(25, 32\)"),
        ({"activation_function": "relu"}, "activation_function: 'relu', need"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_key(exported, change, message):
    change_config(exported, **change)
    with pytest.raises(UserError, match=message):
        import_model(exported)


def test_the_sizes_of_a_gpt2_may_have_their_general_names(exported):
    """As in transformers, where general names come first. The weights fit any number of heads."""
    general = {"num_attention_heads": 2, "hidden_size": 32, "num_hidden_layers": 2}
    change_config(exported, **general, max_position_embeddings=24)
    assert transformers.AutoConfig.from_pretrained(exported).n_head == 2
    assert import_model(exported)[0].heads == 2
    change_config(exported, **dict.fromkeys(("n_head", "n_embd", "n_layer", "n_positions"), ...))
    found, _ = import_model(exported)
    assert (found.heads, found.hidden, found.layers, found.sequence_length) == (2, 32, 2, 24)


def test_scaled_rotary_frequencies_are_refused(make_config, make_model, tmp_path):
    config = make_config(position="rotary")
    export_model(config, make_model(config).state_dict(), tmp_path / "out")
    for scaled in ({"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}):
        change_config(tmp_path / "out", rope_parameters=None, rope_scaling=scaled)
        with pytest.raises(UserError, match=r"type: '(yarn|linear)', need 'default'"):
            import_model(tmp_path / "out")


@pytest.mark.parametrize("older", [True, False])
def test_scaled_frequencies_are_read_as_either_release_writes_them(
    make_config, make_model, tmp_path, older
):
    scaling = RotaryScalingConfig(8.0, 1.0, 4.0, 8192)
    config = make_config(**SHAPES["llama"], rotary_base=500000.0, rotary_scaling=scaling)
    export_model(config, make_model(config).state_dict(), tmp_path / "out")
    dropped = ["rope_parameters"] if older else ["rope_scaling", "rope_theta"]
    change_config(tmp_path / "out", **dict.fromkeys(dropped, ...))
    found = import_model(tmp_path / "out")[0]
    assert (found.rotary_scaling, found.rotary_base) == (scaling, 500000.0)
