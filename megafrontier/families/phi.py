"""Phi-3: one tensor of queries, keys and values, and one of gate and up, as GPT has them."""

from collections.abc import Sequence
from typing import Any, ClassVar

from megafrontier.config import ModelConfig
from megafrontier.families.base import (
    Constraint,
    HFConfigReader,
    ParamMapping,
    Rope,
    same,
    written_part_rope,
)
from megafrontier.families.llama import Llama, attention_names


class Phi3(Llama):
    """`Phi3ForCausalLM`."""

    architecture = "Phi3ForCausalLM"
    model_type = "phi3"
    defaults: ClassVar[dict[str, float]] = Llama.defaults | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "vocab_size": 32064,
        "rms_norm_eps": 1e-5,
    }

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """No biases, no scaled frequencies, and heads that together have the hidden width."""
        no, plain = (False,), (config.hidden / config.heads,)
        own: dict[str, Sequence[Any] | None] = {
            "qkv_bias": no,
            "attention.out_bias": no,
            "mlp.bias": no,
            "rotary_scaling": (None,),
            "rotary_fraction": None,
            "head_size": plain,
            "attention.window": None,
        }
        return self._constraints(config, own)

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The window, the original length, and the rotating fraction."""
        return {
            "sliding_window": config.attention.window,
            "original_max_position_embeddings": config.sequence_length,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            **written_part_rope(config),
        }

    def rope(self, reader: HFConfigReader) -> Rope:
        """Without scaled frequencies."""
        return reader.rope("rope_theta", "partial_rotary_factor", 1.0)

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """The window."""
        for key in ("attention_bias", "mlp_bias"):
            reader.one_of(key, False, False)
        model.attention.window = reader.optional("sliding_window", None)
        return model

    def attention_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Two tensors."""
        name, hf_name = attention_names(block)
        return [
            same(f"{name}.qkv.weight", f"{hf_name}.qkv_proj.weight"),
            same(f"{name}.out.weight", f"{hf_name}.o_proj.weight"),
        ]

    def mlp_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Two tensors."""
        name, hf_name = f"blocks.{block}.mlp", f"layers.{block}.mlp"
        return [
            same(f"{name}.up.weight", f"{hf_name}.gate_up_proj.weight"),
            same(f"{name}.down.weight", f"{hf_name}.down_proj.weight"),
        ]
