"""What the comparison of wires found: the table, the figures, and the picture of differences."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from megafrontier.report.draw import pyplot, run_look
from megafrontier.report.read import Run
from scripts.benchmarks.shared.tables import markdown

BASE = "exact"
TARGET = 0.003
"""How far from the exact one a final loss may end, as a part of it."""
STRETCHES = 20
"""Points of a training's curve: the mean of so many steps each that this many cover all of it."""
RunsByVariant = Mapping[str, Run]
Figures = dict[str, dict[str, Any]]


def figures(runs: RunsByVariant) -> Figures:
    """Of each variant the validation losses by step, and the training loss of the last quarter."""
    return {
        name: {"validation": dict(run.evaluations), "training": _last_quarter(run)}
        for name, run in runs.items()
    }


def table(found: Figures) -> str:
    """Markdown: a row for each variant, its losses beside their distances from the exact ones.

    A loss that was not finite is a dash.
    """
    base = found[BASE]
    steps = sorted({step for of in found.values() for step in of["validation"]})
    head = ["wires", *(f"{step:,} steps" for step in steps), "against exact", "training", ""]
    rows = []
    for name, of in found.items():
        losses = [of["validation"].get(step) for step in steps]
        cells = ["–" if loss is None else f"{loss:.4f}" for loss in losses]
        cells.append(_above(losses[-1], base["validation"].get(steps[-1])))
        cells += [f"{of['training']:.4f}", _above(of["training"], base["training"])]
        rows.append([name, *cells])
    return markdown(head, rows)


def draw(runs: RunsByVariant, path: Path) -> None:
    """How much higher than with exact wires the loss of each variant is: above in training, on the
    same batches, below in validation."""
    plt = pyplot()
    figure, (training, validation) = plt.subplots(
        2, figsize=(9, 7), height_ratios=[3, 2], sharex=True, layout="constrained"
    )
    base = runs[BASE]
    others = {name: run for name, run in runs.items() if name != BASE}
    for index, (name, run) in enumerate(others.items()):
        look = run_look(index) | {"marker": "o", "ms": 3.5, "linewidth": 1.4}
        training.plot(*training_differences(run, base), **look, label=name)
        validation.plot(*validation_differences(run, base), **look | {"ms": 6})
    for axis, what in ((training, "training loss"), (validation, "validation loss")):
        axis.axhspan(-100 * TARGET, 100 * TARGET, color="#EEEEEE", zorder=0)
        axis.axhline(0, color="#888888", linewidth=1, zorder=1)
        axis.set_ylabel(f"{what}, % above exact")
    validation.set_xlabel("optimizer step")
    validation.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    note = f"Grey: within {TARGET:.1%}. A point of training is the mean of {_stretch(base)} steps."
    training.set_title(note, fontsize=9, fontweight="normal")
    figure.legend(loc="outside lower center", ncols=len(others))
    figure.savefig(path)
    plt.close(figure)


def training_differences(run: Run, base: Run) -> tuple[list[float], list[float]]:
    """(middles of the stretches of steps, % by which the mean loss of each is above `base`'s), of
    the steps whose loss both have."""
    exact = dict(zip(*base.series("loss"), strict=True))
    points = [
        (s, loss, exact[s]) for s, loss in zip(*run.series("loss"), strict=True) if s in exact
    ]
    length = _stretch(base)
    middles, differences = [], []
    for at in range(0, len(points) - length + 1, length):
        steps, losses, bases = zip(*points[at : at + length], strict=True)
        middles.append(fmean(steps))
        differences.append(100 * (fmean(losses) / fmean(bases) - 1))
    return middles, differences


def validation_differences(run: Run, base: Run) -> tuple[list[int], list[float]]:
    """(steps, % by which each validation loss is above `base`'s), of those that both have."""
    exact = dict(base.evaluations)
    both = [(step, loss) for step, loss in run.evaluations if step in exact]
    return [step for step, _ in both], [100 * (loss / exact[step] - 1) for step, loss in both]


def _stretch(run: Run) -> int:
    return max(len(run.series("loss")[1]) // STRETCHES, 1)


def _last_quarter(run: Run) -> float:
    losses = run.series("loss")[1]
    return fmean(losses[-max(len(losses) // 4, 1) :])


def _above(loss: float | None, base: float | None) -> str:
    return "–" if loss is None or base is None else f"{loss / base - 1:+.2%}"
