"""Which parameters have which optimizer, and with which values, by the configuration."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from math import prod
from typing import get_args

from megafrontier.common.errors import need
from megafrontier.config import OptimizerConfig
from megafrontier.optim.adamw import ShardedAdamW
from megafrontier.optim.base import OptimizerGroup, SizeFactors, UnitOptimizer
from megafrontier.optim.muon import ShardedMuon
from megafrontier.optim.sgd import ShardedSGD
from megafrontier.optim.subspace import ShardedSubspace
from megafrontier.parallel.param_spec import ParameterKind, ParamSpec, SizeRatio

OPTIMIZERS: dict[str, type[UnitOptimizer]] = {
    kind.name: kind for kind in (ShardedAdamW, ShardedSGD, ShardedMuon, ShardedSubspace)
}
"""The optimizers, by their names in the config."""
EMA = "ema"
"""The state of an exponential moving average of the weights, which any optimizer may have."""


def check_optimizers(config: OptimizerConfig, ranks: int) -> None:
    """Raises UserError for an optimizer that cannot run on so many ranks."""
    names: dict[str, str | None] = {"optimizer.name": config.name}
    names |= {f"optimizer.groups[{i}].name": group.name for i, group in enumerate(config.groups)}
    for key, name in names.items():
        if name is not None:
            OPTIMIZERS[name].check_run(key, ranks)


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
        self.config, self._specs = config, list(specs)
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

    def _check_heads(self, group: OptimizerGroup, key: str, members: Sequence[ParamSpec]) -> None:
        """Refuse `split_heads` of a group for which it does nothing."""
        options = OPTIMIZERS[group.optimizer].options
        has_heads = "split_heads" in options and any(spec.head_rows for spec in members)
        fits = "need name: muon, and a matrix of attention heads (attention.qkv) in the group"
        need(has_heads or not group.split_heads, f"{key}split_heads", "true", fits)

    def of_name(self, name: str) -> OptimizerGroup:
        """The group of a parameter, by its global name."""
        return self.groups[self.numbers[name]]

    def of(self, spec: ParamSpec) -> tuple[str, int]:
        """The optimizer of a parameter, and its group's index. Raises UserError if the optimizer
        cannot update it, or not the box that a rank has."""
        number = self.numbers[spec.name]
        group, (index, _) = self.groups[number], self._pairs[number // 2]
        key = "optimizer.name" if index < 0 else _key(index).removesuffix(".")
        optimizer = OPTIMIZERS[group.optimizer]
        optimizer.check(key, group, spec)
        has_rule = spec.ratio is None or optimizer.size_factors(spec.ratio) is not None
        need(has_rule, key, group.optimizer, f"need adamw for {spec.name} with model.scaling")
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
            group = self.of_name(spec.name)
            rows.setdefault((group.optimizer, group.lr_scale), []).append(spec)
        for (optimizer, scale), specs in rows.items():
            numel = sum(prod(spec.shape) for spec in specs)
            rate = "" if scale == 1 else f" at {scale:g} times optimizer.lr"
            names = dict.fromkeys(re.sub(r"\b\d+\b", "*", spec.name) for spec in specs)
            yield f"optimizer {optimizer}{rate}: {numel:,} parameters, {', '.join(names)}"


def _key(index: int) -> str:
    """The prefix of the keys of a group of the configuration; -1: of `optimizer`."""
    return "optimizer." if index < 0 else f"optimizer.groups[{index}]."


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
    scaled = None if ratio is None else OPTIMIZERS[whole["name"]].size_factors(ratio)
    factors = scaled or SizeFactors()
    scale = factors.lr * (whole["lr"] / config.lr if "lr" in values else 1.0)
    name, betas, eps = whole["name"], tuple(whole["betas"]), whole["eps"] * factors.eps
    for decay in (whole["weight_decay"], values.get("weight_decay", 0.0)):
        decayed, heads = decay * factors.weight_decay, whole["split_heads"]
        yield OptimizerGroup(name, scale, betas, eps, whole["momentum"], decayed, heads)
