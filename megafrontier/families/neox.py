"""GPT-NeoX and StableLM 2: layer norms and partial rotary positions."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from megafrontier.config import ModelConfig
from megafrontier.families.base import (
    Constraint,
    HFConfigReader,
    ParamMapping,
    constraints_of,
    embedding_and_head,
    gelu_name,
    read_fraction,
    read_gelu,
    same_module,
    written_fraction,
    written_part_rope,
    written_rope,
)
from megafrontier.families.llama import Llama


class NeoX:
    """`GPTNeoXForCausalLM`: parallel or sequential blocks, heads interleaved."""

    architecture = "GPTNeoXForCausalLM"
    model_type = "gpt_neox"
    prefix = "gpt_neox."
    head = "embed_out.weight"
    has_prediction = False
    ignored: tuple[str, ...] = ()

    def matches(self, config: ModelConfig) -> bool:
        """Rotary positions without Llama's norm and activation."""
        gated = config.norm == "rmsnorm" or config.activation == "swiglu"
        return config.position == "rotary" and not gated and config.moe is None

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Its activations and positions. Missing biases are written as zeros."""
        return constraints_of(
            config,
            {
                "activation": ("gelu", "gelu_tanh"),
                "position": ("rotary",),
                "rotary_fraction": None,
                "parallel_residual": None,
                "norm_bias": None,
            },
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """GPTNeoXConfig's keys. The rotary ones are written for transformers 4 and for 5."""
        fraction = written_fraction(config)
        return {
            "num_hidden_layers": config.layers,
            "hidden_size": config.hidden,
            "num_attention_heads": config.heads,
            "intermediate_size": config.mlp_hidden,
            "max_position_embeddings": config.sequence_length,
            "hidden_act": gelu_name(config),
            "layer_norm_eps": config.norm_eps,
            "attention_dropout": config.dropout,
            "hidden_dropout": config.dropout,
            "initializer_range": config.init_std,
            "use_parallel_residual": config.parallel_residual,
            "rotary_pct": fraction,
            "rotary_emb_base": config.rotary_base,
            "rope_parameters": written_rope(config, fraction),
        }

    def read_config(self, reader: HFConfigReader) -> ModelConfig:
        """Read GPTNeoXConfig's keys, with its defaults. Dropout is the residual branches'."""
        reader.one_of("attention_bias", True, True)
        rope = reader.rope("rotary_emb_base", "rotary_pct", 0.25)
        hidden = reader.number("hidden_size", 6144)
        heads = reader.number("num_attention_heads", 64)
        return ModelConfig(
            layers=reader.number("num_hidden_layers", 44),
            hidden=hidden,
            heads=heads,
            ffn_hidden=reader.number("intermediate_size", 24576),
            sequence_length=reader.number("max_position_embeddings", 2048),
            vocab_size=reader.number("vocab_size", 50432),
            activation=read_gelu(reader, "hidden_act", "gelu"),
            norm_eps=reader.number("layer_norm_eps", 1e-5),
            position="rotary",
            rotary_fraction=read_fraction(rope.fraction, hidden // heads),
            rotary_base=rope.base,
            parallel_residual=reader.flag("use_parallel_residual", True),
            tie_embeddings=reader.flag("tie_word_embeddings", False),
            dropout=float(reader.number("hidden_dropout", 0.0)),
            init="neox",
            init_std=reader.number("initializer_range", 0.02),
        )

    def mappings(self, config: ModelConfig) -> list[ParamMapping]:
        """Biases everywhere; query, key and value are interleaved head by head."""
        found = embedding_and_head(config, "embed_in.weight")
        for i in range(config.layers):
            name, hf_name = f"blocks.{i}", f"layers.{i}"
            found += same_module(f"{name}.norm1", f"{hf_name}.input_layernorm")
            packed = f"{hf_name}.attention.query_key_value"
            found += [
                _by_head(config, f"{name}.attention.qkv.{part}", f"{packed}.{part}")
                for part in ("weight", "bias")
            ]
            found += same_module(f"{name}.attention.out", f"{hf_name}.attention.dense")
            found += same_module(f"{name}.norm2", f"{hf_name}.post_attention_layernorm")
            found += same_module(f"{name}.mlp.up", f"{hf_name}.mlp.dense_h_to_4h")
            found += same_module(f"{name}.mlp.down", f"{hf_name}.mlp.dense_4h_to_h")
        return [*found, *same_module("head.norm", "final_layer_norm")]


class StableLM(Llama):
    """`StableLmForCausalLM`, of StableLM 2 1.6B and 3B: Llama with layer norms and partial rotary
    positions. The parallel blocks of 12B have one norm, which GPT lacks."""

    architecture = "StableLmForCausalLM"
    model_type = "stablelm"
    rotating = 0.25
    defaults: ClassVar[dict[str, float]] = Llama.defaults | {
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "max_position_embeddings": 4096,
        "vocab_size": 50304,
        "layer_norm_eps": 1e-5,
    }
    norm = "layernorm"
    eps_key = "layer_norm_eps"

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Biases of queries, keys and values alone, and heads that together have the hidden
        width. Missing biases of norms are written as zeros."""
        own: dict[str, Sequence[Any] | None] = {
            "qkv_bias": None,
            "attention.out_bias": (False,),
            "mlp.bias": (False,),
            "rotary_fraction": None,
            "head_size": (config.hidden / config.heads,),
            "norm_bias": None,
        }
        return self._constraints(config, own)

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """Biases and the rotating fraction."""
        return {"use_qkv_bias": config.has_qkv_bias} | written_part_rope(config)

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """Biases of queries, keys and values."""
        for key in ("qk_layernorm", "use_parallel_residual"):
            reader.one_of(key, False, False)
        model.bias, model.mlp.bias = False, None
        model.qkv_bias = reader.flag("use_qkv_bias", False)
        return model


def _by_head(config: ModelConfig, name: str, hf_name: str) -> ParamMapping:
    """Rows [q|k|v][heads] in GPT are rows [heads][q|k|v] in the family."""
    size = config.head_dim

    def export(tensor: Tensor) -> Sequence[Tensor]:
        split = tensor.unflatten(0, (3, config.heads, size))
        return (split.transpose(0, 1).flatten(0, 2),)

    def load(tensors: Sequence[Tensor]) -> Tensor:
        split = tensors[0].unflatten(0, (config.heads, 3, size))
        return split.transpose(0, 1).flatten(0, 2)

    return ParamMapping(name, (hf_name,), export, load)
