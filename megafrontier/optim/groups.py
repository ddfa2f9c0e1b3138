"""Which parameters have which optimizer, and with which values, by the configuration."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import NamedTuple, get_args

from megafrontier.common.errors import UserError, need
from megafrontier.config import OptimizerConfig
from megafrontier.parallel.param_spec import ParameterKind, ParamSpec, SizeRatio

STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
    "lsp": (),
}
"""The states of each optimizer, by torch's names. They are fp32, one element per element."""


EMA = "ema"
"""The state of an exponential moving average of the weights, which any optimizer may have."""


def optimizer_itemsize(optimizer: str, ema: float = 0.0) -> int:
    """Bytes that an optimizer keeps for an element: the fp32 master, its states, and an average of
    the weights if `ema` is above 0."""
    return 4 + 4 * len(STATES[optimizer]) + (4 if ema else 0)


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters with the same optimizer and the same values of it."""

    optimizer: str
    lr_scale: float
    """The learning rate as a multiple of the schedule's."""
    betas: tuple[float, float]
    eps: float
    momentum: float
    weight_decay: float
    split_heads: bool


class SizeFactors(NamedTuple):
    """Multiples of a base model's values in a model of another size."""

    lr: float = 1.0
    eps: float = 1.0
    weight_decay: float = 1.0


def size_factors(optimizer: str, ratio: SizeRatio | None) -> SizeFactors:
    """The factors of a parameter's optimizer.

    adamw: Dey et al. 2025, arXiv:2505.01618, table 1 with alpha = 1. muon: none, because its update
    of a hidden matrix has the same spectral norm in every width, which is what features need to
    change as much (Yang et al. 2023, arXiv:2310.17813).
    """
    if ratio is None or optimizer != "adamw":
        return SizeFactors()
    width = 1.0 if ratio.role == "vector" else ratio.width
    # Gradients of routers do not become smaller with the width.
    gradient = (1.0 if ratio.role == "output" else 1 / ratio.width) / ratio.depth
    return SizeFactors(1 / width, gradient, width)


