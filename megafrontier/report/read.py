"""The metrics of runs, read from metrics.jsonl, attempts.jsonl and config.yaml in their
directories."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megafrontier.common.errors import UserError
from megafrontier.config import Config, load_config, load_machine
from megafrontier.training.goodput import TimeSpan, divide
from megafrontier.training.resume.restarts import FILE_NAME, read_records

Metrics = dict[str, Any]


@dataclass
class Run:
    """The metrics of one run, each step once, in order."""

    label: str
    """The run's name, with its directory if several runs of a report share the name."""
    directory: Path
    config: Config | None
    """None if config.yaml is missing or of another version."""
    steps: list[Metrics]
    """Lines of optimizer steps, skipped steps included."""
    evaluations: list[tuple[int, float]]
    """(step, validation loss in nats per token)."""
    results: dict[str, float] = field(default_factory=dict)
    """The newest results of tasks, as `task: metric`, and validation losses of named corpora."""
    spans: list[TimeSpan] = field(default_factory=list)
    """How the run has spent its time; empty for runs of older versions."""

    @property
    def levels(self) -> list[str]:
        """Levels whose traffic was counted, fastest first."""
        return list(dict.fromkeys(name for line in self.steps for name in line.get("comm") or {}))

    @property
    def skipped(self) -> list[int]:
        """Steps that changed no weight."""
        return [line["step"] for line in self.steps if line.get("skipped")]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, without the steps in which it is missing or null."""
        points = [(line["step"], line[key]) for line in self.steps if line.get(key) is not None]
        return [step for step, _ in points], [value for _, value in points]

    def median(self, key: str) -> float | None:
        """Median of a metric over the steps, or None if no step has it."""
        return median(values) if (values := self.series(key)[1]) else None

    def traffic(self, level: str, quantity: str, kind: str | None = None) -> float | None:
        """Median `bytes` or `seconds` of one rank over `level` in one step; with `kind`, of
        collectives of that kind, or their `hidden` seconds. None if no step has such a number."""
        lines = [line["comm"].get(level) for line in self.steps if line.get("comm")]
        if kind is not None:
            lines = [line.get(kind) for line in lines if line]
        values = [line[quantity] for line in lines if line]
        return median(values) if values else None

    def waited(self, level: str) -> float | None:
        """Median seconds of a step in which the computation waited for collectives over `level`."""
        lines = [line["comm"].get(level) for line in self.steps if line.get("comm")]
        kinds = [
            [kind for kind in line.values() if isinstance(kind, dict)] for line in lines if line
        ]
        waits = [sum(kind["seconds"] - kind["hidden"] for kind in of) for of in kinds if of]
        return median(waits) if waits else None

    def ranks(self, tokens_per_second: float | None, tflops: float | None) -> int | None:
        """The number of ranks at these tokens per second and TF/s per device, because metrics do
        not have it. None if a rate or the config is missing."""
        if self.config is None or not tokens_per_second or not tflops:
            return None
        from megafrontier.model.flops import flops_per_token  # imports torch

        whole = flops_per_token(self.config.model) * tokens_per_second
        return max(round(whole / (tflops * 1e12)), 1)


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """The runs in `directories`, each with a different label.

    Raises UserError if a directory holds no metrics or malformed ones.
    """
    runs = [_read_run(Path(directory)) for directory in directories]
    names = [run.label for run in runs]
    for run in runs:
        if names.count(run.label) > 1:
            run.label = f"{run.label} ({run.directory})"
    return runs


def _read_run(directory: Path) -> Run:
    path = directory / "metrics.jsonl"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}, need the directory of a run") from error
    lines = _parse_lines(path, text)
    # A resumed run repeats steps. The later line replaces the earlier one.
    steps = {line["step"]: line for line in lines if not {"valid_loss", "tasks"} & line.keys()}
    evaluations = {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}
    if not steps:
        raise UserError(f"{path}: no steps yet, need at least one")
    config = None
    with suppress(UserError):
        config = load_config(directory / "config.yaml")
    return Run(
        label=config.run.name if config else directory.resolve().name,
        directory=directory,
        config=config,
        steps=[steps[step] for step in sorted(steps)],
        evaluations=[(s, loss) for s, loss in sorted(evaluations.items()) if loss is not None],
        results=_results(lines),
        spans=divide(read_records(directory / FILE_NAME), lines),
    )


def _results(lines: Sequence[Metrics]) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in sorted(lines, key=lambda line: int(line["step"])):
        for key, value in line.items():
            if key == "average_valid_loss" and value is not None:
                found[f"validation loss of the average of {line['averaged']}"] = value
            if key.startswith("valid_loss/") and value is not None:
                found[f"validation loss of {key.removeprefix('valid_loss/')}"] = value
        for task, values in (line.get("tasks") or {}).items():
            found |= {f"{task}: {name}": value for name, value in values.items()}
    return found


def _parse_lines(path: Path, text: str) -> list[Metrics]:
    lines = text.splitlines()
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            values["step"] = int(values["step"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not text.endswith("\n"):
                break  # the run is writing this line, or was killed while it wrote it
            raise UserError(f"{path}:{number}: {line[:40]!r}, need JSON with a step") from error
        parsed.append(values)
    return parsed


def all_levels(runs: Sequence[Run]) -> list[str]:
    """The levels of all runs, fastest first, in the order of the run that has most of them."""
    sorted_runs = sorted(runs, key=lambda run: -len(run.levels))
    return list(dict.fromkeys(level for run in sorted_runs for level in run.levels))


def strategy_of(config: Config) -> str:
    """The name of the strategy, or the level of each state."""
    partition = config.partition
    states = ("weights", "backward_weights", "gradients", "optimizer")
    levels = {state.replace("_", " "): getattr(partition, state) for state in states}
    given = ", ".join(f"{state} {level}" for state, level in levels.items() if level is not None)
    return partition.strategy or given or "topo"


def levels_of(config: Config) -> str:
    """The machine's levels and their sizes, fastest first."""
    try:
        levels = load_machine(config.machine).levels
    except UserError:
        return ""
    return " · ".join(f"{name} {level.size or ''}".strip() for name, level in levels.items())
