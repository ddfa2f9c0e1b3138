"""A table of throughput in Markdown, to paste into an issue or a paper."""

from collections.abc import Sequence
from pathlib import Path

from megafrontier.common.errors import UserError
from megafrontier.config import Config, load_machine
from megafrontier.report.draw import short
from megafrontier.report.read import Run, all_levels, read_runs


def throughput_table(directories: Sequence[Path]) -> str:
    """A row for each run: medians over its steps. Raises UserError as `read_runs` does."""
    runs = read_runs(directories)
    levels = all_levels(runs)
    heads = ["run", "model", "machine", "ranks", "tokens/s", "TF/s per device", "MFU"]
    rows = [heads + [f"{level}, sent a step" for level in levels]]
    rows.append(["-" * len(head) for head in rows[0]])
    rows += [[*_cells(run), *(_sent(run, level) for level in levels)] for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(run: Run) -> list[str]:
    config = run.config
    speed, flops, mfu = map(run.median, ("tokens_per_second", "tflops_per_device", "mfu"))
    ranks = run.ranks(speed, flops)
    return [
        run.label.replace("|", "/"),
        "" if config is None else _model(config),
        "" if config is None else _machine(config),
        "" if ranks is None else str(ranks),
        "" if speed is None else f"{speed:,.0f}",
        "" if flops is None else f"{flops:.3g}",
        "" if mfu is None else f"{mfu:.1%}",
    ]


def _sent(run: Run, level: str) -> str:
    sent = run.traffic(level, "bytes")
    return "" if sent is None else short(sent, "B")


def _model(config: Config) -> str:
    from megafrontier.model.flops import parameter_count  # imports torch

    model = config.model
    return f"{short(parameter_count(model))}, {model.layers} x {model.hidden}"


def _machine(config: Config) -> str:
    try:
        device = load_machine(config.machine).device.name
    except UserError:
        device = ""
    name = config.machine if isinstance(config.machine, str) else ""
    return ", ".join(part for part in (Path(name).stem, device) if part)
