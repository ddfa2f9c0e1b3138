"""Llama: RMSNorm, SwiGLU, full rotary positions, grouped heads, one tensor per projection."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megafrontier.config import ModelConfig, RotaryScalingConfig
from megafrontier.model.families.base import (
    Need,
    Settings,
    Translation,
    both_ends,
    same,
    same_linear,
)
from megafrontier.model.sizes import ffn_hidden, head_size, kv_heads, rotary_size

LLAMA3 = "llama3"
"""rope_type of Llama 3.1 and 3.2."""


class Llama:
    """`LlamaForCausalLM`."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"
    prefix = "model."
    head = "lm_head.weight"

    def needs(self, config: ModelConfig) -> list[Need]:
        """Its normalisation, activation, residual order, and heads that rotate whole."""
        size = head_size(config)
        return [
            Need("norm", config.norm, ("rmsnorm",)),
            Need("activation", config.activation, ("swiglu",)),
            Need("parallel_residual", config.parallel_residual, (False,)),
            Need("rotary_fraction", rotary_size(config) / size, (1.0,)),
            # LlamaConfig wants this even where head_dim is given.
            Need("heads", config.heads, _divisors(config.hidden)),
        ]

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """LlamaConfig's keys; rotary ones both as transformers 4 and as 5 read them."""
        scaling = _write_scaling(config.rotary_scaling)
        return {
            "num_hidden_layers": config.layers,
            "hidden_size": config.hidden,
            "num_attention_heads": config.heads,
            "num_key_value_heads": kv_heads(config),
            "head_dim": head_size(config),
            "intermediate_size": ffn_hidden(config),
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

    def read_config(self, settings: Settings) -> ModelConfig:
        """From LlamaConfig's keys and defaults; dropout is that of attention."""
        settings.one_of("hidden_act", "silu", "silu", "swish")
        bias = settings.flag("attention_bias", False)
        settings.one_of("mlp_bias", False, bias)
        rope = settings.rope("rope_theta", "partial_rotary_factor", 1.0, LLAMA3)
        if rope.fraction != 1.0:
            raise settings.error("partial_rotary_factor", rope.fraction, "need 1.0")
        hidden = settings.integer("hidden_size", 4096)
        heads = settings.integer("num_attention_heads", 32)
        size = settings.integer("head_dim", hidden // heads)
        return ModelConfig(
            layers=settings.integer("num_hidden_layers", 32),
            hidden=hidden,
            heads=heads,
            kv_heads=settings.integer("num_key_value_heads", heads),
            head_size=None if size * heads == hidden else size,
            ffn_hidden=settings.integer("intermediate_size", 11008),
            sequence_length=settings.integer("max_position_embeddings", 2048),
            vocab_size=settings.integer("vocab_size", 32000),
            norm="rmsnorm",
            norm_eps=settings.number("rms_norm_eps", 1e-6),
            activation="swiglu",
            position="rotary",
            rotary_base=rope.base,
            rotary_scaling=rope.scaling,
            tie_embeddings=settings.flag("tie_word_embeddings", False),
            bias=bias,
            dropout=float(settings.number("attention_dropout", 0.0)),
            init_std=settings.number("initializer_range", 0.02),
        )

    def tensors(self, config: ModelConfig) -> list[Translation]:
        """Projections that are packed here are apart there."""
        inner, kv_inner = (n * head_size(config) for n in (config.heads, kv_heads(config)))
        width = ffn_hidden(config)
        found = both_ends(config, "embed_tokens.weight")
        for i in range(config.layers):
            ours, theirs = f"blocks.{i}", f"layers.{i}"
            attention = {"q": inner, "k": kv_inner, "v": kv_inner}
            found += _packed(
                f"{ours}.attention.qkv",
                {f"{theirs}.self_attn.{p}_proj": rows for p, rows in attention.items()},
            )
            found += same_linear(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj")
            found += _packed(
                f"{ours}.mlp.up", {f"{theirs}.mlp.{p}_proj": width for p in ("gate", "up")}
            )
            found += same_linear(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj")
            found.append(same(f"{ours}.norm1.weight", f"{theirs}.input_layernorm.weight"))
            found.append(same(f"{ours}.norm2.weight", f"{theirs}.post_attention_layernorm.weight"))
        found.append(same("head.norm.weight", "norm.weight"))
        return found if config.bias else [t for t in found if not t.ours.endswith(".bias")]


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


def _packed(ours: str, rows: dict[str, int]) -> list[Translation]:
    """Weight and bias whose rows are, one after the other, those of several tensors there."""

    def export(tensor: Tensor) -> Sequence[Tensor]:
        return tensor.split(list(rows.values()))

    def load(tensors: Sequence[Tensor]) -> Tensor:
        for (name, wanted), tensor in zip(rows.items(), tensors, strict=True):
            if tensor.shape[0] != wanted:
                raise ValueError(f"{name} has {tensor.shape[0]} rows, not {wanted}")
        return torch.cat(list(tensors))

    return [
        Translation(f"{ours}.{part}", tuple(f"{name}.{part}" for name in rows), export, load)
        for part in ("weight", "bias")
    ]


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)
