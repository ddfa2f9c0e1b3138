"""What a Hugging Face family is: its config.json, its tensors' names and layouts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import log
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megafrontier.common.errors import UserError
from megafrontier.config import ModelConfig, RotaryScalingConfig
from megafrontier.config.building import shown

HEAD = "head"
"""Our name for the output matrix in `ParamMapping.hf_names`: its name in files varies by version.
"""


WITH_IMAGES = ("qwen3_5", "qwen3_5_moe", "mistral3")
"""Values of `model_type` of models of images and text, of which the model of text is imported."""
LLAMA3 = "llama3"
"""rope_type of Llama 3.1 and 3.2."""
SLIDING, FULL = "sliding_attention", "full_attention"
"""Types of layers: with a window, and without one."""

_COUNTS = ("_layers", "_layer", "_heads", "_head", "_experts", "_size", "head_dim", "_per_tok")
"""Ends of keys of whole numbers."""
_DIVISORS = ("attention_heads", "_head", "_size", "head_dim", "query_pre_attn_scalar")
"""Ends of keys of numbers that others are divided by."""


@dataclass(frozen=True)
class Constraint:
    """A key of ModelConfig whose value must be one of `allowed` for the family to express it."""

    key: str
    value: Any
    allowed: tuple[Any, ...]


@dataclass(frozen=True)
class ParamMapping:
    """One parameter of GPT, the family's tensors that hold it, and the conversion in both ways."""

    name: str
    hf_names: tuple[str, ...]
    export: Callable[[Tensor], Sequence[Tensor]]
    load: Callable[[Sequence[Tensor]], Tensor]
    others: tuple[str, ...] = ()
    """Names that other releases of the family have in place of these, for `load` as well."""
    copies: tuple[str, ...] = ()
    """Names under which files may have the tensor once more."""


class Family(Protocol):
    """One `transformers` architecture."""

    architecture: str
    model_type: str
    prefix: str
    """Prefix of every tensor's name except the head's. Base models omit it."""
    head: str
    """Name of the output matrix in files."""
    has_prediction: bool
    """Whether files may have a block that predicts the token after the next one."""

    ignored: tuple[str, ...]
    """Prefixes of tensors in files that GPT has no place for, and that logits do not need."""

    def matches(self, config: ModelConfig) -> bool:
        """Whether this is the family that a model is nearest to that no family can express. The
        first that matches counts."""

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """What must hold for the family to express a model that it matches."""

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """The family's part of config.json."""

    def read_config(self, reader: "HFConfigReader") -> ModelConfig:
        """The model that a config.json describes. Raises UserError if GPT cannot express it."""

    def mappings(self, config: ModelConfig) -> list[ParamMapping]:
        """Every parameter, biases included; those of `prediction` with `has_prediction` only."""


