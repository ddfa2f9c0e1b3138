"""How the time of runs divides into steps and all else: rows of the table, and a picture."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import fill
from typing import Any

from megafrontier.report.read import Run
from megafrontier.training.goodput import BETWEEN, KINDS, TimeSpan, seconds_in_jobs, sum_by_kind

COLOURS = {
    "steps": "#0072B2",
    "repeated": "#D55E00",
    "starts": "#E69F00",
    "saves": "#009E73",
    "evaluation": "#56B4E9",
    "other": "#999999",
    "failures": "#000000",
    "queued": "#E5E5E5",
}
NAMES = {"repeated": "steps done again", "other": "between steps", "queued": "between jobs"}
"""Of kinds whose own name says too little."""
_SECONDS = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
_PIXELS = 1000
_LEAST_LABEL, _LEAST_NAMED = 0.05, 0.001
"""Of the time in jobs: a share that is written on its bar, and one that the legend names."""


def goodput_rows(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Goodput, and the share of each kind of time that occurred. No rows for runs without times."""
    found = [sum_by_kind(run.spans) for run in runs]
    if not any(map(any, (of.values() for of in found))):
        return {}
    rows = {"goodput": [_share(of, "steps", with_wall=True) for of in found]}
    for kind in KINDS[1:]:
        cells = [_share(of, kind) for of in found]
        if any(cells):
            rows[f"goodput: {NAMES.get(kind, kind)}"] = cells
    return rows


def _share(seconds: dict[str, float], kind: str, with_wall: bool = False) -> str:
    wall = seconds_in_jobs(seconds)
    if not (wall and seconds[kind]):
        return ""
    length = describe_seconds(wall if with_wall else seconds[kind])
    if kind == "queued":  # no part of the wall time in jobs
        return length
    return f"{seconds[kind] / wall:.1%}" + (f" of {length}" if with_wall else f", {length}")


def describe_seconds(seconds: float) -> str:
    """`90 s` and `1.5 hours`: in the largest unit of which there are two."""
    unit = _unit(seconds)
    return f"{seconds / _SECONDS[unit]:.3g} {unit if unit != 'seconds' else 's'}"


def _unit(seconds: float) -> str:
    return next((unit for unit, one in _SECONDS.items() if seconds >= 2 * one), "seconds")


def draw_spans(figure: Any, axes: Sequence[Any], runs: Sequence[Run]) -> None:
    """Each run's time from its first launch on the first axis, its sums on the second one."""
    from matplotlib.patches import Patch

    longest = max(run.spans[-1].end - run.spans[0].begin for run in runs if run.spans)
    unit = _unit(longest)
    for row, run in enumerate(runs):
        for kind, begin, length in _drawn(run.spans, longest / _PIXELS):
            bar = [(begin / _SECONDS[unit], length / _SECONDS[unit])]
            axes[0].broken_barh(bar, (row - 0.4, 0.8), color=COLOURS[kind], linewidth=0)
        _draw_sums(axes[1], row, sum_by_kind(run.spans))
    axes[0].set_title("what happened when")
    axes[0].set_xlabel(f"{unit} since the first launch")
    axes[1].set_title("share of the time in jobs")
    axes[1].set_xlim(0, 1)
    axes[1].xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes[0].set_yticks(range(len(runs)), [fill(run.label, 24) for run in runs])
    axes[0].invert_yaxis()
    for axis in axes:
        axis.grid(axis="y", visible=False)
    found = [sum_by_kind(run.spans) for run in runs]
    kinds = [k for k in KINDS if any(of[k] > _LEAST_NAMED * sum(of.values()) for of in found)]
    handles = [Patch(color=COLOURS[kind], label=NAMES.get(kind, kind)) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds))


def _drawn(spans: Sequence[TimeSpan], pixel: float) -> Iterator[tuple[str, float, float]]:
    """Kind, begin and length of bars. What is between two steps and too short to be seen is drawn
    as a step; the rest is as wide as a pixel at least."""
    if not spans:
        return
    first = spans[0].begin
    small = [span.kind in BETWEEN and span.seconds < pixel for span in spans]
    kinds = [
        "steps" if is_small else span.kind for span, is_small in zip(spans, small, strict=True)
    ]
    for kind, group in groupby(zip(kinds, spans, strict=True), key=lambda pair: pair[0]):
        parts = [span for _, span in group]
        yield kind, parts[0].begin - first, max(pixel, parts[-1].end - parts[0].begin)


def _draw_sums(axis: Any, row: int, seconds: dict[str, float]) -> None:
    wall, left = seconds_in_jobs(seconds), 0.0
    for kind in KINDS[:-1]:
        share = seconds[kind] / wall if wall else 0.0
        axis.barh(row, share, 0.8, left=left, color=COLOURS[kind])
        if share >= _LEAST_LABEL:
            text = f"{share:.0%}"
            middle = (left + share / 2, row)
            axis.annotate(text, middle, color="white", ha="center", va="center", fontsize=9)
        left += share
