"""The picture of the slow network: tokens per second of every strategy, rate by rate."""

from pathlib import Path
from typing import Any

from slow_network_report import ALONE, Figures

from megafrontier.report.style import pyplot, run_look


def draw(figures: Figures, path: Path) -> None:
    """One panel for each accumulation and rate at the most nodes: speed relative to computing
    alone, and where the missing time went."""
    rows = [r for r in figures.rows if r.nodes > 1 and not r.skipped]
    if not rows:
        return
    nodes = max(r.nodes for r in rows)
    panels = sorted({(r.accumulation, r.slower) for r in rows if r.nodes == nodes})
    columns = len({slower for _, slower in panels})
    plt = pyplot()
    lines = -(-len(panels) // columns)
    names = list(dict.fromkeys(r.strategy for r in rows if r.strategy != ALONE))
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(3.6 * columns + 1.6, (0.34 * len(names) + 1.3) * lines),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, (accumulation, slower) in zip(axes.flat, panels, strict=False):
        _panel(axis, figures, names, (nodes, slower, accumulation))
    axes[0, 0].invert_yaxis()  # shared: the first strategy on top in all
    figure.suptitle(f"{nodes} nodes × 4 ranks: speed, computing alone = 100 %", fontsize=12)
    figure.savefig(path)
    plt.close(figure)


def _panel(axis: Any, figures: Figures, names: list[str], key: tuple[int, float, int]) -> None:
    nodes, slower, accumulation = key
    found = [figures.find(name, nodes, slower, accumulation) for name in names]
    speeds = []
    for row in found:
        compute = figures.compute(row) if row else None
        speeds.append(100 * compute / row.median_seconds if row and compute else 0.0)
    colours = [run_look(_family(name))["color"] for name in names]
    places = range(len(names))
    axis.barh(places, speeds, color=colours, height=0.7)
    for place, (row, speed) in enumerate(zip(found, speeds, strict=True)):
        text = f" {speed:.0f} %, {row.nic_bytes / 1e6:.1f} MB" if row else " not measured"
        axis.text(speed, place, text, va="center", fontsize=8)
    axis.set_yticks(places, names)
    axis.set_xlim(0, 140)
    axis.set_xticks(range(0, 101, 25))
    axis.grid(axis="y", visible=False)
    axis.set_title(f"accumulation {accumulation}, link {slower:g} × slower")


def _family(name: str) -> int:
    """FSDP2 in one colour, what crosses the slow level in each micro-batch in another, and what
    crosses it once a step in a third."""
    if name.startswith("FSDP2"):
        return 0
    return 1 if name.startswith(("zero3", "hpz")) else 2
