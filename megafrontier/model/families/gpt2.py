"""GPT-2: learned positions, sequential blocks, linear layers stored input-first."""

from typing import Any

from megafrontier.config import ModelConfig
from megafrontier.model.families.base import (
    Need,
    Settings,
    Translation,
    both_ends,
    gelu_name,
    plain_heads,
    read_gelu,
    same,
    same_linear,
)
from megafrontier.model.sizes import ffn_hidden


class GPT2:
    """`GPT2LMHeadModel`."""

    architecture = "GPT2LMHeadModel"
    model_type = "gpt2"
    prefix = "transformer."
    head = "lm_head.weight"

    def needs(self, config: ModelConfig) -> list[Need]:
        """Its normalisation, activations, residual order and heads."""
        return [
            Need("norm", config.norm, ("layernorm",)),
            Need("activation", config.activation, ("gelu", "gelu_tanh")),
            Need("parallel_residual", config.parallel_residual, (False,)),
            *plain_heads(config),
        ]

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """GPT2Config's keys."""
        return {
            "n_layer": config.layers,
            "n_embd": config.hidden,
            "n_head": config.heads,
            "n_inner": ffn_hidden(config),
            "n_positions": config.sequence_length,
            "activation_function": gelu_name(config),
            "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "initializer_range": config.init_std,
        }

    def read_config(self, settings: Settings) -> ModelConfig:
        """From GPT2Config's keys and defaults; dropout is that of the residual branches."""
        settings.one_of("scale_attn_weights", True, True)
        settings.one_of("scale_attn_by_inverse_layer_idx", False, False)
        settings.one_of("add_cross_attention", False, False)
        hidden = _size(settings, "hidden_size", "n_embd", 768)
        return ModelConfig(
            layers=_size(settings, "num_hidden_layers", "n_layer", 12),
            hidden=hidden,
            heads=_size(settings, "num_attention_heads", "n_head", 12),
            ffn_hidden=settings.integer("n_inner", 4 * hidden),
            sequence_length=_size(settings, "max_position_embeddings", "n_positions", 1024),
            vocab_size=settings.integer("vocab_size", 50257),
            activation=read_gelu(settings, "activation_function", "gelu_new"),
            norm_eps=settings.number("layer_norm_epsilon", 1e-5),
            dropout=float(settings.number("resid_pdrop", 0.1)),
            tie_embeddings=settings.flag("tie_word_embeddings", True),
            init_std=settings.number("initializer_range", 0.02),
        )

    def tensors(self, config: ModelConfig) -> list[Translation]:
        """Queries, keys and values are packed here as in GPT-2, once transposed."""
        found = [*both_ends(config, "wte.weight"), same("embedding.positions.weight", "wpe.weight")]
        for i in range(config.layers):
            ours, theirs = f"blocks.{i}", f"h.{i}"
            found += same_linear(f"{ours}.norm1", f"{theirs}.ln_1")
            found += _conv1d(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn")
            found += _conv1d(f"{ours}.attention.out", f"{theirs}.attn.c_proj")
            found += same_linear(f"{ours}.norm2", f"{theirs}.ln_2")
            found += _conv1d(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc")
            found += _conv1d(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj")
        return [*found, *same_linear("head.norm", "ln_f")]


def _size(settings: Settings, general: str, own: str, default: int) -> int:
    """Of a size that `transformers` also knows by the name it has elsewhere, which comes first."""
    return settings.integer(general, settings.integer(own, default))


def _conv1d(ours: str, theirs: str) -> list[Translation]:
    """GPT-2's `Conv1D` holds its weight as [in, out]."""
    weight = Translation(
        f"{ours}.weight", (f"{theirs}.weight",), lambda t: (t.t(),), lambda ts: ts[0].t()
    )
    return [weight, same(f"{ours}.bias", f"{theirs}.bias")]
