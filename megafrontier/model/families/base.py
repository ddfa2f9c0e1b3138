"""What a Hugging Face family is: its config.json, its tensors' names and layouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megafrontier.common.errors import UserError
from megafrontier.config import ModelConfig, RotaryScalingConfig

HEAD = "head"
"""Our name for the output matrix in `ParamMapping.hf_names`: its name in files varies by version.
"""


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


class Family(Protocol):
    """One `transformers` architecture."""

    architecture: str
    model_type: str
    prefix: str
    """Prefix of every tensor's name except the head's. Base models omit it."""
    head: str
    """Name of the output matrix in files."""

    def matches(self, config: ModelConfig) -> bool:
        """Whether this is the family to export the model as. At most one family matches."""

    def constraints(self, config: ModelConfig) -> list[Constraint]:
        """What must hold for the family to express a model that it matches."""

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """The family's part of config.json."""

    def read_config(self, reader: "HFConfigReader") -> ModelConfig:
        """The model that a config.json describes. Raises UserError if GPT cannot express it."""

    def mappings(self, config: ModelConfig) -> list[ParamMapping]:
        """Every parameter, biases included."""


class HFConfigReader:
    """Reads a config.json, and refuses each bad value by file, key and value."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path, self._values = path, values

    def number(self, key: str, default: float | None = None) -> Any:
        """A number, or `default` if the key is missing or null. Raises UserError otherwise."""
        value = self._get(key, default)
        if not isinstance(value, int | float):
            raise self.error(key, value, "need a number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Like `number`, for true or false."""
        return bool(self.one_of(key, default, True, False))

    def one_of(self, key: str, default: Any, *allowed: Any) -> Any:
        """Like `number`, for one of the values `allowed`."""
        value = self._get(key, default)
        if value not in allowed:
            raise self.error(key, value, f"need {' or '.join(map(repr, allowed))}")
        return value

    def rope(
        self,
        theta_key: str,
        fraction_key: str,
        default_fraction: float,
        *types: str,
        base: float = 10000.0,
    ) -> "Rope":
        """The rotary settings; `types` are the ways of scaling frequencies that the family has,
        and `base` is its default.

        transformers 5 keeps them in the dictionary `rope_parameters`, transformers 4 at the top
        and in `rope_scaling`. A file may have both, which are read in the order of transformers 5.
        Raises UserError for any other way of scaling.
        """
        key = "rope_scaling" if self._values.get("rope_scaling") else "rope_parameters"
        inner = self._get(key, {})
        if not isinstance(inner, dict):
            raise self.error(key, inner, "need keys and values")
        nested = HFConfigReader(self._path, inner)
        theta = nested.number("rope_theta", self.number(theta_key, base))
        outer_fraction = self.number(fraction_key, default_fraction)
        fraction = nested.number("partial_rotary_factor", outer_fraction)
        return Rope(float(theta), float(fraction), nested._scaling(types))

    def error(self, key: str, value: Any, fits: str) -> UserError:
        """The error for one value."""
        return UserError(f"{self._path}: {key}: {value!r}, {fits}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def _scaling(self, types: Sequence[str]) -> RotaryScalingConfig | None:
        key = "rope_type" if "rope_type" in self._values else "type"
        if self.one_of(key, "default", "default", *types) == "default":
            return None
        return RotaryScalingConfig(
            float(self.number("factor")),
            float(self.number("low_freq_factor")),
            float(self.number("high_freq_factor")),
            self.number("original_max_position_embeddings"),
        )


class Rope(NamedTuple):
    """Base of the frequencies, rotating fraction of each head, and scaling for longer texts."""

    base: float
    fraction: float
    scaling: RotaryScalingConfig | None


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


def plain_heads(config: ModelConfig) -> list[Constraint]:
    """As many key heads as query heads, and heads that together have the hidden width."""
    return [
        Constraint("kv_heads", config.num_kv_heads, (config.heads,)),
        Constraint("head_size", config.head_dim, (config.hidden / config.heads,)),
    ]


def plain_attention(config: ModelConfig) -> list[Constraint]:
    """No norm of queries and keys, and biases there as elsewhere."""
    return [
        Constraint("qk_norm", config.qk_norm, ("none",)),
        Constraint("qkv_bias", config.has_qkv_bias, (config.bias,)),
    ]


def gelu_name(config: ModelConfig) -> str:
    """The name that `transformers` has for this activation."""
    return "gelu_new" if config.activation == "gelu_tanh" else "gelu"


def read_gelu(reader: HFConfigReader, key: str, default: str) -> Any:
    """Our name of a GELU: `transformers` has three names for the tanh approximation."""
    approximate = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
    name = reader.one_of(key, default, "gelu", *approximate)
    return "gelu_tanh" if name in approximate else "gelu"
