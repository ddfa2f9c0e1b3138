"""Models go to `transformers` and come back, and what cannot is refused by name."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megafrontier.common.errors import UserError
from megafrontier.config import RotaryScalingConfig
from megafrontier.model.families import hf_io as huggingface
from megafrontier.model.families.hf_io import export_model, import_model
from megafrontier.model.gpt import GPT

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
    "neox parallel, 4.64 turning dimensions": transformers.GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=72,
        max_position_embeddings=24,
        vocab_size=50,
        layer_norm_eps=0.01,
        rope_parameters={**ROTARY, "partial_rotary_factor": 0.29},
    ),
    "neox sequential, tied, whole heads turn": transformers.GPTNeoXConfig(
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
    "llama 3.1: high frequencies stay, low ones turn a fifth as far, one lies between": (
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


def theirs_at(folder):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def assert_same_logits(ours, theirs, tokens):
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.1, "logits of 0 would agree whatever the model"


def loaded(config, weights):
    model = GPT(config)
    model.load_state_dict(weights)
    return model.eval()


@pytest.fixture
def exported(make_config, make_model, tmp_path):
    """A GPT-2 on disk."""
    config = make_config()
    export_model(config, make_model(config).state_dict(), tmp_path / "out")
    return tmp_path / "out"


def test_exported_logits_are_transformers(shape, make_model, tokens, tmp_path, request):
    model = make_model(shape)
    architecture = export_model(shape, model.state_dict(), tmp_path / "out")
    family = request.node.callspec.id.split()[0]
    assert architecture.startswith(ARCHITECTURES[family])
    theirs = theirs_at(tmp_path / "out")
    assert type(theirs).__name__ == architecture
    assert_same_logits(model, theirs, tokens)


@pytest.mark.parametrize("config", FOREIGN.values(), ids=FOREIGN.keys())
def test_imported_logits_are_transformers(config, tokens, tmp_path):
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    theirs.save_pretrained(tmp_path)
    assert_same_logits(loaded(*import_model(tmp_path)), theirs, tokens)


def test_there_and_back_is_the_same_model(shape, make_model, tmp_path):
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


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_a_model_without_biases_exports_where_families_have_them(
    position, make_config, make_model, tokens, tmp_path
):
    config = make_config(bias=False, position=position, rotary_fraction=0.5)
    model = make_model(config)
    export_model(config, model.state_dict(), tmp_path / "out")
    assert_same_logits(model, theirs_at(tmp_path / "out"), tokens)
    assert_same_logits(loaded(*import_model(tmp_path / "out")), theirs_at(tmp_path / "out"), tokens)


def test_a_fraction_that_rounds_up_turns_as_many_dimensions_there(
    make_config, make_model, tokens, tmp_path
):
    """0.24 of 8 dimensions is 1.92: 2 by our rounding, 1 by that of transformers."""
    config = make_config(position="rotary", rotary_fraction=0.24)
    model = make_model(config)
    export_model(config, model.state_dict(), tmp_path / "out")
    assert_same_logits(model, theirs_at(tmp_path / "out"), tokens)
    assert_same_logits(loaded(*import_model(tmp_path / "out")), theirs_at(tmp_path / "out"), tokens)


def test_large_models_are_split_and_indexed(shape, make_model, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    model = make_model(shape)
    export_model(shape, model.state_dict(), tmp_path / "out")
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 1
    assert_same_logits(model, theirs_at(tmp_path / "out"), tokens)
    assert_same_logits(loaded(*import_model(tmp_path / "out")), theirs_at(tmp_path / "out"), tokens)


def test_base_models_old_names_and_derived_buffers_are_understood(exported, make_config, tokens):
    """The files of `openai-community/gpt2`: no prefix, and causal masks among the weights."""
    path = exported / "model.safetensors"
    before = loaded(*import_model(exported))
    stored = {k.removeprefix("transformer."): v for k, v in load_file(path).items()}
    save_file({**stored, "h.0.attn.bias": torch.ones(1, 1, 24, 24)}, path)
    after = loaded(*import_model(exported))
    torch.testing.assert_close(after(tokens), before(tokens), rtol=0, atol=0)


def test_weights_are_taken_one_at_a_time(make_config, make_model, tmp_path):
    """So that a checkpoint larger than memory can be exported."""
    config = make_config()
    stored = make_model(config).state_dict()
    asked = []

    class Lazy(Mapping):
        def __getitem__(self, name):
            asked.append(name)
            return stored[name]

        def __iter__(self):
            raise AssertionError("nobody needs all names")

        def __len__(self):
            return len(stored)

    export_model(config, Lazy(), tmp_path / "out")
    assert sorted(asked) == sorted(stored)


@pytest.mark.parametrize(("pad", "told"), [(None, None), (9, 9), (10**6, None)])
def test_type_tokenizer_and_its_tokens_are_written(make_config, make_model, tmp_path, pad, told):
    """A padding token alone may lie beyond the model's: transformers would not open that."""

    class Tokenizer:
        bos, eod = 5, 7

        def __init__(self):
            self.pad = pad

        def save(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    config = make_config()
    weights = make_model(config).state_dict()
    export_model(config, weights, tmp_path / "out", Tokenizer(), torch.bfloat16)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (5, 7)
    assert written["pad_token_id"] == told
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "rmsnorm"}, "model.norm: rmsnorm .* GPT2LMHeadModel, which needs layernorm"),
        ({"activation": "swiglu"}, "model.activation: swiglu .* needs gelu or gelu_tanh"),
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
def test_what_no_family_can_express_is_refused_by_name(changes, message, make_config, tmp_path):
    with pytest.raises(UserError, match=message):
        export_model(make_config(**changes), {}, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_missing_or_misshapen_weight_leaves_nothing_behind(make_config, make_model, tmp_path):
    config = make_config()
    weights = make_model(config).state_dict()
    missing = {k: v for k, v in weights.items() if k != "blocks.1.mlp.up.weight"}
    with pytest.raises(UserError, match=r"blocks.1.mlp.up.weight: missing"):
        export_model(config, missing, tmp_path / "out")
    weights["blocks.1.mlp.up.weight"] = torch.zeros(3, 3)
    with pytest.raises(
        UserError, match=r"blocks.1.mlp.up.weight: shape \[3, 3\], need \[128, 32\]"
    ):
        export_model(config, weights, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_weight_that_a_precision_has_no_room_for_is_refused(make_config, make_model, tmp_path):
    config = make_config()
    weights = make_model(config).state_dict()
    weights["blocks.1.mlp.up.weight"][3, 5] = -1e5
    with pytest.raises(
        UserError, match=r"blocks.1.mlp.up.weight: -100000, need at most 65504 in this precision"
    ):
        export_model(config, weights, tmp_path / "out", dtype=torch.float16)
    assert not list(tmp_path.iterdir())
    export_model(config, weights, tmp_path / "out", dtype=torch.bfloat16)


def test_an_empty_folder_may_be_the_one_we_are_in(make_config, make_model, tmp_path, monkeypatch):
    config, out = make_config(), tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    export_model(config, make_model(config).state_dict(), Path())
    assert (out / "config.json").is_file()
    assert list(tmp_path.iterdir()) == [out]


def test_an_occupied_folder_is_not_overwritten(exported, make_config):
    before = (exported / "config.json").read_bytes()
    with pytest.raises(UserError, match="not an empty folder"):
        export_model(make_config(), {}, exported)
    assert (exported / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type: 'bert', need 'gpt2' or 'gpt_neox' or 'llama'"),
        ({"n_embd": "wide"}, "n_embd: 'wide', need a number"),
        ({"layer_norm_epsilon": float("inf")}, "layer_norm_epsilon: inf, need a finite number"),
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
    path = exported / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        import_model(exported)


def test_sizes_of_a_gpt2_under_their_general_names_are_read_as_transformers_does(exported):
    """The weights fit any number of heads."""
    path = exported / "config.json"
    values = json.loads(path.read_text())
    general = {"num_attention_heads": 2, "hidden_size": 32, "num_hidden_layers": 2}
    path.write_text(json.dumps(values | general | {"max_position_embeddings": 24}))
    assert transformers.AutoConfig.from_pretrained(exported).n_head == 2
    assert import_model(exported)[0].heads == 2
    for own in ("n_head", "n_embd", "n_layer", "n_positions"):
        del values[own]
    path.write_text(json.dumps(values | general | {"max_position_embeddings": 24}))
    found, _ = import_model(exported)
    assert (found.heads, found.hidden, found.layers, found.sequence_length) == (2, 32, 2, 24)


def test_scaled_rotary_frequencies_are_refused(make_config, make_model, tmp_path):
    config = make_config(position="rotary")
    export_model(config, make_model(config).state_dict(), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    values = json.loads(path.read_text())
    for scaled in ({"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}):
        path.write_text(json.dumps({**values, "rope_parameters": None, "rope_scaling": scaled}))
        with pytest.raises(UserError, match=r"type: '(yarn|linear)', need 'default'"):
            import_model(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # As transformers 4 saves what it was given for longer texts: it knows no rope_parameters.
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_type: 'linear', need"),
        ({"rope_theta": 500000.0}, "rope_theta: 500000.0, need the 10000.0 of rope_theta in"),
        (
            {"rope_scaling": LLAMA3},
            "rope_scaling: .*'llama3'.*, need the same as in rope_parameters",
        ),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "factor: None, need a number"),
    ],
)
def test_what_one_release_has_changed_and_another_one_keeps_is_refused(
    make_config, make_model, tmp_path, change, message
):
    llama = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
    config = make_config(**llama)
    export_model(config, make_model(config).state_dict(), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    values = json.loads(path.read_text())
    assert import_model(tmp_path / "out")[0].rotary_base == values["rope_theta"]
    path.write_text(json.dumps(values | change))
    with pytest.raises(UserError, match=message):
        import_model(tmp_path / "out")


@pytest.mark.parametrize("older", [True, False])
def test_frequencies_for_longer_texts_are_read_as_both_releases_write_them(
    make_config, make_model, tmp_path, older
):
    llama = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
    scaling = RotaryScalingConfig(8.0, 1.0, 4.0, 8192)
    config = make_config(**llama, rotary_base=500000.0, rotary_scaling=scaling)
    export_model(config, make_model(config).state_dict(), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    values = json.loads(path.read_text())
    for key in ["rope_parameters"] if older else ["rope_scaling", "rope_theta"]:
        del values[key]
    path.write_text(json.dumps(values))
    found = import_model(tmp_path / "out")[0]
    assert (found.rotary_scaling, found.rotary_base) == (scaling, 500000.0)


def test_a_head_that_is_not_the_embedding_it_is_said_to_be_is_refused(
    make_config, make_model, tmp_path
):
    """As after a training that untied the two; transformers keeps them apart, too."""
    config = make_config(tie_embeddings=True)
    export_model(config, make_model(config).state_dict(), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    head = tensors["transformer.wte.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, path, {"format": "pt"})
    import_model(tmp_path / "out")
    save_file({**tensors, "lm_head.weight": head + 1}, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head.weight: not the embedding's values, though"):
        import_model(tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_refused_by_folder_and_name(exported, value):
    path = exported / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 5] = value
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        UserError, match=r"out: tensor transformer\.h\.1\.mlp\.c_fc\.weight: not fin"
    ):
        import_model(exported)


def test_of_two_saves_in_one_folder_the_one_that_transformers_reads_is_read(
    make_config, make_model, tmp_path
):
    """It leaves the older index, or the older whole file, beside what it writes."""
    config, out = make_config(), tmp_path / "out"
    export_model(config, make_model(config).state_dict(), out)
    whole = theirs_at(out)
    other = transformers.GPT2LMHeadModel(whole.config)
    other.save_pretrained(tmp_path / "split", max_shard_size="10KB")
    for path in (tmp_path / "split").glob("*.safetensors*"):
        path.rename(out / path.name)
    expected = theirs_at(out).transformer.wpe.weight
    assert torch.equal(expected, whole.transformer.wpe.weight)
    assert torch.equal(import_model(out)[1]["embedding.positions.weight"], expected)
    for path in out.glob("model-*"):
        path.unlink()
    assert torch.equal(import_model(out)[1]["embedding.positions.weight"], expected)


def test_a_tensor_that_is_there_twice_is_refused(exported):
    path = exported / "model.safetensors"
    tensors = load_file(path)
    tensors["wpe.weight"] = tensors["transformer.wpe.weight"] + 1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"model.safetensors: tensor .*wpe.weight: also stored as"):
        import_model(exported)


def test_tensors_of_eight_bits_are_read_too(exported):
    path = exported / "model.safetensors"
    tensors = load_file(path)
    name = "transformer.h.1.mlp.c_fc.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, path, {"format": "pt"})
    _, found = import_model(exported)
    assert {t.dtype for t in found.values()} == {torch.float32, torch.float8_e4m3fn}


def test_damaged_folders_are_refused_by_file(exported, tmp_path):
    weights = exported / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"model.safetensors: not a complete safetensors file"):
        import_model(exported)
    weights.unlink()
    (exported / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="weights are read from safetensors only"):
        import_model(exported)
    (exported / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json: not valid JSON"):
        import_model(exported)
    with pytest.raises(UserError, match=r"config.json: cannot read: No such file"):
        import_model(tmp_path / "nowhere")
