"""Which parameters have which optimizer, and with which values, by the configuration."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import get_args

from megafrontier.common.errors import UserError, need
from megafrontier.config import OptimizerConfig
from megafrontier.parallel.param_spec import Kind, ParamSpec

STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
}
"""The states of each optimizer, by torch's names. They are fp32, one element per element."""


def optimizer_itemsize(optimizer: str) -> int:
    """Bytes that an optimizer keeps for an element: the fp32 master and its states."""
    return 4 + 4 * len(STATES[optimizer])


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


class OptimizerGroups:
    """The optimizer group of every parameter, by `optimizer.groups`.

    groups: two for each of the configuration, those of the keys of `optimizer` first: of parameters
        with weight decay, and of those of `optimizer.no_decay`.
    numbers: for each parameter's name, the index of its group.
    """

    def __init__(self, config: OptimizerConfig, specs: Iterable[ParamSpec]) -> None:
        """Raises UserError for a group without parameters, for a parameter in two groups, and for
        one that its optimizer cannot update."""
        self._specs = list(specs)
        chosen = _choose(config, self._specs)
        self.groups: list[OptimizerGroup] = []
        for index in range(len(config.groups) + 1):
            self.groups += _pair(config, index - 1)
        self.numbers = {
            spec.name: 2 * (chosen[spec.name] + 1) + (spec.kind in config.no_decay)
            for spec in self._specs
        }
        for spec in self._specs:
            self.of(spec)
        for number in range(0, len(self.groups), 2):
            self._check_heads(number)

    def _check_heads(self, number: int) -> None:
        """Refuse `split_heads` of a group for which it does nothing."""
        members = [spec for spec in self._specs if self.numbers[spec.name] // 2 == number // 2]
        group, key = self.groups[number], _key(number)
        has_heads = group.optimizer == "muon" and any(spec.head_rows for spec in members)
        fits = "need name: muon, and a matrix of attention heads (attention.qkv) in the group"
        need(has_heads or not group.split_heads, f"{key}split_heads", "true", fits)

    def of(self, spec: ParamSpec) -> tuple[str, int]:
        """The optimizer of a parameter, and its group's index. Raises UserError if the optimizer
        cannot update it, or not the box that a rank has."""
        number = self.numbers[spec.name]
        optimizer = self.groups[number].optimizer
        if optimizer == "muon":
            _refuse_misfit(_key(number).removesuffix(".") if number > 1 else "optimizer.name", spec)
        return optimizer, number

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


def _key(number: int) -> str:
    """The prefix of a group's keys in the configuration."""
    return f"optimizer.groups[{number // 2 - 1}]." if number > 1 else "optimizer."


def _names(specs: Sequence[ParamSpec]) -> str:
    return ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", spec.name) for spec in specs))


def _choose(config: OptimizerConfig, specs: Sequence[ParamSpec]) -> dict[str, int]:
    """For each parameter's name, the index of its group in the configuration, -1 for none."""
    chosen = {spec.name: -1 for spec in specs}
    for index, group in enumerate(config.groups):
        key = f"optimizer.groups[{index}].match"
        found = [spec.name for spec in specs if _is_match(group.match, spec)]
        fits = (
            f"matches no parameter, need one of {', '.join(get_args(Kind))}, or a pattern of names "
            f"such as {specs[-1].name}"
        )
        need(bool(found), key, group.match, fits)
        for name in found:
            other = chosen[name]
            fits = f"need {name} in one group, it is in optimizer.groups[{other}] too"
            need(other < 0, key, group.match, fits)
            chosen[name] = index
    return chosen


def _is_match(match: str, spec: ParamSpec) -> bool:
    if match in get_args(Kind):
        return spec.kind == match
    kind, _, pattern = match.rpartition(":")
    return kind in ("", spec.kind) and fnmatchcase(spec.name, pattern)


def _pair(config: OptimizerConfig, index: int) -> Iterator[OptimizerGroup]:
    """The groups with and without weight decay of one of the configuration; -1: of `optimizer`."""
    given = {} if index < 0 else asdict(config.groups[index])
    values = {key: value for key, value in given.items() if value is not None}
    whole = asdict(config) | values
    scale = whole["lr"] / config.lr if "lr" in values else 1.0
    for decay in (whole["weight_decay"], values.get("weight_decay", 0.0)):
        yield OptimizerGroup(
            whole["name"],
            scale,
            tuple(whole["betas"]),
            whole["eps"],
            whole["momentum"],
            decay,
            whole["split_heads"],
        )


def _refuse_misfit(key: str, spec: ParamSpec) -> None:
    shape = "x".join(map(str, spec.shape))
    if len(spec.shape) != 2:
        raise UserError(
            f"{key}: muon, but {spec.name} has shape {shape}, need a matrix, or adamw or sgd for it"
        )
