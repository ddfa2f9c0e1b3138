"""What the pictures of the benchmarks have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

from megafrontier.report.draw import level_colours

GREY = "#BBBBBB"


def timeline_panel(
    axis: Any, title: str, rows: Mapping[str, Sequence[tuple[float, float]]], grey: str
) -> None:
    """A row of bars (begin, length) for each level in its colour, and for `grey` in grey."""
    colours = level_colours([name for name in rows if name != grey]) | {grey: GREY}
    for place, (name, bars) in enumerate(rows.items()):
        axis.broken_barh(bars, (place - 0.4, 0.8), color=colours[name], linewidth=0)
    axis.set_yticks(range(len(rows)), [*rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.set_title(title)
