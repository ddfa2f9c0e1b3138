"""The picture of the slow network: every strategy's speed, rate by rate."""

from pathlib import Path
from typing import Any

from megafrontier.report.draw import pyplot, run_look
from scripts.benchmarks.slow_network.report import ALONE, Figures, Row

COLUMNS = 3


def draw(figures: Figures, path: Path) -> None:
    """A panel for each accumulation and rate at the most nodes: speed relative to computing alone,
    and the bytes that a node sent."""
    rows = [r for r in figures.rows if r.nodes > 1 and not r.skipped and r.strategy != ALONE]
    if not rows:
        return
    nodes = max(r.nodes for r in rows)
    panels: dict[tuple[int, float], list[Row]] = {}
    for row in rows:
        if row.nodes == nodes:
            panels.setdefault((row.accumulation, row.slower), []).append(row)
    keys = sorted(panels)
    lines = [keys[first : first + COLUMNS] for first in range(0, len(keys), COLUMNS)]
    most = [max(len(panels[key]) for key in line) for line in lines]
    heights = [0.32 * count + 0.9 for count in most]
    plt = pyplot()
    figure, axes = plt.subplots(
        len(lines),
        COLUMNS,
        figsize=(4.2 * COLUMNS, sum(heights) + 0.4),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set_visible(False)
    for line, (places, count) in enumerate(zip(lines, most, strict=True)):
        for axis, key in zip(axes[line], places, strict=False):
            axis.set_visible(True)
            axis.set_title(f"accumulation {key[0]}, {key[1]:g} × slower", fontsize=9)
            _panel(axis, figures, panels[key], count)
    figure.suptitle(f"{nodes} nodes × 4 ranks: speed, computing alone = 100 %", fontsize=12)
    figure.savefig(path)
    plt.close(figure)


def _panel(axis: Any, figures: Figures, rows: list[Row], most: int) -> None:
    speeds = []
    for row in rows:
        compute = figures.compute(row)
        speeds.append(100 * compute / row.median_seconds if compute else 0.0)
    colours = [run_look(_family(row.strategy))["color"] for row in rows]
    places = range(len(rows))
    axis.barh(places, speeds, color=colours, height=0.7)
    for place, row, speed in zip(places, rows, speeds, strict=True):
        text = f" {speed:.0f} %, {row.nic_bytes / 1e6:.1f} MB"
        axis.text(speed, place, text, va="center", fontsize=8)
    axis.set_yticks(places, [row.strategy for row in rows])
    axis.set_ylim(most - 0.4, -0.6)  # the first on top, bars alike in all panels
    axis.set_xlim(0, 140)
    axis.set_xticks(range(0, 101, 25))
    axis.grid(axis="y", visible=False)


def _family(name: str) -> int:
    """Others in one colour, those of ours that cross the slow level in each micro-batch in another,
    and those that cross it once a step in a third."""
    if name.startswith(("FSDP2", "DeepSpeed")):
        return 0
    return 1 if name.startswith(("zero3", "hpz")) else 2
