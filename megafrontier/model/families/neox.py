"""GPT-NeoX: partial rotary positions, parallel or sequential blocks, heads interleaved."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megafrontier.config import ModelConfig
from megafrontier.model.families.base import (
    Need,
    Settings,
    Translation,
    both_ends,
    gelu_name,
    plain_heads,
    read_gelu,
    same_linear,
)
from megafrontier.model.sizes import ffn_hidden, head_size, rotary_size


class NeoX:
    """`GPTNeoXForCausalLM`."""

    architecture = "GPTNeoXForCausalLM"
    model_type = "gpt_neox"
    prefix = "gpt_neox."
    head = "embed_out.weight"

    def needs(self, config: ModelConfig) -> list[Need]:
        """Its normalisation, activations and heads."""
        return [
            Need("norm", config.norm, ("layernorm",)),
            Need("activation", config.activation, ("gelu", "gelu_tanh")),
            *plain_heads(config),
            Need("rotary_scaling", config.rotary_scaling, (None,)),
        ]

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """GPTNeoXConfig's keys; rotary ones both as transformers 4 and as 5 read them."""
        fraction = _fraction(config)
        return {
            "num_hidden_layers": config.layers,
            "hidden_size": config.hidden,
            "num_attention_heads": config.heads,
            "intermediate_size": ffn_hidden(config),
            "max_position_embeddings": config.sequence_length,
            "hidden_act": gelu_name(config),
            "layer_norm_eps": config.norm_eps,
            "attention_dropout": config.dropout,
            "hidden_dropout": config.dropout,
            "initializer_range": config.init_std,
            "use_parallel_residual": config.parallel_residual,
            "rotary_pct": fraction,
            "rotary_emb_base": config.rotary_base,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": config.rotary_base,
                "partial_rotary_factor": fraction,
            },
        }

    def read_config(self, settings: Settings) -> ModelConfig:
        """From GPTNeoXConfig's keys and defaults; dropout is that of the residual branches."""
        settings.one_of("attention_bias", True, True)
        rope = settings.rope("rotary_emb_base", "rotary_pct", 0.25)
        hidden = settings.integer("hidden_size", 6144)
        heads = settings.integer("num_attention_heads", 64)
        if heads > hidden:
            raise settings.error("num_attention_heads", heads, f"need at most {hidden}")
        return ModelConfig(
            layers=settings.integer("num_hidden_layers", 44),
            hidden=hidden,
            heads=heads,
            ffn_hidden=settings.integer("intermediate_size", 24576),
            sequence_length=settings.integer("max_position_embeddings", 2048),
            vocab_size=settings.integer("vocab_size", 50432),
            activation=read_gelu(settings, "hidden_act", "gelu"),
            norm_eps=settings.number("layer_norm_eps", 1e-5),
            position="rotary",
            # transformers rounds the rotating dimensions down, ModelConfig to the nearest.
            rotary_fraction=int(hidden // heads * rope.fraction) / (hidden // heads),
            rotary_base=rope.base,
            parallel_residual=settings.flag("use_parallel_residual", True),
            tie_embeddings=settings.flag("tie_word_embeddings", False),
            dropout=float(settings.number("hidden_dropout", 0.0)),
            init="neox",
            init_std=settings.number("initializer_range", 0.02),
        )

    def tensors(self, config: ModelConfig) -> list[Translation]:
        """Biases everywhere; queries, keys and values lie together head by head."""
        found = both_ends(config, "embed_in.weight")
        for i in range(config.layers):
            ours, theirs = f"blocks.{i}", f"layers.{i}"
            found += same_linear(f"{ours}.norm1", f"{theirs}.input_layernorm")
            packed = f"{theirs}.attention.query_key_value"
            found += [
                _by_head(config, f"{ours}.attention.qkv.{part}", f"{packed}.{part}")
                for part in ("weight", "bias")
            ]
            found += same_linear(f"{ours}.attention.out", f"{theirs}.attention.dense")
            found += same_linear(f"{ours}.norm2", f"{theirs}.post_attention_layernorm")
            found += same_linear(f"{ours}.mlp.up", f"{theirs}.mlp.dense_h_to_4h")
            found += same_linear(f"{ours}.mlp.down", f"{theirs}.mlp.dense_4h_to_h")
        return [*found, *same_linear("head.norm", "final_layer_norm")]


def _fraction(config: ModelConfig) -> float:
    """A fraction from which transformers, rounding down, gets our rotating dimensions."""
    wanted, size = rotary_size(config), head_size(config)
    if int(size * config.rotary_fraction) == wanted:
        return config.rotary_fraction
    return (wanted + 0.5) / size


def _by_head(config: ModelConfig, ours: str, theirs: str) -> Translation:
    """Rows [q|k|v][heads] here are rows [heads][q|k|v] there."""
    size = head_size(config)

    def export(tensor: Tensor) -> Sequence[Tensor]:
        split = tensor.unflatten(0, (3, config.heads, size))
        return (split.transpose(0, 1).flatten(0, 2),)

    def load(tensors: Sequence[Tensor]) -> Tensor:
        split = tensors[0].unflatten(0, (config.heads, 3, size))
        return split.transpose(0, 1).flatten(0, 2)

    return Translation(ours, (theirs,), export, load)
