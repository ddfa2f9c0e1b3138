"""Mixtures of experts both ways, with the logits of transformers."""

from dataclasses import replace

import pytest
import torch
import transformers

from megafrontier.common.errors import UserError
from megafrontier.config import MoEConfig
from megafrontier.model.families.hf_io import export_model, import_model
from megafrontier.model.gpt import GPT
from tests.model.families.conftest import (
    assert_same_logits,
    change_config,
    load_reference,
    loaded,
)
from tests.model.families.test_families import ROTARY, SMALL_LLAMA

SMALL = SMALL_LLAMA | {
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rope_parameters": ROTARY,
}
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
    "OlmoeForCausalLM": transformers.OlmoeConfig(**SMALL, num_experts=6, router_aux_loss_coef=0.0),
}


@pytest.mark.parametrize("architecture", FOREIGN)
def test_mixtures_have_the_logits_of_transformers_both_ways(architecture, tokens, tmp_path):
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(FOREIGN[architecture]).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    config, weights = import_model(tmp_path / "theirs")
    ours = loaded(config, dict(GPT(config).named_buffers()) | weights)
    assert_same_logits(ours, theirs, tokens)
    assert export_model(config, weights, tmp_path / "back") == architecture
    assert_same_logits(ours, load_reference(tmp_path / "back"), tokens)
    again, same = import_model(tmp_path / "back")
    assert again == config
    assert all(torch.equal(same[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"balance": "bias"}, "model.moe.balance: bias .* Mixtral.*, which needs loss or none"),
        ({"router": "sigmoid"}, "model.moe.router: sigmoid .* needs softmax"),
        ({"every": 2}, "model.moe.every: 2 .* needs 1"),
        ({"normalise": False}, "model.moe.normalise: False .* needs True"),
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
