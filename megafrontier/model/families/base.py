"""What a family is: its config.json, its tensor names, and how its tensors lie."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megafrontier.common.errors import UserError
from megafrontier.config import ModelConfig, RotaryScalingConfig
from megafrontier.model.sizes import head_size, padded_vocab

HEAD = "head"
"""Our name for the output matrix in a family's tensors; files call it differently by version."""


@dataclass(frozen=True)
class Need:
    """A key of ModelConfig whose value the family can only express when it is in `fits`."""

    key: str
    value: Any
    fits: tuple[Any, ...]


@dataclass(frozen=True)
class Translation:
    """One of our parameters, the family's tensors that hold it, and the way there and back."""

    ours: str
    theirs: tuple[str, ...]
    export: Callable[[Tensor], Sequence[Tensor]]
    load: Callable[[Sequence[Tensor]], Tensor]


class Settings:
    """A config.json, whose every bad value is refused by file, key and value."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path, self._values = path, values

    def number(self, key: str, default: float | None = None) -> Any:
        """A number; `default` where the key is missing or null. Raises UserError otherwise."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, value, "need a number")
        if not abs(value) <= sys.float_info.max:
            raise self.error(key, value, "need a finite number")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0, as `number` does."""
        value = self.number(key, default)
        if not isinstance(value, int) or value < 1:
            raise self.error(key, value, "need a whole number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false, as `number` does."""
        return bool(self.one_of(key, default, True, False))

    def one_of(self, key: str, default: Any, *fits: Any) -> Any:
        """A value among `fits`, as `number` does."""
        value = self._values.get(key)
        value = default if value is None else value
        if value not in fits:
            raise self.error(key, value, f"need {' or '.join(map(repr, fits))}")
        return value

    def rope(
        self, theta_key: str, fraction_key: str, default_fraction: float, *types: str
    ) -> "Rope":
        """Rotary settings: transformers 5 keeps them in a dictionary, 4 beside the others.

        A file may have both, of which the older release changes its own alone: so they must say the
        same. `types`: ways to scale the frequencies for longer texts that the family has. Raises
        UserError where they do not say the same, and for other ways.
        """
        base = self.number(theta_key, 10000.0)
        fraction = self.number(fraction_key, default_fraction)
        scalings = []
        for key in ("rope_scaling", "rope_parameters"):
            inner = self._values.get(key) or {}
            if not isinstance(inner, dict):
                raise self.error(key, inner, "need keys and values")
            nested = Settings(self._path, inner)
            if inner:
                scalings.append(nested._scaling(types))
            base = self._alike(nested, "rope_theta", theta_key, base)
            fraction = self._alike(nested, "partial_rotary_factor", fraction_key, fraction)
        if len(scalings) == 2 and scalings[0] != scalings[1]:
            found = self._values["rope_scaling"]
            raise self.error("rope_scaling", found, "need what rope_parameters says")
        return Rope(float(base), float(fraction), scalings[0] if scalings else None)

    def _scaling(self, types: Sequence[str]) -> RotaryScalingConfig | None:
        """Of rope_scaling or rope_parameters."""
        key = "rope_type" if "rope_type" in self._values else "type"
        if self.one_of(key, "default", "default", *types) == "default":
            return None
        return RotaryScalingConfig(
            float(self.number("factor")),
            float(self.number("low_freq_factor")),
            float(self.number("high_freq_factor")),
            self.integer("original_max_position_embeddings"),
        )

    def _alike(self, nested: "Settings", inner: str, outer: str, value: float) -> float:
        found = nested.number(inner, value)
        if self._values.get(outer) is not None and found != value:
            raise self.error(outer, value, f"need the {found} of {inner} in rope_parameters")
        return found

    def error(self, key: str, value: Any, fits: str) -> UserError:
        """The refusal of one value."""
        return UserError(f"{self._path}: {key}: {value!r}, {fits}")


@dataclass(frozen=True)
class Rope:
    """Base of the frequencies, the fraction of each head that rotates, and longer texts."""

    base: float
    fraction: float
    scaling: RotaryScalingConfig | None


class Family(Protocol):
    """One `transformers` architecture."""

    architecture: str
    model_type: str
    prefix: str
    """What stands before every tensor's name but the head's; base models leave it out."""
    head: str
    """Name of the output matrix in files."""

    def needs(self, config: ModelConfig) -> list[Need]:
        """What the family must find to express the model."""

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """The family's part of config.json."""

    def read_config(self, settings: Settings) -> ModelConfig:
        """The model of a config.json. Raises UserError for what GPT does not do."""

    def tensors(self, config: ModelConfig) -> list[Translation]:
        """Every tensor, biases included."""


def same(ours: str, theirs: str) -> Translation:
    """A tensor that lies alike on both sides."""
    return Translation(ours, (theirs,), lambda t: (t,), lambda ts: ts[0])


def same_linear(ours: str, theirs: str) -> list[Translation]:
    """Weight and bias that lie alike on both sides; norms too."""
    return [same(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", "bias")]


def vocabulary(config: ModelConfig, ours: str, theirs: str) -> Translation:
    """A matrix with a row per token id: cut to the real ids there, padded with zeros here."""
    padding = padded_vocab(config) - config.vocab_size

    def pad(tensors: Sequence[Tensor]) -> Tensor:
        rows = tensors[0].shape[0]
        if rows != config.vocab_size:
            raise ValueError(f"{rows} rows, need vocab_size ({config.vocab_size})")
        return torch.nn.functional.pad(tensors[0], (0, 0, 0, padding))

    return Translation(ours, (theirs,), lambda t: (t[: config.vocab_size],), pad)


def both_ends(config: ModelConfig, theirs: str) -> list[Translation]:
    """The embedding of tokens and, when it is not the same matrix, the output's."""
    ends = [vocabulary(config, "embedding.tokens.weight", theirs)]
    if not config.tie_embeddings:
        ends.append(vocabulary(config, "head.output.weight", HEAD))
    return ends


def plain_heads(config: ModelConfig) -> list[Need]:
    """As many key as query heads, and heads that fill the width."""
    return [
        Need("kv_heads", config.kv_heads or config.heads, (config.heads,)),
        Need("head_size", head_size(config), (config.hidden / config.heads,)),
    ]


def gelu_name(config: ModelConfig) -> str:
    """What `transformers` calls this activation."""
    return "gelu_new" if config.activation == "gelu_tanh" else "gelu"


def read_gelu(settings: Settings, key: str, default: str) -> Any:
    """Our name of a GELU: `transformers` has three names for the tanh approximation."""
    approximate = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
    name = settings.one_of(key, default, "gelu", *approximate)
    return "gelu_tanh" if name in approximate else "gelu"