class HFConfigReader:
    """Reads a config.json, and refuses each bad value by file, key and value."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path, self._values = path, values

    def number(self, key: str, default: float | None = None) -> Any:
        """A number, or `default` if the key is missing or null. Raises UserError otherwise."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or not -(2**63) < value < 2**63:  # or NaN
            raise self.error(key, value, "need a number")
        if key.endswith(_COUNTS) or key.startswith("num_"):
            if value != int(value):
                raise self.error(key, value, "need a whole number")
            value = int(value)
        if key.endswith(_DIVISORS) and value <= 0:
            raise self.error(key, value, "need more than 0")
        return value

    def optional(self, key: str, default: float | None) -> Any:
        """A number or null, or `default` if the key is missing."""
        if key in self._values and self._values[key] is None:
            return None
        return None if self._get(key, default) is None else self.number(key, default)

    def sequence(self, key: str, default: Sequence[Any]) -> list[Any]:
        """Like `number`, for a list."""
        value = self._get(key, default)
        if not isinstance(value, list | tuple):
            raise self.error(key, value, "need a list")
        return list(value)

    def flag(self, key: str, default: bool) -> bool:
        """Like `number`, for true or false."""
        return bool(self.one_of(key, default, True, False))

    def one_of(self, key: str, default: Any, *allowed: Any) -> Any:
        """Like `number`, for one of the values `allowed`."""
        value = self._get(key, default)
        if value not in allowed:
            raise self.error(key, value, f"need {' or '.join(map(repr, allowed))}")
        return value

    def is_null(self, key: str) -> bool:
        """Whether a key is there and null."""
        return key in self._values and self._values[key] is None

    def inner(self, key: str) -> "HFConfigReader | None":
        """The reader of a dictionary in the file, None if it is missing or null."""
        value = self._get(key, None)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, value, "need keys and values")
        return None if value is None else HFConfigReader(self._path, value)

    def need_rope(self) -> "HFConfigReader":
        """The reader of the rotary settings. Raises UserError if the file has none, for families
        for which transformers then scales frequencies."""
        found = self.inner("rope_scaling") or self.inner("rope_parameters")
        if found is None:
            raise self.error("rope_parameters", None, "need the rotary settings")
        return found

    def rope(
        self,
        theta_key: str,
        fraction_key: str,
        default_fraction: float,
        *types: str,
        base: float = 10000.0,
        layers: str = "",
    ) -> "Rope":
        """The rotary settings; `types` are the ways of scaling frequencies that the family has,
        and `base` is its default.

        transformers 5 keeps them in the dictionary `rope_parameters`, transformers 4 at the top
        and in `rope_scaling`. A file may have both, which are read in the order of transformers 5.
        `layers`: the type of layers whose settings are read, if `rope_parameters` has some for each
        type. Raises UserError for any other way of scaling.
        """
        key = "rope_scaling" if self._values.get("rope_scaling") else "rope_parameters"
        inner = self._get(key, {})
        of_types = self._get("rope_parameters", {})
        if layers and isinstance(inner, dict) and isinstance(of_types, dict):
            # transformers 4 scales the frequencies of layers without a window alone.
            inner = of_types.get(layers) or (inner if layers == FULL else {})
        if not isinstance(inner, dict):
            raise self.error(key, inner, "need keys and values")
        nested = HFConfigReader(self._path, inner)
        theta = nested.number("rope_theta", self.number(theta_key, base))
        outer_fraction = self.number(fraction_key, default_fraction)
        fraction = nested.number("partial_rotary_factor", outer_fraction)
        scaling = nested._scaling(types, self)
        share = 1.0 if scaling is None else nested._mscale("mscale_all_dim", scaling.factor)
        return Rope(float(theta), float(fraction), scaling, share * share)

    def set_windows(self, model: ModelConfig, window: int | None, *default: str) -> None:
        """Set the keys `window` and `global_every` of a model's attention.

        window: of the layers that have one. default: the types of the layers if `layer_types` is
        not given. Raises UserError for types that are in no period.
        """
        layers, attention = model.layers, model.attention
        types = self.sequence("layer_types", default)
        full = [i + 1 for i, kind in enumerate(types) if kind == FULL]
        if window is None or len(full) == layers:
            return
        every = full[0] if full else None
        expected = [SLIDING if every is None or (i + 1) % every else FULL for i in range(layers)]
        if types != expected:
            fits = f"need {SLIDING}, with {FULL} in the last of every n layers"
            raise self.error("layer_types", types, fits)
        attention.window, attention.global_every = window, every

    def set_window_rope(self, model: ModelConfig, theta_key: str, base: float, *types: str) -> None:
        """Set the rotary base of layers with a window, whose settings a file may have apart.

        theta_key, base, types: as for `rope`. Raises UserError for frequencies that are scaled in
        another way than in layers without a window.
        """
        if model.attention.window is None:
            return
        fraction = "partial_rotary_factor"
        local = self.rope(theta_key, fraction, 1.0, *types, base=base, layers=SLIDING)
        is_same = (local.base, local.scaling) == (model.rotary_base, model.rotary_scaling)
        if not is_same and local.scaling is not None:
            fits = f"need default in {SLIDING}, or the same as in {FULL}"
            raise self.error("rope_parameters", local.scaling.kind, fits)
        model.attention.window_rotary_base = None if is_same else local.base

    def error(self, key: str, value: Any, fits: str) -> UserError:
        """The error for one value."""
        return UserError(f"{self._path}: {key}: {shown(repr(value))}, {fits}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def _scaling(self, types: Sequence[str], whole: "HFConfigReader") -> RotaryScalingConfig | None:
        """`whole`: of the file, which may have the original length too."""
        key = "rope_type" if "rope_type" in self._values else "type"
        kind = self.one_of(key, "default", "default", *types)
        if kind == "default":
            return None
        factor = float(self.number("factor"))
        if kind == "linear":
            return RotaryScalingConfig(factor, kind="linear")
        outer = whole.number("max_position_embeddings", 0)
        length = self.number("original_max_position_embeddings", outer or None)
        if kind == LLAMA3:
            low = float(self.number("low_freq_factor"))
            return RotaryScalingConfig(factor, low, float(self.number("high_freq_factor")), length)
        attention = self.optional("attention_factor", None)
        if attention is None and self.number("mscale", 0) and self.number("mscale_all_dim", 0):
            names = ("mscale", "mscale_all_dim")
            above, below = (self._mscale(name, factor) for name in names)
            attention = above / below
        return RotaryScalingConfig(
            factor,
            float(self.number("beta_slow", 1)),
            float(self.number("beta_fast", 32)),
            length,
            "yarn",
            None if attention is None else float(attention),
            truncate=self.flag("truncate", True),
        )

    def _mscale(self, key: str, factor: float) -> float:
        """A factor of YaRN with another coefficient than 0.1 (DeepSeek-V2), 1 without the key."""
        found: float = 0.1 * self.number(key, 0) * log(factor) + 1
        return found


class Rope(NamedTuple):
    """Base of the frequencies, rotating fraction of each head, and scaling for longer texts."""

    base: float
    fraction: float
    scaling: RotaryScalingConfig | None
    score_factor: float = 1.0
    """Of scores, in models with latent attention."""


def text_reader(path: Path, values: dict[str, Any]) -> HFConfigReader:
    """The reader of a config.json, or of its part for the text of a model of images and text."""
    text = values.get("text_config")
    if values.get("model_type") not in WITH_IMAGES or not isinstance(text, dict):
        return HFConfigReader(path, values)
    whole = {key: values[key] for key in ("tie_word_embeddings",) if key in values}
    return HFConfigReader(path, text | whole)


def same(name: str, hf_name: str) -> ParamMapping:
    """A tensor with the same layout on both sides."""
    return ParamMapping(name, (hf_name,), lambda t: (t,), lambda ts: ts[0])


def same_module(name: str, hf_name: str) -> list[ParamMapping]:
    """Weight and bias of a linear layer or a norm with the same layout on both sides."""
    return [same(f"{name}.{part}", f"{hf_name}.{part}") for part in ("weight", "bias")]


def vocabulary(config: ModelConfig, name: str, hf_name: str) -> ParamMapping:
    """A matrix with one row per token id: unpadded in the family, padded with zeros in GPT."""
    padding = config.padded_vocab_size - config.vocab_size

    def pad(tensors: Sequence[Tensor]) -> Tensor:
        rows = tensors[0].shape[0]
        if rows != config.vocab_size:
            raise ValueError(f"{rows} rows, need vocab_size ({config.vocab_size})")
        return torch.nn.functional.pad(tensors[0], (0, 0, 0, padding))

    return ParamMapping(name, (hf_name,), lambda t: (t[: config.vocab_size],), pad)


def embedding_and_head(config: ModelConfig, hf_name: str) -> list[ParamMapping]:
    """The token embedding and, if it is not tied to it, the output matrix."""
    ends = [vocabulary(config, "embedding.tokens.weight", hf_name)]
    if not config.tie_embeddings:
        ends.append(vocabulary(config, "head.output.weight", HEAD))
    return ends


def constraints_of(
    config: ModelConfig, allowed: Mapping[str, Sequence[Any] | None]
) -> list[Constraint]:
    """One for each option that changes what a model computes.

    allowed: the values of options that the family has; None: any. Other options must have their
    defaults: so a family never ignores an option.
    """
    found = [
        Constraint(key, value, tuple(allowed.get(key, (default,)) or ()))
        for key, (value, default) in _options(config).items()
        if allowed.get(key, ()) is not None
    ]
    return sorted(found, key=lambda constraint: constraint.key not in allowed)


def _options(config: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """The value and the default of each option."""
    attention, scaling, delta = config.attention, config.rotary_scaling, config.attention.delta
    plain_scale = config.head_dim**-0.5
    scale = attention.scale if attention.scale is None else attention.scale / plain_scale
    return {
        "norm": (config.norm, "layernorm"),
        "activation": (config.activation, "gelu"),
        "position": (config.position, "learned"),
        "parallel_residual": (config.parallel_residual, False),
        "rotary_fraction": (config.rotary_dims / config.head_dim, 1.0),
        "rotary_scaling": (scaling and scaling.kind, None),
        "rotary_scaling.query_growth": (scaling.query_growth if scaling else 0.0, 0.0),
        "kv_heads": (config.num_kv_heads, config.heads),
        "head_size": (config.head_dim, config.hidden / config.heads),
        "qk_norm": (config.qk_norm, "none"),
        "qkv_bias": (config.has_qkv_bias, config.bias),
        **{
            f"attention.{f.name}": (getattr(attention, f.name), f.default)
            for f in fields(attention)
        },
        "attention.out_bias": (config.has_out_bias, config.bias),
        "mlp.bias": (config.has_mlp_bias, config.bias),
        "norm_position": (config.norm_position, "before"),
        "norm_unit_offset": (config.norm_unit_offset, False),
        "norm_bias": (config.norm_bias, True),
        "attention.scale": (None if scale is None or abs(scale - 1) < 1e-6 else scale, None),
        "attention.latent": (None if attention.latent is None else "given", None),
        "attention.pattern": (attention.pattern, []),
        "attention.delta": (None if delta is None else "given", None),
        **{
            f"attention.delta.{name}": (getattr(delta, name, None) or default, default)
            for name, default in (
                ("negative_eigenvalues", False),
                ("norm_position", config.norm_position),
                ("norm_eps", config.norm_eps),
            )
        },
        "scale_embedding": (config.scale_embedding, False),
        "logit_softcap": (config.logit_softcap, None),
        "moe": (None if config.moe is None else "given", None),
    }


def layer_types(config: ModelConfig) -> list[str]:
    """`layer_types` of config.json: which layers have a window."""
    return [SLIDING if config.window_of(i) else FULL for i in range(config.layers)]


def written_fraction(config: ModelConfig) -> float:
    """A rotating fraction from which transformers, which rounds down, gets our `rotary_dims`."""
    wanted, size = config.rotary_dims, config.head_dim
    if int(size * config.rotary_fraction) == wanted:
        return config.rotary_fraction
    return (wanted + 0.5) / size


def read_fraction(fraction: float, size: int) -> float:
    """Our rotating fraction of a head of `size`: transformers rounds dimensions down, ModelConfig
    to the nearest."""
    return fraction if fraction == 1 else int(size * fraction) / size


def written_rope(config: ModelConfig, fraction: float | None = None) -> dict[str, Any]:
    """`rope_parameters` of config.json, for transformers 5. `fraction`: the rotating one, in
    families that have it."""
    scaling = written_scaling(config.rotary_scaling) or {}
    found = {"rope_type": "default", **scaling, "rope_theta": config.rotary_base}
    return found if fraction is None else found | {"partial_rotary_factor": fraction}


def written_part_rope(config: ModelConfig) -> dict[str, Any]:
    """The rotary keys of config.json, in families of whose heads a part may rotate."""
    fraction = written_fraction(config)
    return {
        "partial_rotary_factor": fraction,
        "rope_parameters": written_rope(config, fraction),
    }


def written_layer_ropes(config: ModelConfig) -> dict[str, Any]:
    """`rope_parameters` of config.json, in families that have some for each type of layer."""
    base, full = config.attention.window_rotary_base, written_rope(config)
    local = full if base is None else {"rope_theta": base, "rope_type": "default"}
    return {FULL: full, SLIDING: local}


def written_scaling(scaling: RotaryScalingConfig | None) -> dict[str, Any] | None:
    """`rope_scaling` of config.json."""
    if scaling is None:
        return None
    found = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return found
    found["original_max_position_embeddings"] = scaling.original_length
    bounds = scaling.low_frequency, scaling.kept_above
    if scaling.kind == LLAMA3:
        return found | dict(zip(("low_freq_factor", "high_freq_factor"), bounds, strict=True))
    found |= dict(zip(("beta_slow", "beta_fast"), bounds, strict=True))
    if not scaling.truncate:
        found["truncate"] = False
    factor = scaling.attention_factor
    return found if factor is None else found | {"attention_factor": factor}


def gelu_name(config: ModelConfig) -> str:
    """The name that `transformers` has for this activation."""
    return "gelu_new" if config.activation == "gelu_tanh" else "gelu"


def read_gelu(reader: HFConfigReader, key: str, default: str) -> Any:
    """Our name of a GELU: `transformers` has three names for the tanh approximation."""
    approximate = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
    name = reader.one_of(key, default, "gelu", *approximate)
    return "gelu_tanh" if name in approximate else "gelu"
