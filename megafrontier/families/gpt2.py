"""GPT-2: learned positions, sequential blocks, linear layers stored input-first."""

from typing import Any

from megafrontier.config import ModelConfig
from megafrontier.families.base import (
    Constraint,
    HFConfigReader,
    ParamMapping,
    constraints_of,
    embedding_and_head,
    gelu_name,
    read_gelu,
    same,
    same_module,
)


class GPT2:
    """`GPT2LMHeadModel`."""

    architecture = "GPT2LMHeadModel"
    model_type = "gpt2"
    prefix = "transformer."
    head = "lm_head.weight"
    has_prediction = False
    ignored: tuple[str, ...] = ()

    def matches(self, config: ModelConfig) -> bool:
        """Learned positions."""
        return config.position == "learned" and config.moe is None

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Its activations. Missing biases are written as zeros."""
        return constraints_of(
            config,
            {"activation": ("gelu", "gelu_tanh"), "rotary_fraction": None, "norm_bias": None},
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """GPT2Config's keys."""
        return {
            "n_layer": config.layers,
            "n_embd": config.hidden,
            "n_head": config.heads,
            "n_inner": config.mlp_hidden,
            "n_positions": config.sequence_length,
            "activation_function": gelu_name(config),
            "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "initializer_range": config.init_std,
        }

    def read_config(self, reader: HFConfigReader) -> ModelConfig:
        """Read GPT2Config's keys, with its defaults. Dropout is the residual branches'."""
        reader.one_of("scale_attn_weights", True, True)
        reader.one_of("scale_attn_by_inverse_layer_idx", False, False)
        reader.one_of("add_cross_attention", False, False)
        hidden = _size(reader, "hidden_size", "n_embd", 768)
        return ModelConfig(
            layers=_size(reader, "num_hidden_layers", "n_layer", 12),
            hidden=hidden,
            heads=_size(reader, "num_attention_heads", "n_head", 12),
            ffn_hidden=reader.number("n_inner", 4 * hidden),
            sequence_length=_size(reader, "max_position_embeddings", "n_positions", 1024),
            vocab_size=reader.number("vocab_size", 50257),
            activation=read_gelu(reader, "activation_function", "gelu_new"),
            norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            dropout=float(reader.number("resid_pdrop", 0.1)),
            tie_embeddings=reader.flag("tie_word_embeddings", True),
            init_std=reader.number("initializer_range", 0.02),
        )

    def mappings(self, config: ModelConfig) -> list[ParamMapping]:
        """GPT packs query, key and value as GPT-2 does, but transposed."""
        found = [
            *embedding_and_head(config, "wte.weight"),
            same("embedding.positions.weight", "wpe.weight"),
        ]
        for i in range(config.layers):
            name, hf_name = f"blocks.{i}", f"h.{i}"
            found += same_module(f"{name}.norm1", f"{hf_name}.ln_1")
            found += _conv1d(f"{name}.attention.qkv", f"{hf_name}.attn.c_attn")
            found += _conv1d(f"{name}.attention.out", f"{hf_name}.attn.c_proj")
            found += same_module(f"{name}.norm2", f"{hf_name}.ln_2")
            found += _conv1d(f"{name}.mlp.up", f"{hf_name}.mlp.c_fc")
            found += _conv1d(f"{name}.mlp.down", f"{hf_name}.mlp.c_proj")
        return [*found, *same_module("head.norm", "ln_f")]


def _size(reader: HFConfigReader, general: str, own: str, default: int) -> Any:
    """A size that `transformers` also reads under its general name, which comes first."""
    return reader.number(general, reader.number(own, default))


def _conv1d(name: str, hf_name: str) -> list[ParamMapping]:
    """GPT-2's `Conv1D` stores its weight as [in, out]."""
    weight = ParamMapping(
        f"{name}.weight", (f"{hf_name}.weight",), lambda t: (t.t(),), lambda ts: ts[0].t()
    )
    return [weight, same(f"{name}.bias", f"{hf_name}.bias")]
