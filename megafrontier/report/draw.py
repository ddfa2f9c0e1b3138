"""The three pictures: loss, throughput, traffic per level."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from textwrap import wrap
from typing import Any
from warnings import catch_warnings, filterwarnings

from megafrontier.report.read import Run, all_levels
from megafrontier.report.style import level_colours, pyplot, run_look, short

# Fewer points than this are shown as they are: smoothing would hide what little there is.
_FEW = 20
_LEGEND_WIDTH = 105
"""Letters that a line of the legend below a picture has room for."""


def draw_loss(runs: Sequence[Run], path: Path) -> None:
    """Training loss faint and smoothed, validation as diamonds; below, lr and gradient norm."""
    extras = _present(runs, {"lr": "learning\nrate", "grad_norm": "gradient\nnorm"})
    figure, (top, *rest) = _panels([4.2] + [1.2] * len(extras))
    unsteady = [run for run in runs if run.skipped]
    for index, run in enumerate(runs):
        row = unsteady.index(run) if run.skipped else 0
        _loss_of_run(top, run, run_look(index)["color"], row)
    _lines(top, runs, "loss")
    losses = [run.series("loss")[1] + [loss for _, loss in run.evaluations] for run in runs]
    _fit_view(top, losses)
    _note_outside(top, losses)
    top.set_ylabel("loss (nats per token)")
    for axis, (key, title) in zip(rest, extras.items(), strict=True):
        _lines(axis, runs, key, smoothed=False)
        series = [run.series(key)[1] for run in runs]
        _fit_view(axis, series)
        axis.set_ylabel(title)
        highest = max(value for one in series for value in one)
        top = min(axis.get_ylim()[1], 1.08 * highest) or 1
        axis.set_ylim(-0.04 * top, top)  # a little below 0, where a line would be half hidden
        _note_outside(axis, series)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _finish_steps(figure, runs, [_loss_label(run) for run in runs])
    _save(figure, path)


def draw_throughput(runs: Sequence[Run], path: Path) -> None:
    """Tokens per second, seconds per step, and MFU (or TFLOP/s where the peak is unknown)."""
    has_mfu = any(run.series("mfu")[1] for run in runs)
    speed = {"mfu": "MFU"} if has_mfu else {"tflops_per_device": "TFLOP/s per device"}
    titles = {"tokens_per_second": "tokens per second", "step_seconds": "time of a step"}
    panels = _present(runs, titles | speed) or titles
    figure, axes = _panels([2.2] * len(panels))
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        _lines(axis, runs, key)
        series = [run.series(key)[1] for run in runs]
        _fit_view(axis, series)
        _widen_view(axis)
        _note_outside(axis, series)
        axis.set_title(title)
        axis.yaxis.set_major_formatter(_FORMATS[key])
        _medians(axis, runs, key)
    _finish_steps(figure, runs, [run.label for run in runs])
    _save(figure, path)


def draw_traffic(runs: Sequence[Run], path: Path) -> None:
    """Bytes that one rank sends over each level in a step, and the seconds they take, per run."""
    plt = pyplot()
    levels = all_levels(runs)
    if not any(run.traffic(level, "bytes") for run in runs for level in levels):
        figure = plt.figure(figsize=(10, 1.2))
        figure.text(0.5, 0.5, "No traffic: no level was crossed.", ha="center", va="center")
        _save(figure, path)
        return
    height = 1.5 + (0.32 * len(levels) + 0.2) * len(runs)
    figure, axes = plt.subplots(ncols=2, figsize=(10, height), sharey=True, layout="constrained")
    figure.get_layout_engine().set(wspace=0.05)  # or the last tick of one stands at the other's 0
    titles = {"bytes": "sent by one rank in one step", "seconds": "time in one step"}
    for axis, (quantity, title) in zip(axes, titles.items(), strict=True):
        _bars(axis, runs, levels, quantity)
        axis.set_title(title)
    axes[0].set_yticks(range(len(runs)), ["\n".join(wrap(run.label, 24)) for run in runs])
    axes[0].invert_yaxis()
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(levels))
    _save(figure, path)


def smooth(values: Sequence[float], longest: int = 0) -> list[float]:
    """Mean of the middle half of the 7 to 101 points around each one: no single spike moves it.

    `longest`: of the lines beside which these values are drawn the longest one's points, for all of
    them are to be smoothed alike. Few values come back as they are.
    """
    if len(values) < _FEW:
        return list(values)
    reach = _reach(max(longest, len(values)))
    return [_middle_around(values, i, reach) for i in range(len(values))]


def last_smooth(values: Sequence[float]) -> float:
    """The last of `smooth(values)`, without the others."""
    few = len(values) < _FEW
    return values[-1] if few else _middle_around(values, len(values) - 1, _reach(len(values)))


def _reach(points: int) -> int:
    return min(max(points // 80, 3), 50)  # at most 50: long runs stay quick to draw


def _middle_around(values: Sequence[float], i: int, reach: int) -> float:
    # At the start the window shrinks to stay centred, for the loss falls fast there; never to
    # one point, for the first step is a slow one.
    back, ahead = min(reach, i), min(reach, max(i, 3))
    window = sorted(values[i - back : i + ahead + 1])
    quarter = len(window) // 4
    return fmean(window[quarter : len(window) - quarter])


def _panels(heights: Sequence[float]) -> tuple[Any, list[Any]]:
    """Axes below each other, of these heights in inches, over one axis of steps."""
    figure, axes = pyplot().subplots(
        len(heights),
        figsize=(10, 1.2 + sum(heights)),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    return figure, list(axes[:, 0])


def _loss_of_run(axis: Any, run: Run, colour: str, row: int) -> None:
    """Diamonds of the evaluations and, in this `row` from the bottom, crosses of the skipped steps:
    in one row the crosses of the last run would hide those of the others."""
    if run.evaluations:
        steps, losses = zip(*run.evaluations, strict=True)
        size = min(6, max(3, 500 / len(steps)))  # hundreds, so large, would hide the lines
        axis.plot(steps, losses, "D", color=colour, ms=size, mec="white", mew=size / 6, zorder=3)
    along = axis.get_xaxis_transform()  # x in steps, y as a part of the axis
    heights = [0.02 + 0.03 * row] * len(run.skipped)
    axis.plot(run.skipped, heights, "x", color=colour, ms=6, transform=along)


def _loss_label(run: Run) -> str:
    losses = run.series("loss")[1]
    parts = [f"train {last_smooth(losses):.3f}"] if losses else []
    if run.evaluations:
        parts.append(f"validation {run.evaluations[-1][1]:.3f} ◆")
    if run.skipped:
        parts.append(f"{len(run.skipped)} skipped ×")
    return f"{run.label}:  {', '.join(parts)}"


def _lines(axis: Any, runs: Sequence[Run], key: str, smoothed: bool = True) -> None:
    """One line a run; with `smoothed` the values themselves stand faint behind it."""
    longest = max((len(run.series(key)[1]) for run in runs), default=0)
    for index, run in enumerate(runs):
        look = run_look(index)
        for steps, values in _stretches(*run.series(key)):
            if len(steps) < _FEW:
                axis.plot(steps, values, **look, linewidth=1.4, marker="o", ms=4)
            elif smoothed:
                axis.plot(steps, values, color=look["color"], alpha=0.25, linewidth=0.8)
                axis.plot(steps, smooth(values, longest), **look, linewidth=1.8)
            else:
                axis.plot(steps, values, **look, linewidth=1.2)


def _stretches(
    steps: Sequence[int], values: Sequence[float]
) -> Iterator[tuple[Sequence[int], Sequence[float]]]:
    """The same points cut where many steps are missing, so that no line bridges a gap."""
    distances = [b - a for a, b in pairwise(steps)]
    usual = median(distances) if distances else 1
    cuts = [i + 1 for i, distance in enumerate(distances) if distance > 5 * usual]
    for start, stop in pairwise([0, *cuts, len(steps)]):
        if start < stop:
            yield steps[start:stop], values[start:stop]


def _medians(axis: Any, runs: Sequence[Run], key: str) -> None:
    """Beside the title, each run's median after a dash of its colour.

    There is room for four; the page's table has them all.
    """
    from matplotlib.lines import Line2D

    middles = [(i, run.middle(key)) for i, run in enumerate(runs)]
    shown = [(i, value) for i, value in middles if value is not None]
    if len(shown) > 4:
        return
    handles = [Line2D([], [], **run_look(i), linewidth=1.8) for i, _ in shown]
    names = [_FORMATS[key](value, None) for _, value in shown]
    axis.legend(
        [Line2D([], [], linestyle=""), *handles],
        ["median:", *names],
        loc="lower right",
        bbox_to_anchor=(1.01, 0.97),
        ncols=len(names) + 1,
        columnspacing=1.2,
        handlelength=1.4,
    )


def _fit_view(axis: Any, series: Sequence[Sequence[float]]) -> None:
    """Leave the rare extreme out of view, which would flatten all the rest."""
    values = sorted(value for one in series for value in one)
    if len(values) < 2 * _FEW:
        return
    low, high = values[len(values) // 100], values[-1 - len(values) // 100]
    margin = 0.15 * (high - low) or 0.05 * abs(high) or 1.0
    if values[-1] <= high + 4 * margin and values[0] >= low - 4 * margin:
        return
    bottom, top = (
        max(values[0] - margin / 3, low - margin),
        min(values[-1] + margin / 3, high + margin),
    )
    axis.set_ylim(bottom, top)


def _note_outside(axis: Any, series: Sequence[Sequence[float]]) -> None:
    """Say how many points the view, which nothing changes afterwards, leaves out."""
    bottom, top = axis.get_ylim()
    values = [value for one in series for value in one]
    outside = sum(not bottom <= value <= top for value in values)
    if outside:
        note = f"{outside} of {len(values)} points outside the view"
        # Above the axes, between the title and the medians, nothing is under it.
        axis.text(0.22, 1.02, note, transform=axis.transAxes, fontsize=8, color="#666666")


def _widen_view(axis: Any) -> None:
    """Show at least a tenth of the value, so that ticks of three digits differ."""
    bottom, top = axis.get_ylim()
    middle = (bottom + top) / 2
    half = max((top - bottom) / 2, 0.05 * abs(middle))
    axis.set_ylim(middle - half, middle + half)


def _finish_steps(figure: Any, runs: Sequence[Run], labels: Sequence[str]) -> None:
    """Whole steps on the shared x axis, also for a run of one step; the runs' names below it."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    axis = figure.axes[-1]
    axis.set_xlabel("optimizer step")
    axis.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axis.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    first = min(run.steps[0]["step"] for run in runs)
    last = max(run.steps[-1]["step"] for run in runs)
    pad = max(0.02 * (last - first), 0.5)
    axis.set_xlim(first - pad, last + pad)
    handles = [Line2D([], [], **run_look(i), linewidth=1.8) for i in range(len(runs))]
    texts = ["\n".join(wrap(label, _LEGEND_WIDTH)) for label in labels]
    columns = max(1, min(len(runs), 110 // max(len(label) for label in labels)))
    # Where a text has several lines, there is one column.
    rows = -(-sum(text.count("\n") + 1 for text in texts) // columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * (rows - 1))
    figure.legend(handles, texts, loc="outside lower center", ncols=columns)


def _bars(axis: Any, runs: Sequence[Run], levels: Sequence[str], quantity: str) -> None:
    unit = {"bytes": "B", "seconds": "s"}[quantity]
    colours = level_colours(levels)
    height = 0.8 / len(levels)
    for place, level in enumerate(levels):
        rows = [row + (place - (len(levels) - 1) / 2) * height for row in range(len(runs))]
        values = [run.traffic(level, quantity) for run in runs]
        lengths = [value or 0.0 for value in values]
        drawn = axis.barh(rows, lengths, 0.9 * height, color=colours[level], label=level)
        texts = ["" if value is None else short(value, unit) for value in values]
        axis.bar_label(drawn, texts, padding=3, fontsize=9, color="#333333")
    axis.xaxis.set_major_formatter(lambda value, _: short(value, unit))
    axis.locator_params(axis="x", nbins=5)
    axis.margins(x=0.18)  # room for the figures at the ends of the bars
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)


def _present(runs: Sequence[Run], titles: dict[str, str]) -> dict[str, str]:
    """Of the metrics in `titles` those that some run has."""
    return {key: title for key, title in titles.items() if any(run.series(key)[1] for run in runs)}


_FORMATS: dict[str, Callable[[Any, Any], str]] = {
    "tokens_per_second": lambda value, _: short(value),
    "step_seconds": lambda value, _: short(value, "s"),
    "mfu": lambda value, _: f"{100 * value:.3g}%",
    "tflops_per_device": lambda value, _: f"{value:.3g}",
}


def _save(figure: Any, path: Path) -> None:
    with catch_warnings():
        filterwarnings("ignore", "Glyph .* missing")  # the page beside it has the run's name
        figure.savefig(path)
    pyplot().close(figure)
