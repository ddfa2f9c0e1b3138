"""Gemma 2 and Gemma 3 (text): norms before and after, windows, GEGLU, scaled embeddings."""

from collections.abc import Sequence
from math import isclose
from typing import Any, ClassVar

from megafrontier.config import ModelConfig
from megafrontier.families.base import (
    FULL,
    SLIDING,
    Constraint,
    HFConfigReader,
    layer_types,
    written_layer_ropes,
)
from megafrontier.families.llama import SCALINGS, Activation, Llama


class Gemma2(Llama):
    """`Gemma2ForCausalLM`."""

    architecture = "Gemma2ForCausalLM"
    model_type = "gemma2"
    defaults: ClassVar[dict[str, float]] = {
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "vocab_size": 256000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = {
        "norm_position": ("both",),
        "norm_unit_offset": (True,),
        "scale_embedding": (True,),
        "mlp.bias": (False,),
        "logit_softcap": None,
        "attention.window": None,
        "attention.global_every": None,
        "attention.scale": None,
        "attention.softcap": None,
    }
    activations: ClassVar[dict[Activation, tuple[str, ...]]] = {
        "geglu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
        "geglu": ("gelu",),
    }
    activation_key = "hidden_activation"
    is_tied = True
    period = 2
    """The default of every how many layers one has no window."""
    norms: ClassVar[dict[str, str]] = {
        "norm1": "input_layernorm",
        "post_norm1": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "post_norm2": "post_feedforward_layernorm",
    }

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Also a scale of 1 / sqrt(n)."""
        scale = _scale(config)
        nearest = max(round(scale**-2), 1) ** -0.5
        fits = Constraint(
            "attention.scale", nearest if isclose(scale, nearest) else scale, (nearest,)
        )
        return [*super().constraints(config), fits]

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """Scale, soft-caps and windows."""
        attention = config.attention
        return {
            "query_pre_attn_scalar": round(_scale(config) ** -2),
            "attn_logit_softcapping": attention.softcap,
            "final_logit_softcapping": config.logit_softcap,
            # transformers makes a mask of windows even if no layer has one, and needs a number.
            "sliding_window": attention.window or self.defaults["sliding_window"],
            "layer_types": layer_types(config),
        }

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """What distinguishes the family from Llama."""
        reader.one_of("use_bidirectional_attention", False, False)
        reader.one_of("mlp_bias", False, False)
        model.norm_position, model.norm_unit_offset, model.scale_embedding = "both", True, True
        attention, own = model.attention, self.defaults
        scale = self.number(reader, "query_pre_attn_scalar") ** -0.5
        if not isclose(scale, model.head_dim**-0.5):
            attention.scale = scale
        attention.softcap = reader.optional(
            "attn_logit_softcapping", own.get("attn_logit_softcapping")
        )
        model.logit_softcap = reader.optional(
            "final_logit_softcapping", own.get("final_logit_softcapping")
        )
        period = reader.number("sliding_window_pattern", self.period)
        default = [SLIDING if (i + 1) % period else FULL for i in range(model.layers)]
        window = reader.optional("sliding_window", own["sliding_window"])
        reader.set_windows(model, window, *default)
        return model


class Gemma3(Gemma2):
    """`Gemma3ForCausalLM`, the text model: norms of queries and keys, and another rotary base in
    layers with a window."""

    architecture = "Gemma3ForCausalLM"
    model_type = "gemma3_text"
    rotating, rope_layers = 1.0, FULL
    defaults: ClassVar[dict[str, float]] = {
        key: value
        for key, value in Gemma2.defaults.items()
        if not key.endswith("logit_softcapping")
    } | {"vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6}
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = Gemma2.allowed | {
        "qk_norm": ("head",),
        "attention.softcap": (None,),
        "attention.window_rotary_base": None,
    }
    period = 6

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """Also the rotary settings of both types of layers."""
        keys = super().own_keys(config)
        del keys["attn_logit_softcapping"]
        base = config.attention.window_rotary_base
        own = {} if base is None else {"rope_local_base_freq": base}
        return keys | own | {"rope_parameters": written_layer_ropes(config)}

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """Also norms of queries and keys, and the base of layers with a window."""
        reader.one_of("attn_logit_softcapping", None, None)
        model = super().own_model(reader, model)
        model.qk_norm = "head"
        reader.set_window_rope(model, "rope_local_base_freq", 10000.0, *SCALINGS)
        return model


def _scale(config: ModelConfig) -> float:
    """The factor of scores."""
    return config.attention.scale or config.head_dim**-0.5
