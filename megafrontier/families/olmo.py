"""OLMo-2, OLMo-3 and Olmo Hybrid: norms after softmax attention, and of all queries and keys."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from megafrontier.config import DeltaConfig, ModelConfig
from megafrontier.families.base import (
    FULL,
    SLIDING,
    Constraint,
    HFConfigReader,
    ParamMapping,
    layer_types,
    written_layer_ropes,
)
from megafrontier.families.hybrid import Hybrid
from megafrontier.families.llama import SCALINGS, Llama, packed


class OLMo2(Llama):
    """`Olmo2ForCausalLM`."""

    architecture = "Olmo2ForCausalLM"
    model_type = "olmo2"
    defaults: ClassVar[dict[str, float]] = Llama.defaults | {
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
    }
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = {
        "norm_position": ("after",),
        "qk_norm": ("full",),
        "mlp.bias": (False,),
    }
    norms: ClassVar[dict[str, str]] = {
        "post_norm1": "post_attention_layernorm",
        "post_norm2": "post_feedforward_layernorm",
    }

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """Its norms."""
        reader.one_of("mlp_bias", False, False)
        model.norm_position, model.qk_norm = "after", "full"
        return model


class OLMo3(OLMo2):
    """`Olmo3ForCausalLM`: windows in three of four layers, whose frequencies are not scaled."""

    architecture = "Olmo3ForCausalLM"
    model_type = "olmo3"
    defaults: ClassVar[dict[str, float]] = OLMo2.defaults | {
        "rope_theta": 500000.0,
        "sliding_window": 4096,
    }
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = OLMo2.allowed | {
        "attention.window": None,
        "attention.global_every": None,
        "attention.window_rotary_base": None,
    }
    rotating, rope_layers = 1.0, FULL
    period = 4
    """The default of every how many layers one has no window."""

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The windows, and the rotary settings of both types of layers."""
        return {
            # transformers makes a mask of windows even if no layer has one, and needs a number.
            "sliding_window": config.attention.window or self.defaults["sliding_window"],
            "layer_types": layer_types(config),
            "rope_parameters": written_layer_ropes(config),
        }

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """Also the windows."""
        model = super().own_model(reader, model)
        types = [SLIDING if (i + 1) % self.period else FULL for i in range(model.layers)]
        window = reader.optional("sliding_window", self.defaults["sliding_window"])
        reader.set_windows(model, window, *types)
        reader.set_window_rope(model, "rope_theta", self.defaults["rope_theta"], *SCALINGS)
        return model


class OlmoHybrid(Hybrid, OLMo2):
    """`OlmoHybridForCausalLM`: gated delta attention with norms before it in most blocks. Tensors
    have the names of the published files, and those of transformers are read, too."""

    architecture = "OlmoHybridForCausalLM"
    model_type = "olmo_hybrid"
    has_gate = False
    defaults: ClassVar[dict[str, float]] = {
        "num_hidden_layers": 32,
        "hidden_size": 3840,
        "num_attention_heads": 30,
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "vocab_size": 100352,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "linear_conv_kernel_dim": 4,
    }
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = OLMo2.allowed | {
        "attention.no_rotary_every": (None, 1),
        "attention.pattern": None,
        "attention.delta": ("given",),
        "attention.delta.negative_eigenvalues": None,
        "attention.delta.norm_position": ("before",),
        "attention.delta.norm_eps": (1e-5,),
    }
    norms: ClassVar[dict[str, str]] = OLMo2.norms | {
        "norm1": "attention_layer_norm",
        "norm2": "feedforward_layer_norm",
    }
    delta_names: ClassVar[dict[str, str]] = {
        "norm.weight": "o_norm.weight",
        "out.weight": "o_proj.weight",
    }
    renamed: ClassVar[dict[str, str]] = {
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
        "post_attention_layernorm": "feedforward_layer_norm",
    }
    """Names of norms in files that transformers has saved."""

    def matches(self, config: ModelConfig) -> bool:
        """Delta attention, and norms after softmax attention."""
        return config.attention.delta is not None and config.norm_position != "before"

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Blocks of both kinds."""
        kinds = {config.attention.kind_of(i) for i in range(config.layers)}
        both = ", ".join(sorted(kinds))
        return [
            *super().constraints(config),
            Constraint("attention.pattern", both, ("delta, softmax",)),
        ]

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """Also the strength of corrections, and whether positions are rotary."""
        delta, keys = config.attention.delta, super().own_keys(config)
        assert delta is not None
        keys["linear_allow_neg_eigval"] = delta.negative_eigenvalues
        if config.attention.no_rotary_every == 1:
            none = {"rope_type": "default", "rope_theta": None}
            keys |= {"rope_theta": None, "rope_scaling": None, "rope_parameters": none}
        return keys

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """Also the kinds of attention. A base of null: no rotary positions."""
        model = super().own_model(reader, model)
        self.set_pattern(reader, model)
        inner, delta = reader.inner("rope_parameters"), model.attention.delta
        if (inner or reader).is_null("rope_theta"):
            model.attention.no_rotary_every = 1
        if delta is None or "full" not in model.attention.pattern:
            fits = "need linear_attention and full_attention"
            raise reader.error("layer_types", reader.sequence("layer_types", []), fits)
        delta.negative_eigenvalues = reader.flag("linear_allow_neg_eigval", True)
        delta.norm_position, delta.norm_eps = "before", 1e-5
        return model

    def delta_sizes(self, reader: HFConfigReader, model: ModelConfig) -> DeltaConfig:
        """By default as many heads as of softmax attention, and keys of 3/4 of the hidden width."""
        heads = reader.number("linear_num_key_heads", model.heads)
        size = reader.number("linear_key_head_dim", int(0.75 * model.hidden / heads))
        return DeltaConfig(
            heads,
            reader.number("linear_num_value_heads", model.heads),
            size,
            reader.number("linear_value_head_dim", 2 * size),
            self.number(reader, "linear_conv_kernel_dim"),
        )

    def mappings(self, config: ModelConfig) -> list[ParamMapping]:
        """With the names that transformers has."""
        return [self._with_others(mapping) for mapping in super().mappings(config)]

    def _with_others(self, mapping: ParamMapping) -> ParamMapping:
        name = mapping.hf_names[0]
        norm = next((part for part in self.renamed if f".{part}." in name), None)
        if norm is None:
            return mapping
        return replace(mapping, others=(name.replace(norm, self.renamed[norm]),))

    def delta_inputs(self, delta: DeltaConfig, name: str, hf_name: str) -> list[ParamMapping]:
        """One for each kind."""
        rows = dict(zip("qkv", delta.mixed, strict=True)) | {"g": delta.mixed[-1]}
        rows |= dict.fromkeys("ba", delta.value_heads)
        return packed(name, {f"{hf_name}.{part}_proj": count for part, count in rows.items()})

    def convolution(self, delta: DeltaConfig, name: str, hf_name: str) -> ParamMapping:
        """One of queries, one of keys and one of values, or one of all."""
        return ParamMapping(
            name,
            tuple(f"{hf_name}.{part}_conv1d.weight" for part in "qkv"),
            lambda t: t[:, None].split(delta.mixed),
            lambda ts: torch.cat(list(ts)).squeeze(1),
            (f"{hf_name}.conv1d.weight",),
        )
