"""Llama, Mistral, SmolLM3: RMSNorm, SwiGLU, rotary positions, one tensor per projection."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from megafrontier.config import ModelConfig
from megafrontier.families.base import (
    LLAMA3,
    Constraint,
    HFConfigReader,
    ParamMapping,
    Rope,
    constraints_of,
    embedding_and_head,
    layer_types,
    read_fraction,
    same,
    same_module,
    written_rope,
    written_scaling,
)
from megafrontier.model.flops import parameter_specs

SCALINGS = (LLAMA3, "yarn", "linear")
"""Values of rope_type that GPT has, too."""


Activation = Literal[
    "gelu", "gelu_tanh", "relu2", "swiglu", "swiglu_clipped", "geglu", "geglu_tanh"
]


class Llama:
    """`LlamaForCausalLM`. Other families with one tensor per projection extend it."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"
    prefix = "model."
    head = "lm_head.weight"
    has_prediction = False
    ignored: tuple[str, ...] = ()
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
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = {}
    """Options that the family has and Llama lacks, as for `constraints_of`."""
    rotating: float | None = None
    """The default fraction of each head that rotates, where files may say another. None: all."""
    rope_layers = ""
    """The type of layers whose rotary settings are the model's, if files have some for each."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps_key = "rms_norm_eps"
    activations: ClassVar[dict[Activation, tuple[str, ...]]] = {"swiglu": ("silu", "swish")}
    """Names that transformers has for each of our activations."""
    activation_key = "hidden_act"
    is_tied = False
    """Default of `tie_word_embeddings`."""
    norms: ClassVar[dict[str, str]] = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
    }
    """Our names of a block's norms, and the family's."""

    def matches(self, config: ModelConfig) -> bool:
        """Rotary positions, and one of its norm and its activation."""
        gated = config.norm == "rmsnorm" or config.is_gated
        is_llama = type(self) is Llama
        return is_llama and config.position == "rotary" and gated and config.moe is None

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """What all have in common, and what the family adds."""
        return self._constraints(config, {})

    def _constraints(
        self, config: ModelConfig, more: dict[str, Sequence[Any] | None]
    ) -> list[Constraint]:
        common: dict[str, Sequence[Any] | None] = {
            "norm": (self.norm,),
            "activation": tuple(self.activations),
            "position": ("rotary",),
            "rotary_scaling": None,
            "kv_heads": None,
            "head_size": None,
            "qkv_bias": (config.has_out_bias,),
            "attention.out_bias": None,
            "mlp.bias": None,
        }
        return constraints_of(config, {**common, **self.allowed, **more})

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """LlamaConfig's keys, and those of the family. The rotary ones are written for transformers
        4 and for 5."""
        keys = {
            "num_hidden_layers": config.layers,
            "hidden_size": config.hidden,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.mlp_hidden,
            "max_position_embeddings": config.sequence_length,
            self.activation_key: self.activations[config.activation][0],
            self.eps_key: config.norm_eps,
            "attention_bias": config.has_out_bias,
            "mlp_bias": config.has_mlp_bias,
            "attention_dropout": config.dropout,
            "initializer_range": config.init_std,
            "rope_theta": config.rotary_base,
            "rope_scaling": written_scaling(config.rotary_scaling),
            "rope_parameters": written_rope(config),
        }
        return keys | self.own_keys(config)

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """Keys of this family alone."""
        return {}

    def read_config(self, reader: HFConfigReader) -> ModelConfig:
        """Read the keys, with the family's defaults. Dropout is the attention's."""
        bias = reader.flag("attention_bias", False)
        mlp_bias = reader.flag("mlp_bias", False)
        model = self._read_common(reader, bias)
        model.mlp.bias = None if mlp_bias == bias else mlp_bias
        return self.own_model(reader, model)

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """The model with what this family alone has. Raises UserError for what GPT lacks."""
        return model

    def number(self, reader: HFConfigReader, key: str) -> Any:
        """A number of config.json, or its default."""
        return reader.number(key, self.defaults[key])

    def rope(self, reader: HFConfigReader) -> Rope:
        """The rotary settings. Raises UserError if a part of each head rotates that may not."""
        key, base = "partial_rotary_factor", self.defaults["rope_theta"]
        whole = 1.0 if self.rotating is None else self.rotating
        found = reader.rope("rope_theta", key, whole, *SCALINGS, base=base, layers=self.rope_layers)
        if self.rotating is None and found.fraction != 1.0:
            raise reader.error(key, found.fraction, "need 1.0")
        return found

    def _read_common(self, reader: HFConfigReader, bias: bool) -> ModelConfig:
        names = {name: ours for ours, known in self.activations.items() for name in known}
        activation = reader.one_of(self.activation_key, next(iter(names)), *names)
        number, rope = partial(self.number, reader), self.rope(reader)
        hidden = number("hidden_size")
        heads = number("num_attention_heads")
        size = reader.number("head_dim", self.defaults.get("head_dim", hidden // heads))
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
            norm=self.norm,
            norm_eps=number(self.eps_key),
            activation=names[activation],
            position="rotary",
            rotary_fraction=read_fraction(rope.fraction, size),
            rotary_base=rope.base,
            rotary_scaling=rope.scaling,
            tie_embeddings=reader.flag("tie_word_embeddings", self.is_tied),
            bias=bias,
            dropout=float(reader.number("attention_dropout", 0.0)),
            init_std=reader.number("initializer_range", 0.02),
        )

    def mappings(self, config: ModelConfig) -> list[ParamMapping]:
        """One tensor per projection, where GPT packs query, key and value, and gate and up."""
        found = embedding_and_head(config, "embed_tokens.weight")
        for i in range(config.layers):
            name, hf_name = f"blocks.{i}", f"layers.{i}"
            found += self.attention_mappings(config, i)
            found += self.mlp_mappings(config, i)
            for ours, theirs in self.norms.items():
                found += same_module(f"{name}.{ours}", f"{hf_name}.{theirs}")
        found += same_module("head.norm", "norm")
        names = parameter_specs(_with_norm_biases(config))
        return [mapping for mapping in found if mapping.name in names]

    def attention_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Those of a block's attention."""
        name, hf_name = attention_names(block)
        inner, kv_inner = (n * config.head_dim for n in (config.heads, config.num_kv_heads))
        rows = {"q": inner, "k": kv_inner, "v": kv_inner}
        return [
            *packed(f"{name}.qkv", {f"{hf_name}.{p}_proj": count for p, count in rows.items()}),
            *same_module(f"{name}.out", f"{hf_name}.o_proj"),
            same(f"{name}.query_norm.weight", f"{hf_name}.q_norm.weight"),
            same(f"{name}.key_norm.weight", f"{hf_name}.k_norm.weight"),
        ]

    def mlp_mappings(self, config: ModelConfig, block: int) -> list[ParamMapping]:
        """Those of a block's MLP."""
        return gated_mlp(f"blocks.{block}.mlp", f"layers.{block}.mlp", config.mlp_hidden)


