"""DeepSeek-V2 and V3: multi-head latent attention, with the mixtures of `grouped.py`."""

from collections.abc import Sequence
from dataclasses import replace
from math import log, sqrt
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from megafrontier.config import (
    AttentionConfig,
    ExpertGroupsConfig,
    LatentConfig,
    ModelConfig,
    MoEConfig,
)
from megafrontier.families.base import Constraint, HFConfigReader, ParamMapping, same
from megafrontier.families.llama import Llama, attention_names
from megafrontier.families.mixtures.grouped import GroupedExperts

LATENT_EPS = 1e-6
"""transformers has no other epsilon for norms of latents."""


class DeepseekV3(GroupedExperts):
    """`DeepseekV3ForCausalLM`. Without experts, V2 is exported as V3 as well."""

    architecture = "DeepseekV3ForCausalLM"
    model_type = "deepseek_v3"
    defaults: ClassVar[dict[str, float]] = {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "intermediate_size": 18432,
        "max_position_embeddings": 4096,
        "vocab_size": 129280,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    }

    def matches(self, config: ModelConfig) -> bool:
        """Latent attention, and its router."""
        is_latent = config.attention.latent is not None
        return is_latent and (config.moe is None or config.moe.router == self.router)

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Latent attention without biases; shared experts; experts in all blocks but the first."""
        no, moe = (False,), config.moe
        more: dict[str, Sequence[Any] | None] = {
            "attention.latent": ("given",),
            "attention.scale": (None,) if config.rotary_scaling is None else None,
            "rotary_fraction": None,
            "qkv_bias": no,
            "attention.out_bias": no,
            "mlp.bias": no,
            "moe": None,
        }
        found = self._constraints(config, more)
        found.append(Constraint("norm_eps", config.norm_eps, (LATENT_EPS,)))
        return found if moe is None else [*found, *self.routing(moe)]

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """The keys of Llama, of latents and of experts."""
        latent, moe, keys = _latent(config), config.moe, Llama.write_config(self, config)
        if config.rotary_scaling is not None and config.attention.scale is not None:
            ratio = sqrt(config.attention.scale / latent.head_size**-0.5)
            scale = round((ratio - 1) / (0.1 * log(config.rotary_scaling.factor)), 9)
            for key in ("rope_scaling", "rope_parameters"):
                keys[key] = {**keys[key], "mscale_all_dim": scale}
        more = int(config.prediction is not None)
        keys |= {
            "head_dim": latent.rope_size,
            "q_lora_rank": latent.query,
            "kv_lora_rank": latent.key_value,
            "qk_rope_head_dim": latent.rope_size,
            "qk_nope_head_dim": latent.nope_size,
            "v_head_dim": latent.value_size,
            "first_k_dense_replace": config.layers + more if moe is None else moe.first,
            "num_nextn_predict_layers": more,
        }
        return keys if moe is None else keys | self.expert_keys(config)

    def read_config(self, reader: HFConfigReader) -> ModelConfig:
        """Read the keys, with the family's defaults."""
        for key in ("attention_bias", "mlp_bias"):
            reader.one_of(key, False, False)
        reader.one_of("rope_interleave", True, True)
        reader.one_of("moe_layer_freq", 1, 1)
        reader.one_of("rms_norm_eps", LATENT_EPS, LATENT_EPS)
        model, factor = self._read_common(reader, bias=False), self.rope(reader).score_factor
        reader.one_of("num_key_value_heads", model.heads, model.heads)
        sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        rank = reader.optional("q_lora_rank", self.defaults["q_lora_rank"])
        latent = LatentConfig(rank, *(self.number(reader, key) for key in sizes))
        scale = None if factor == 1 else latent.head_size**-0.5 * factor
        first = self.number(reader, "first_k_dense_replace")
        moe = None if first >= model.layers else replace(self.experts(reader), first=first)
        attention = AttentionConfig(latent=latent, scale=scale)
        model = replace(model, head_size=None, attention=attention, moe=moe)
        return replace(model, prediction=self.prediction(reader))

    def attention_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Those of a block's attention. Our heads begin with their rotary part."""
        name, hf_name = attention_names(block)
        latent = _latent(config)
        query = "q_proj" if latent.query is None else "q_b_proj"
        rope, kept = _rotary_rows(latent.rope_size), torch.arange(latent.key_value)
        heads = torch.cat([latent.nope_size + rope, torch.arange(latent.nope_size)])
        down = torch.cat([kept, latent.key_value + rope])
        plain = {
            "query_down": "q_a_proj",
            "query_latent_norm": "q_a_layernorm",
            "key_value_norm": "kv_a_layernorm",
            "key_value_up": "kv_b_proj",
            "out": "o_proj",
        }
        return [
            _ordered(f"{name}.query_up.weight", f"{hf_name}.{query}.weight", heads),
            _ordered(f"{name}.key_value_down.weight", f"{hf_name}.kv_a_proj_with_mqa.weight", down),
            *(
                same(f"{name}.{ours}.weight", f"{hf_name}.{theirs}.weight")
                for ours, theirs in plain.items()
            ),
        ]


class DeepseekV2(DeepseekV3):
    """`DeepseekV2ForCausalLM`: experts are chosen by a softmax."""

    architecture = "DeepseekV2ForCausalLM"
    model_type = "deepseek_v2"
    router: Literal["softmax", "sigmoid"] = "softmax"
    balances: tuple[str, ...] = ("loss", "none")
    normalises: tuple[bool, ...] = (False,)
    best = 1
    has_prediction = False
    defaults: ClassVar[dict[str, float]] = DeepseekV3.defaults | {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "vocab_size": 102400,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
    }

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The choice of groups, and the load-balancing loss."""
        moe = config.moe
        assert moe is not None
        is_limited = moe.groups.active < moe.groups.number
        return {
            "topk_method": "group_limited_greedy" if is_limited else "greedy",
            "aux_loss_alpha": moe.loss_coefficient if moe.balance == "loss" else 0.0,
        }

    def experts(self, reader: HFConfigReader) -> MoEConfig:
        """The experts. transformers never divides their scores by the sum."""
        reader.one_of("norm_topk_prob", False, False)
        limited, alpha = "group_limited_greedy", reader.number("aux_loss_alpha", 0.0)
        is_limited = reader.one_of("topk_method", "greedy", "greedy", limited) == limited
        return replace(
            self._experts(reader),
            balance="loss" if alpha else "none",
            loss_coefficient=alpha or 0.01,
            normalise=False,
            groups=self._groups(reader) if is_limited else ExpertGroupsConfig(),
        )


def _latent(config: ModelConfig) -> LatentConfig:
    assert config.attention.latent is not None
    return config.attention.latent


def _rotary_rows(size: int) -> Tensor:
    """Of each of our rotating dimensions, the family's, which has pairs side by side."""
    return torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])


def _ordered(name: str, hf_name: str, order: Tensor) -> ParamMapping:
    """A matrix of one or more parts, each with its rows in another order. `order`: of each of our
    rows, the family's."""

    def rows(tensor: Tensor, chosen: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, len(order)))[:, chosen].flatten(0, 1)

    return ParamMapping(
        name, (hf_name,), lambda t: (rows(t, order.argsort()),), lambda ts: rows(ts[0], order)
    )
