"""Llama: RMSNorm, SwiGLU, full rotary positions, grouped heads, one tensor per projection."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from megafrontier.config import ModelConfig, RotaryScalingConfig
from megafrontier.model.families.base import (
    Constraint,
    HFConfigReader,
    ParamMapping,
    embedding_and_head,
    plain_attention,
    same,
    same_module,
)
from megafrontier.model.flops import parameter_specs

LLAMA3 = "llama3"
"""rope_type of Llama 3.1 and 3.2."""


class Llama:
    """`LlamaForCausalLM`."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"
    prefix = "model."
    head = "lm_head.weight"
    defaults: ClassVar[dict[str, float]] = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    """Of config.json's numbers."""

    def matches(self, config: ModelConfig) -> bool:
        """Rotary positions, and one of its norm and its activation."""
        gated = config.norm == "rmsnorm" or config.activation == "swiglu"
        return config.position == "rotary" and gated and config.moe is None

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Its norm, activation and residual order, and heads in which every dimension rotates."""
        return [*self._common_constraints(config), *plain_attention(config)]

    def _common_constraints(self, config: ModelConfig) -> list[Constraint]:
        size = config.head_dim
        return [
            Constraint("norm", config.norm, ("rmsnorm",)),
            Constraint("activation", config.activation, ("swiglu",)),
            Constraint("parallel_residual", config.parallel_residual, (False,)),
            Constraint("rotary_fraction", config.rotary_dims / size, (1.0,)),
        ]

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """LlamaConfig's keys. The rotary ones are written for transformers 4 and for 5."""
        scaling = _write_scaling(config.rotary_scaling)
        return {
            "num_hidden_layers": config.layers,
            "hidden_size": config.hidden,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.mlp_hidden,
            "max_position_embeddings": config.sequence_length,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps,
            "attention_bias": config.bias,
            "mlp_bias": config.bias,
            "attention_dropout": config.dropout,
            "initializer_range": config.init_std,
            "rope_theta": config.rotary_base,
            "rope_scaling": scaling,
            "rope_parameters": {
                "rope_type": "default",
                **(scaling or {}),
                "rope_theta": config.rotary_base,
            },
        }

    def read_config(self, reader: HFConfigReader) -> ModelConfig:
        """Read LlamaConfig's keys, with its defaults. Dropout is the attention's."""
        bias = reader.flag("attention_bias", False)
        reader.one_of("mlp_bias", False, bias)
        return self._read_common(reader, bias)

    def _read_common(self, reader: HFConfigReader, bias: bool) -> ModelConfig:
        reader.one_of("hidden_act", "silu", "silu", "swish")

        def number(key: str) -> Any:
            return reader.number(key, self.defaults[key])

        rope = reader.rope(
            "rope_theta", "partial_rotary_factor", 1.0, LLAMA3, base=self.defaults["rope_theta"]
        )
        if rope.fraction != 1.0:
            raise reader.error("partial_rotary_factor", rope.fraction, "need 1.0")
        hidden = number("hidden_size")
        heads = number("num_attention_heads")
        size = reader.number("head_dim", hidden // heads)
        return ModelConfig(
            layers=number("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=reader.number(
                "num_key_value_heads", self.defaults.get("num_key_value_heads", heads)
            ),
            head_size=None if size * heads == hidden else size,
            ffn_hidden=number("intermediate_size"),
            sequence_length=number("max_position_embeddings"),
            vocab_size=number("vocab_size"),
            norm="rmsnorm",
            norm_eps=number("rms_norm_eps"),
            activation="swiglu",
            position="rotary",
            rotary_base=rope.base,
            rotary_scaling=rope.scaling,
            tie_embeddings=reader.flag("tie_word_embeddings", False),
            bias=bias,
            dropout=float(reader.number("attention_dropout", 0.0)),
            init_std=reader.number("initializer_range", 0.02),
        )

    def mappings(self, config: ModelConfig) -> list[ParamMapping]:
        """One tensor per projection, where GPT packs query, key and value, and gate and up."""
        found = embedding_and_head(config, "embed_tokens.weight")
        for i in range(config.layers):
            name, hf_name = f"blocks.{i}", f"layers.{i}"
            found += _attention(config, f"{name}.attention", f"{hf_name}.self_attn")
            found += self.mlp_mappings(config, i)
            found.append(same(f"{name}.norm1.weight", f"{hf_name}.input_layernorm.weight"))
            found.append(same(f"{name}.norm2.weight", f"{hf_name}.post_attention_layernorm.weight"))
        found.append(same("head.norm.weight", "norm.weight"))
        names = parameter_specs(config)
        return [mapping for mapping in found if mapping.name in names]

    def mlp_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Those of a block's MLP."""
        return gated_mlp(f"blocks.{block}.mlp", f"layers.{block}.mlp", config.mlp_hidden)


def gated_mlp(name: str, hf_name: str, width: int) -> list[ParamMapping]:
    """The mappings of an MLP with a gate."""
    up = packed(f"{name}.up", {f"{hf_name}.{p}_proj": width for p in ("gate", "up")})
    return [*up, *same_module(f"{name}.down", f"{hf_name}.down_proj")]


def _attention(config: ModelConfig, name: str, hf_name: str) -> list[ParamMapping]:
    inner, kv_inner = (n * config.head_dim for n in (config.heads, config.num_kv_heads))
    rows = {"q": inner, "k": kv_inner, "v": kv_inner}
    return [
        *packed(f"{name}.qkv", {f"{hf_name}.{p}_proj": count for p, count in rows.items()}),
        *same_module(f"{name}.out", f"{hf_name}.o_proj"),
        same(f"{name}.query_norm.weight", f"{hf_name}.q_norm.weight"),
        same(f"{name}.key_norm.weight", f"{hf_name}.k_norm.weight"),
    ]


def _write_scaling(scaling: RotaryScalingConfig | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": LLAMA3,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency,
        "high_freq_factor": scaling.high_frequency,
        "original_max_position_embeddings": scaling.original_length,
    }


def packed(name: str, rows: dict[str, int]) -> list[ParamMapping]:
    """Weight and bias, each the rows of several of the family's tensors, one after the other."""

    def export(tensor: Tensor) -> Sequence[Tensor]:
        return tensor.split(list(rows.values()))

    def load(tensors: Sequence[Tensor]) -> Tensor:
        for (hf, wanted), tensor in zip(rows.items(), tensors, strict=True):
            if tensor.shape[0] != wanted:
                raise ValueError(f"{hf} has {tensor.shape[0]} rows, not {wanted}")
        return torch.cat(list(tensors))

    return [
        ParamMapping(f"{name}.{part}", tuple(f"{hf}.{part}" for hf in rows), export, load)
        for part in ("weight", "bias")
    ]
