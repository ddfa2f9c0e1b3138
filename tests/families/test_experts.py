"""Mixtures of experts both ways, with the logits of transformers."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megafrontier.commands.convert import export_command, import_command
from megafrontier.common.errors import UserError
from megafrontier.config import MoEConfig, PredictionConfig
from megafrontier.families.hf_io import export_model, import_model
from megafrontier.model.gpt import GPT
from tests.families.conftest import (
    assert_same_both_ways,
    assert_same_logits,
    change_config,
    change_tensors,
    load_reference,
    loaded,
)
from tests.families.test_families import ROTARY, SMALL_LLAMA
from tests.model.small_models import LATENT_QUERIES, PREDICTION, filled, small_config

SMALL = SMALL_LLAMA | {
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rope_parameters": ROTARY,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 3.0,
    "original_max_position_embeddings": 12,
    "mscale_all_dim": 0.9,
}
GROUPED = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
LATENT = SMALL_LLAMA | {
    **GROUPED,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-6,
}
HYBRID = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
GATED = (
    SMALL_LLAMA
    | HYBRID
    | {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rope_parameters": ROTARY | {"partial_rotary_factor": 0.25},
        "num_experts": 6,
        "moe_intermediate_size": 12,
    }
)
FOREIGN = {
    "MixtralForCausalLM": transformers.MixtralConfig(
        **SMALL, num_local_experts=6, router_aux_loss_coef=0.02
    ),
    "Qwen2MoeForCausalLM": transformers.Qwen2MoeConfig(
        **SMALL | {"num_hidden_layers": 3, "num_experts_per_tok": 3},
        num_experts=6,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=2,
    ),
    "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig(
        **SMALL, num_experts=6, moe_intermediate_size=16, norm_topk_prob=True, head_dim=16
    ),
    "Qwen3_5MoeForCausalLM": transformers.Qwen3_5MoeTextConfig(
        **GATED, num_experts_per_tok=3, shared_expert_intermediate_size=12
    ),
    "Qwen3NextForCausalLM": transformers.Qwen3NextConfig(
        **GATED,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=24,
        decoder_sparse_step=2,
        norm_topk_prob=False,
    ),
    "GptOssForCausalLM": transformers.GptOssConfig(
        **SMALL
        | {
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "rope_parameters": ROTARY | YARN | {"truncate": False, "mscale_all_dim": None},
        },
        head_dim=16,
        num_local_experts=6,
        sliding_window=5,
    ),
    "DeepseekV2ForCausalLM": transformers.DeepseekV2Config(
        **LATENT,
        rope_parameters=ROTARY | YARN,
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        routed_scaling_factor=4.0,
    ),
    "DeepseekV3ForCausalLM": transformers.DeepseekV3Config(
        **LATENT, rope_parameters=ROTARY | YARN | {"mscale": 0.7}, q_lora_rank=16
    ),
    "Glm4MoeForCausalLM": transformers.Glm4MoeConfig(
        **SMALL_LLAMA | GROUPED | {"num_hidden_layers": 3, "num_key_value_heads": 2},
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        rope_parameters=ROTARY | {"partial_rotary_factor": 0.5},
    ),
    "OlmoeForCausalLM": transformers.OlmoeConfig(**SMALL, num_experts=6, router_aux_loss_coef=0.0),
}


@pytest.mark.parametrize("architecture", FOREIGN)
def test_mixtures_have_the_logits_of_transformers_both_ways(architecture, tokens, tmp_path):
    found = assert_same_both_ways(FOREIGN[architecture], tokens, tmp_path)
    # A Qwen3.5 with experts is a Qwen3-Next.
    assert found == architecture.replace("Qwen3_5Moe", "Qwen3Next")


def test_latent_attention_without_experts_is_a_deepseek_v3(tokens, tmp_path):
    """The files have its prediction of later tokens, which transformers ignores."""
    config = small_config(**LATENT_QUERIES | PREDICTION, norm_eps=1e-6, vocab_multiple=1)
    ours = filled(config)
    assert export_model(config, ours.state_dict(), tmp_path) == "DeepseekV3ForCausalLM"
    assert_same_logits(ours, load_reference(tmp_path, "model.layers.2."), tokens)
    again, weights = import_model(tmp_path)
    assert again.prediction == PredictionConfig()
    assert weights.keys() == dict(ours.named_parameters()).keys()
    for name, value in ours.named_parameters():
        assert torch.equal(weights[name][: len(value)], value)  # an import pads the vocabulary


def test_the_block_that_predicts_later_tokens_comes_with_an_import(tokens, tmp_path):
    """The files of DeepSeek have it as one more layer, which transformers ignores."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(FOREIGN["DeepseekV3ForCausalLM"]).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    theirs.save_pretrained(tmp_path)
    layer, size = "model.layers.2", theirs.config.hidden_size
    enorm, hnorm, norm = torch.randn(3, size)
    projection, head = torch.randn(size, 2 * size), theirs.lm_head.weight.detach()
    change_tensors(
        tmp_path,
        **{
            f"{layer}.enorm.weight": enorm,
            f"{layer}.hnorm.weight": hnorm,
            f"{layer}.eh_proj.weight": projection,
            f"{layer}.shared_head.norm.weight": norm,
            f"{layer}.embed_tokens.weight": theirs.model.embed_tokens.weight.detach().clone(),
            f"{layer}.shared_head.head.weight": head.clone(),
        },
    )
    change_config(tmp_path, num_hidden_layers=2, num_nextn_predict_layers=1)
    config, weights = import_model(tmp_path)
    assert (config.layers, config.prediction) == (2, PredictionConfig())
    ours = loaded(config, dict(GPT(config).named_buffers()) | weights).train()
    ours(tokens, tokens)

    def normed(values, weight):
        return torch.nn.functional.rms_norm(values, (size,), weight, 1e-6)

    with torch.no_grad():
        hidden = theirs(tokens, output_hidden_states=True).hidden_states[2]
        following = theirs.model.embed_tokens(tokens.roll(-1, 1))
        both = torch.cat([normed(following, enorm), normed(hidden, hnorm)], -1)
        places = torch.arange(tokens.shape[1])[None]
        rotary = theirs.model.rotary_emb(both, places)
        made = theirs.model.layers[2](both @ projection.t(), position_embeddings=rotary)
        logits = normed(made, norm) @ head.t()
        expected = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
    found, count = ours.head.prediction.take(torch.device("cpu")).tolist()
    assert count == tokens[:, 1:].numel()
    assert found == pytest.approx(expected.item(), rel=1e-5)
    export_model(config, weights, tmp_path / "back")
    again, same = import_model(tmp_path / "back")
    assert again == config
    assert all(torch.equal(same[name], weights[name]) for name in weights)
    change_tensors(tmp_path, **{f"{layer}.shared_head.head.weight": head + 1})
    with pytest.raises(UserError, match=r"shared_head\.head\.weight: not the values of"):
        import_model(tmp_path)
    theirs.save_pretrained(tmp_path / "without")
    change_config(tmp_path / "without", num_nextn_predict_layers=1)
    assert import_model(tmp_path / "without")[0].prediction is None