class OptimizerGroups:
    """The optimizer group of every parameter, by `optimizer.groups` and the parameters' size
    ratios.

    groups: for each of the configuration, those of the keys of `optimizer` first, and for each size
        ratio of its parameters two: of parameters with weight decay, and of those of
        `optimizer.no_decay`.
    numbers: for each parameter's name, the index of its group.
    """

    def __init__(self, config: OptimizerConfig, specs: Iterable[ParamSpec]) -> None:
        """Raises UserError for a group without parameters, for a parameter in two groups, and for
        one that its optimizer cannot update."""
        self._specs = list(specs)
        chosen = _choose(config, self._specs)
        self._pairs = _pairs(config, self._specs, chosen)
        self.groups = [group for pair in self._pairs for group in _pair(config, *pair)]
        pairs = {pair: number for number, pair in enumerate(self._pairs)}
        self.numbers = {
            spec.name: 2 * pairs[chosen[spec.name], spec.ratio] + (spec.kind in config.no_decay)
            for spec in self._specs
        }
        for spec in self._specs:
            self.of(spec)
        for number, (index, _) in enumerate(self._pairs):
            members = [spec for spec in self._specs if chosen[spec.name] == index]
            self._check_heads(self.groups[2 * number], _key(index), members)

    @cached_property
    def by_name(self) -> dict[str, OptimizerGroup]:
        """The group of each parameter."""
        return {name: self.groups[number] for name, number in self.numbers.items()}

    def _check_heads(self, group: OptimizerGroup, key: str, members: Sequence[ParamSpec]) -> None:
        """Refuse `split_heads` of a group for which it does nothing."""
        has_heads = group.optimizer == "muon" and any(spec.head_rows for spec in members)
        fits = "need name: muon, and a matrix of attention heads (attention.qkv) in the group"
        need(has_heads or not group.split_heads, f"{key}split_heads", "true", fits)

    def of(self, spec: ParamSpec) -> tuple[str, int]:
        """The optimizer of a parameter, and its group's index. Raises UserError if the optimizer
        cannot update it, or not the box that a rank has."""
        number = self.numbers[spec.name]
        group, (index, _) = self.groups[number], self._pairs[number // 2]
        key = "optimizer.name" if index < 0 else _key(index).removesuffix(".")
        if group.optimizer in ("muon", "lsp"):
            _refuse_misfit(key, group.optimizer, spec)
        if spec.ratio is not None:
            _refuse_unscaled(key, group, spec, spec.ratio)
        return group.optimizer, number

    def by_optimizer(self) -> dict[str, list[ParamSpec]]:
        """The parameters of each optimizer."""
        found: dict[str, list[ParamSpec]] = {}
        for spec in self._specs:
            found.setdefault(self.of(spec)[0], []).append(spec)
        return found

    def describe(self) -> Iterator[str]:
        """One line for each optimizer and learning rate: the parameters that have it. Those that
        differ only in numbers are one name with `*`."""
        rows: dict[tuple[str, float], list[ParamSpec]] = {}
        for spec in self._specs:
            group = self.groups[self.numbers[spec.name]]
            rows.setdefault((group.optimizer, group.lr_scale), []).append(spec)
        for (optimizer, scale), specs in rows.items():
            numel = sum(prod(spec.shape) for spec in specs)
            rate = "" if scale == 1 else f" at {scale:g} times optimizer.lr"
            yield f"optimizer {optimizer}{rate}: {numel:,} parameters, {_names(specs)}"


def _key(index: int) -> str:
    """The prefix of the keys of a group of the configuration; -1: of `optimizer`."""
    return "optimizer." if index < 0 else f"optimizer.groups[{index}]."


def _names(specs: Sequence[ParamSpec]) -> str:
    return ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", spec.name) for spec in specs))


def _choose(config: OptimizerConfig, specs: Sequence[ParamSpec]) -> dict[str, int]:
    """For each parameter's name, the index of its group in the configuration, -1 for none."""
    chosen = {spec.name: -1 for spec in specs}
    for index, group in enumerate(config.groups):
        key = f"optimizer.groups[{index}].match"
        found = [spec.name for spec in specs if _is_match(group.match, spec)]
        fits = (
            f"matches no parameter, need one of {', '.join(get_args(ParameterKind))}, or a "
            f"pattern of names such as {specs[-1].name}"
        )
        need(bool(found), key, group.match, fits)
        for name in found:
            other = chosen[name]
            fits = f"need {name} in one group, it is in optimizer.groups[{other}] too"
            need(other < 0, key, group.match, fits)
            chosen[name] = index
    return chosen


def _is_match(match: str, spec: ParamSpec) -> bool:
    if match in get_args(ParameterKind):
        return spec.kind == match
    kind, _, pattern = match.rpartition(":")
    return kind in ("", spec.kind) and fnmatchcase(spec.name, pattern)


_Pair = tuple[int, SizeRatio | None]
"""The index of a group in the configuration, -1 for none, and a size ratio."""


def _pairs(
    config: OptimizerConfig, specs: Sequence[ParamSpec], chosen: Mapping[str, int]
) -> list[_Pair]:
    found: list[_Pair] = []
    for index in range(-1, len(config.groups)):
        ratios = dict.fromkeys(spec.ratio for spec in specs if chosen[spec.name] == index)
        found += [(index, ratio) for ratio in ratios or [None]]
    return found


def _pair(config: OptimizerConfig, index: int, ratio: SizeRatio | None) -> Iterator[OptimizerGroup]:
    """The groups with and without weight decay of one of the configuration; -1: of `optimizer`."""
    given = {} if index < 0 else asdict(config.groups[index])
    values = {key: value for key, value in given.items() if value is not None}
    whole = asdict(config) | values
    factors = size_factors(whole["name"], ratio)
    scale = factors.lr * (whole["lr"] / config.lr if "lr" in values else 1.0)
    for decay in (whole["weight_decay"], values.get("weight_decay", 0.0)):
        yield OptimizerGroup(
            whole["name"],
            scale,
            tuple(whole["betas"]),
            whole["eps"] * factors.eps,
            whole["momentum"],
            decay * factors.weight_decay,
            whole["split_heads"],
        )


def _refuse_misfit(key: str, optimizer: str, spec: ParamSpec) -> None:
    shape = "x".join(map(str, spec.shape))
    if len(spec.shape) != (3 if spec.kind == "expert" and optimizer == "muon" else 2):
        raise UserError(
            f"{key}: {optimizer}, but {spec.name} has shape {shape}, need a matrix, or adamw or "
            "sgd for it"
        )


def _refuse_unscaled(key: str, group: OptimizerGroup, spec: ParamSpec, ratio: SizeRatio) -> None:
    """Refuse an optimizer without a rule for this parameter in other sizes of the model."""
    with_scaling = f"for {spec.name} with model.scaling"
    if group.optimizer in ("sgd", "lsp"):
        raise UserError(f"{key}: {group.optimizer}, need adamw or muon {with_scaling}")
    if group.optimizer == "muon" and ratio.role != "hidden":
        raise UserError(
            f"{key}: muon, but not both dimensions are widths, need adamw {with_scaling}"
        )
    if group.split_heads and spec.head_rows:
        raise UserError(f"{key}: split_heads, but heads need not widen, need false {with_scaling}")
