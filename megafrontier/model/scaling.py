"""muP and CompleteP: learning rates that are good for one size of a model are good for every size.

muP: Yang et al. 2022, arXiv:2203.03466. CompleteP: Dey et al. 2025, arXiv:2505.01618, table 1 with
alpha = 1. With m the width and l the depth relative to the base model:

- Matrices of the blocks begin with 1 / sqrt(m) times the base model's standard deviation, whatever
  the depth.
- Scores of attention are divided by the head size, not by its root.
- Each residual branch is multiplied by 1 / l, and the logits by 1 / m.
- The optimizer scales its values: `size_factors` of its class in `optim`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megafrontier.config import ModelConfig
from megafrontier.parallel.param_spec import ParameterKind, Role, SizeRatio, set_spec, spec_of


class Multipliers(NamedTuple):
    """Constants of the forward pass."""

    embedding: float = 1.0
    query: float = 1.0
    residual: float = 1.0
    """Of what attention and MLP add to the residual stream."""
    output: float = 1.0
    """Of the head's normalized input, and so of the logits."""


def base_size(config: ModelConfig) -> tuple[int, int]:
    """`hidden` and `layers` of the base model; of this one without `scaling`, and this one's layers
    with muP."""
    scaling = config.scaling
    if scaling is None:
        return config.hidden, config.layers
    return scaling.base_hidden or config.hidden, scaling.base_layers or config.layers


def multipliers(config: ModelConfig) -> Multipliers:
    """The constants of a model, all 1 without `scaling`."""
    scaling = config.scaling
    if scaling is None:
        return Multipliers()
    hidden, layers = base_size(config)
    return Multipliers(
        scaling.embedding_multiplier,
        # Attention kernels divide by the root of the head size, and this by what is missing.
        sqrt((scaling.base_head_size or config.head_dim) / config.head_dim),
        layers / config.layers,
        scaling.output_multiplier * hidden / config.hidden,
    )


def scaled(values: Tensor, multiplier: float) -> Tensor:
    """The values times a multiplier."""
    return values if multiplier == 1 else values * multiplier


_ROLES: dict[ParameterKind, Role] = {"matrix": "hidden", "expert": "hidden", "router": "output"}
"""Of parameters of the blocks, by their kind. The others are vectors."""


def scale_specs(config: ModelConfig, blocks: nn.Module, *ends: nn.Module) -> None:
    """Give the parameters of a GPT, whose `ends` are outside the blocks, their initial deviation
    and their size ratio. Changes nothing without `scaling`."""
    if config.scaling is None:
        return
    hidden, layers = base_size(config)
    width, depth = config.hidden / hidden, config.layers / layers
    for parameter in blocks.parameters():
        spec = spec_of("", parameter)
        role = _ROLES.get(spec.kind, "vector")
        std = spec.init_std / {"hidden": sqrt(width), "output": width, "vector": 1.0}[role]
        ratio = SizeRatio(width, depth, role)
        set_spec(parameter, replace(spec, init_std=std, ratio=ratio))
    for parameter in (parameter for end in ends for parameter in end.parameters()):
        spec = spec_of("", parameter)
        set_spec(parameter, replace(spec, ratio=SizeRatio(width, 1.0, "vector")))


def describe_scaling(config: ModelConfig) -> str:
    """One line: the size relative to the base model, and the constants of the forward pass."""
    assert config.scaling is not None
    hidden, layers = base_size(config)
    values = multipliers(config)._asdict()
    constants = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    return (
        f"scaling {config.scaling.name}: width {config.hidden / hidden:.4g} and depth "
        f"{config.layers / layers:.4g} times the base model's; multipliers: {constants}"
    )


def folded(
    config: ModelConfig, weights: Mapping[str, Tensor]
) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """The same model without `scaling`: its config, and weights that contain the constants of the
    forward pass. They are read when they are asked for."""
    if config.scaling is None:
        return config, weights
    return replace(config, scaling=None), _Folded(config, weights)


class _Folded(Mapping[str, Tensor]):
    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self._weights, found = weights, multipliers(config)
        # A norm of queries would undo a factor of the projection, so the norm's weight takes it.
        self._projected = found.query if config.qk_norm == "none" else 1.0
        self._queries = config.heads * config.head_dim
        # A tied matrix has the embedding's factor, so the norm before the logits takes it back.
        output = found.output / (found.embedding if config.tie_embeddings else 1.0)
        self._config, self._residual = config, found.residual
        self._factors = {
            "embedding": found.embedding,
            "head.norm": output,
            "query_norm": found.query,
        }

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        if ".attention.qkv." in name:
            query, others = weight[: self._queries], weight[self._queries :]
            return torch.cat([scaled(query, self._projected), others])
        known = self._factors | dict.fromkeys(self._added(name), self._residual)
        factors = (value for part, value in known.items() if f".{part}." in f".{name}.")
        return scaled(weight, next(factors, 1.0))

    def _added(self, name: str) -> tuple[str, ...]:
        """The parts of a parameter's block whose results are added to the residual stream: norms,
        or matrices."""
        first, *rest = name.split(".")
        block = int(rest[0]) if first == "blocks" else self._config.layers
        is_before = self._config.norm_position_of(block) == "before"
        return ("out", "down") if is_before else ("post_norm1", "post_norm2")

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