def test_the_text_of_a_model_of_images_with_stacked_experts_is_imported(tokens, tmp_path):
    """As the published files of Qwen3.5."""
    text = {
        key: getattr(FOREIGN["Qwen3_5MoeForCausalLM"], key)
        for key in (*GATED, "num_experts_per_tok", "shared_expert_intermediate_size")
        if key != "intermediate_size"
    }
    images = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    whole = transformers.Qwen3_5MoeConfig(
        text_config=text, vision_config=images | {"out_hidden_size": 32}, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    theirs = transformers.Qwen3_5MoeForConditionalGeneration(whole).eval()
    for parameter in theirs.model.language_model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in names
    config, weights = import_model(tmp_path)
    assert config.tie_embeddings
    ours = loaded(config, dict(GPT(config).named_buffers()) | weights)
    assert_same_logits(ours, theirs, tokens)


def test_the_block_of_qwen3_next_that_predicts_later_tokens_is_left_out(tmp_path):
    """Published files have it, and transformers ignores it as well."""
    theirs = transformers.AutoModelForCausalLM.from_config(FOREIGN["Qwen3NextForCausalLM"])
    theirs.save_pretrained(tmp_path)
    before = import_model(tmp_path)
    change_tensors(tmp_path, **{"mtp.fc.weight": torch.ones(32, 64)})
    config, weights = import_model(tmp_path)
    assert (config, weights.keys()) == (before[0], before[1].keys())


def test_experts_in_mxfp4_are_imported_as_bf16(tmp_path):
    """As in the published files of gpt-oss."""
    sizes = {"intermediate_size": 64, "num_hidden_layers": 1, "num_key_value_heads": 2}
    sizes |= {"num_local_experts": 3, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**SMALL_LLAMA | sizes)
    config.quantization_config = {"quant_method": "mxfp4"}
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    generator, packed = torch.Generator().manual_seed(0), {}
    for name, outputs, inputs in (("gate_up_proj", 128, 32), ("down_proj", 32, 64)):
        shape = 3, outputs, inputs // 32
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(100, 150, shape, dtype=torch.uint8, generator=generator)
        packed[name] = blocks, scales
    prefix = "model.layers.0.mlp.experts."
    expected = {name: convert_moe_packed_tensors(*both) for name, both in packed.items()}
    change_tensors(tmp_path, **{prefix + name: values for name, values in expected.items()})
    plain = {name: values.clone() for name, values in import_model(tmp_path)[1].items()}
    path = tmp_path / "model.safetensors"
    kept = {k: v for k, v in load_file(path).items() if k.removeprefix(prefix) not in packed}
    for name, (blocks, scales) in packed.items():
        kept |= {f"{prefix}{name}_blocks": blocks, f"{prefix}{name}_scales": scales}
    save_file(kept, path)
    weights = import_model(tmp_path)[1]
    assert {weights[f"blocks.0.mlp.experts.{name}"].dtype for name in ("up", "down")} == {
        torch.bfloat16
    }
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    change_tensors(tmp_path, **{f"{prefix}down_proj_scales": packed["gate_up_proj"][1]})
    with pytest.raises(UserError, match=r"down_proj: blocks and scales \[.*, not uint8"):
        import_model(tmp_path)
    change_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="quant_method: 'fp8', need 'mxfp4'"):
        import_model(tmp_path)


