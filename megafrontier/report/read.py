"""A run as its directory tells it: metrics.jsonl and config.yaml."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megafrontier.common.errors import UserError
from megafrontier.config import Config, config_from_dict, load_machine

Metrics = dict[str, Any]
_NUMBERS = {
    *("loss", "valid_loss", "grad_norm", "lr", "loss_scale", "tokens", "tokens_per_second"),
    *("step_seconds", "tflops_per_device", "mfu", "memory_gib"),
}
_NOT_A_LINE = (ValueError, KeyError, TypeError, OverflowError, AttributeError, RecursionError)
_SECTIONS = {"run", "model", "train", "partition", "machine"}


@dataclass
class Run:
    """The metrics of one run, each step once, in order."""

    label: str
    """Its name; with the directory where several runs of a report share a name."""
    directory: Path
    config: Config | None
    """None when config.yaml is gone or from a version with other keys."""
    steps: list[Metrics]
    """Lines of optimizer steps, skipped ones among them."""
    evaluations: list[tuple[int, float]]
    """(step, validation loss in nats per token)."""

    @property
    def levels(self) -> list[str]:
        """Levels whose traffic was counted, fastest first."""
        return list(dict.fromkeys(name for line in self.steps for name in line.get("comm") or {}))

    @property
    def skipped(self) -> list[int]:
        """Steps that were skipped for a non-finite loss or gradient."""
        return [line["step"] for line in self.steps if line.get("skipped")]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it is there and not null."""
        points = [(line["step"], line[key]) for line in self.steps if line.get(key) is not None]
        return [step for step, _ in points], [value for _, value in points]

    def middle(self, key: str) -> float | None:
        """Median of one metric over the steps; None when it never was there."""
        return _median_or_none(self.series(key)[1])

    def traffic(self, level: str, quantity: str) -> float | None:
        """Median `bytes` or `seconds` of one rank over `level` in one step."""
        lines = [line["comm"].get(level) for line in self.steps if line.get("comm")]
        return _median_or_none([line[quantity] for line in lines if line])


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """The runs in `directories`, labelled apart.

    Raises UserError when a directory holds no metrics or broken ones.
    """
    if not directories:
        raise UserError("report: no runs, need at least one run directory")
    runs = [_read_run(Path(directory)) for directory in directories]
    names = [run.label for run in runs]
    for run in runs:
        if names.count(run.label) > 1:
            run.label = f"{run.label} ({run.directory})"
    return runs


def all_levels(runs: Sequence[Run]) -> list[str]:
    """The levels of all runs, fastest first: in the order of the run that has most, and those that
    it has not behind what they follow in their own."""
    merged: list[str] = []
    for run in sorted(runs, key=lambda run: -len(run.levels)):
        at = 0
        for level in run.levels:
            if level not in merged:
                merged.insert(at, level)
            at = merged.index(level) + 1
    return merged


def strategy_of(config: Config) -> str:
    """The named strategy, or the placement spelt out."""
    partition = config.partition
    states = {
        "weights": partition.weights,
        "backward weights": partition.backward_weights,
        "gradients": partition.gradients,
        "optimizer": partition.optimizer,
    }
    given = ", ".join(f"{state} {level}" for state, level in states.items() if level is not None)
    return partition.strategy or given or "topo"


def levels_of(config: Config) -> str:
    """The machine's levels and how many units each joins, fastest first."""
    try:
        levels = load_machine(config.machine).levels
    except UserError:
        return ""
    return " · ".join(f"{name} {level.size or ''}".strip() for name, level in levels.items())


def _read_run(directory: Path) -> Run:
    path = directory / "metrics.jsonl"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}, need the directory of a run") from error
    lines = _parse_lines(path, text)
    # A resumed run repeats steps: the dict keeps the later line.
    steps = {line["step"]: line for line in lines if "valid_loss" not in line}
    evaluations = {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}
    if not steps:
        raise UserError(f"{path}: no steps yet, need at least one")
    config = _read_config(directory / "config.yaml")
    return Run(
        label=config.run.name if config else directory.resolve().name,
        directory=directory,
        config=config,
        steps=[steps[step] for step in sorted(steps)],
        evaluations=[
            (s, evaluations[s]) for s in sorted(evaluations) if evaluations[s] is not None
        ],
    )


def _parse_lines(path: Path, text: str) -> list[Metrics]:
    lines = text.splitlines()
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            values["step"] = _as_step(values["step"])
            _check_numbers(values)
        except _NOT_A_LINE as error:
            if number == len(lines) and not text.endswith("\n"):
                break  # the run is writing this line, or was killed while it did
            need = "need JSON with a step, and numbers"
            raise UserError(f"{path}:{number}: {line[:40]!r}, {need}") from error
        parsed.append(values)
    return parsed


def _check_numbers(line: Metrics) -> None:
    """Raises an error of those above for what no run has written."""
    for traffic in (line.get("comm") or {}).values():
        _check_number(traffic["bytes"])
        _check_number(traffic["seconds"])
    for key in _NUMBERS & line.keys():
        if line[key] is not None:
            _check_number(line[key])


def _as_step(value: Any) -> int:
    step = int(value)
    if not 0 <= step < 2**63:
        raise ValueError(value)
    return step


def _check_number(value: object) -> None:
    # Of 400 digits it cannot be a float, which is an OverflowError.
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(value)


def _read_config(path: Path) -> Config | None:
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
        if not isinstance(values, dict) or not values.keys() >= _SECTIONS:
            return None  # defaults in their place would be taken for the run's
        return config_from_dict(cast(Metrics, values), str(path))
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException, UserError):
        return None


def _median_or_none(values: list[float]) -> float | None:
    return median(values) if values else None