class Mistral(Llama):
    """`MistralForCausalLM`: a window in each block."""

    architecture = "MistralForCausalLM"
    model_type = "mistral"
    defaults: ClassVar[dict[str, float]] = Llama.defaults | {
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
    }
    ignored: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.")
    window: int | None = 4096
    """The default."""

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """A window, and no biases."""
        no = (False,)
        more: dict[str, Sequence[Any] | None] = {"qkv_bias": no, "attention.out_bias": no}
        return self._constraints(config, {**more, "mlp.bias": no, "attention.window": None})

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The window."""
        return {"sliding_window": config.attention.window}

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """The window, but none if it is null."""
        reader.one_of("attention_bias", False, False)
        model.attention.window = reader.optional("sliding_window", self.window)
        return model


class Ministral3(Mistral):
    """`Ministral3ForCausalLM`: queries grow with positions, beside YaRN."""

    architecture = "Ministral3ForCausalLM"
    model_type = "ministral3"
    defaults: ClassVar[dict[str, float]] = {
        "num_hidden_layers": 34,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "vocab_size": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }
    window = None
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = {"rotary_scaling.query_growth": None}

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """Also YaRN."""
        scaling = config.rotary_scaling
        return [
            *super().constraints(config),
            Constraint("rotary_scaling", scaling and scaling.kind, ("yarn",)),
        ]

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """Also the growth of queries."""
        assert config.rotary_scaling is not None
        growth = {"llama_4_scaling_beta": config.rotary_scaling.query_growth}
        keys = {"rope_parameters": written_rope(config) | growth, "rope_scaling": None}
        return super().own_keys(config) | keys

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """Also the growth of queries."""
        rope = reader.need_rope()
        if model.rotary_scaling is None or model.rotary_scaling.kind != "yarn":
            kind = model.rotary_scaling and model.rotary_scaling.kind
            raise reader.error("rope_type", kind or "default", "need 'yarn'")
        model.rotary_scaling.query_growth = float(rope.number("llama_4_scaling_beta"))
        return super().own_model(reader, model)


class SmolLM3(Llama):
    """`SmolLM3ForCausalLM`: blocks without rotary positions."""

    architecture = "SmolLM3ForCausalLM"
    model_type = "smollm3"
    defaults: ClassVar[dict[str, float]] = {
        "num_hidden_layers": 36,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 11008,
        "max_position_embeddings": 32768,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2e6,
    }
    allowed: ClassVar[dict[str, Sequence[Any] | None]] = {"attention.no_rotary_every": None}
    is_tied = True

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """Which blocks have rotary positions, as 1 and 0."""
        return {
            "no_rope_layers": [int(config.has_rotary(i)) for i in range(config.layers)],
            "layer_types": layer_types(config),
            "use_sliding_window": False,
        }

    def own_model(self, reader: HFConfigReader, model: ModelConfig) -> ModelConfig:
        """The last of every n blocks has none."""
        reader.one_of("use_sliding_window", False, False)
        every = reader.number("no_rope_layer_interval", 4)
        ours = [int((i + 1) % every != 0) for i in range(model.layers)]
        rotates = reader.sequence("no_rope_layers", ours)
        first = rotates.index(0) + 1 if 0 in rotates else None
        model.attention.no_rotary_every = first
        if rotates != [int(model.has_rotary(i)) for i in range(model.layers)]:
            raise reader.error("no_rope_layers", rotates, "need 1, with 0 in the last of every n")
        return model


def attention_names(block: int) -> tuple[str, str]:
    """Our name of a block's attention, and the family's."""
    return f"blocks.{block}.attention", f"layers.{block}.self_attn"


def gated_mlp(name: str, hf_name: str, width: int) -> list[ParamMapping]:
    """The mappings of an MLP with a gate."""
    up = packed(f"{name}.up", {f"{hf_name}.{p}_proj": width for p in ("gate", "up")})
    return [*up, *same_module(f"{name}.down", f"{hf_name}.down_proj")]


def _with_norm_biases(config: ModelConfig) -> ModelConfig:
    """A family with biases of norms writes zeros if the model has none."""
    return replace(config, norm_bias=True)


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