def test_biases_of_routers_come_with_an_import_and_leave_with_an_export(tmp_path):
    theirs = transformers.AutoModelForCausalLM.from_config(FOREIGN["DeepseekV3ForCausalLM"])
    bias = theirs.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
    theirs.save_pretrained(tmp_path / "theirs")
    run = import_command(tmp_path / "theirs", tmp_path / "run", "none")
    export_command(run, tmp_path / "back", "bf16")
    found = load_file(tmp_path / "back" / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(found[name], bias)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"balance": "bias"}, "model.moe.balance: bias .* Mixtral.*, which needs loss or none"),
        ({"router": "sigmoid"}, "model.moe.balance: none .* Glm4Moe.*, which needs bias"),
        ({"every": 2}, "model.moe.every: 2 .* needs 1"),
        ({"normalise": False}, "model.moe.normalise: False .* needs True"),
        ({"bias": True}, "model.activation: swiglu .* GptOss.*, which needs swiglu_clipped"),
        ({"shared_experts": 1}, "model.moe.shared_gate: False .* Qwen2Moe.* needs True"),
    ],
)
def test_a_mixture_of_no_family_is_refused_by_key(change, message, make_config, tmp_path):
    llama = make_config(position="rotary", norm="rmsnorm", activation="swiglu", bias=False)
    config = replace(llama, moe=replace(MoEConfig(balance="none"), **change))
    with pytest.raises(UserError, match=message):
        export_model(config, {}, tmp_path / "out")


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("MixtralForCausalLM", {"sliding_window": 8}, "sliding_window: 8, need null, or at least"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv: 8.0, need None"),
        (
            "Qwen2MoeForCausalLM",
            {"shared_expert_intermediate_size": 24},
            r"shared_expert_intermediate_size: 24, need a multiple of moe_intermediate_size \(16\)",
        ),
        (
            "Qwen3NextForCausalLM",
            {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
            "layer_types: .*, need linear_attention or full_attention for each of 3 layers",
        ),
        ("GptOssForCausalLM", {"swiglu_limit": 5.0}, "swiglu_limit: 5.0, need 7.0"),
        ("GptOssForCausalLM", {"rope_parameters": None}, "rope_parameters: None, need the rotary"),
        ("Qwen3_5MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob: False, need True"),
        (
            "Glm4MoeForCausalLM",
            {"first_k_dense_replace": 3},
            r"first_k_dense_replace: 3, need less than num_hidden_layers \(3\)",
        ),
        ("DeepseekV3ForCausalLM", {"rope_interleave": False}, "rope_interleave: False, need True"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob: True, need False"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, r"mlp_only_layers: \[0\], need \[\]"),
    ],
)
def test_a_mixture_that_gpt_cannot_express_is_refused_by_key(
    architecture, change, message, tmp_path
):
    FOREIGN[architecture].save_pretrained(tmp_path)
    change_config(tmp_path, **change)
    with pytest.raises(UserError, match=message):
        import_model(tmp_path)
