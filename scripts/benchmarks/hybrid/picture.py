"""Draw the scan of states over levels: of which parts a rank, a pair and a node have one map.

    python -m scripts.benchmarks.hybrid.picture [--out docs/images/state-scan.png]

One document on 8 ranks, as pairs in nodes. The rows are those of the plan that a run executes.
"""

from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megafrontier.report.draw import level_colours, pyplot
from megafrontier.splits.documents import assign_over, ranks_in_line
from megafrontier.splits.state_scan import plan_scan
from scripts.benchmarks.shared.measuring import in_a_folder, make_parser
from scripts.benchmarks.shared.pictures import GREY

LEVELS = {"pair": 2, "node": 2, "world": 2}
BOUNDS = (0, 1 << 15)


class Run(NamedTuple):
    """Parts [first, stop) of the document that a group has as one map."""

    group: int
    first: int
    stop: int


def runs_of(size: int) -> list[Run]:
    """The runs of groups of `size` ranks, in the order of the document."""
    sizes = tuple(LEVELS.values())
    line = ranks_in_line(sizes)
    groups = [line.index(part.rank) // size for part in assign_over(BOUNDS, sizes)]
    found, first = [], 0
    for group, members in groupby(groups):
        stop = first + len(list(members))
        found.append(Run(group, first, stop))
        first = stop
    return found


def draw(path: Path) -> None:
    """A row for the parts of single ranks, and one after the exchange over each level."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9.0, 4.0), layout="constrained")
    steps = plan_scan(BOUNDS, tuple(LEVELS.values()), 0, backwards=False)[1:]
    colours, names = {"rank": GREY} | level_colours([*LEVELS]), ["rank", *LEVELS]
    size, last = 1, runs_of(1)[-1].stop
    for place, name in enumerate(names):
        size *= LEVELS.get(name, 1)
        _row(axis, place, runs_of(size), name, colours[name])
        if place:
            text = (
                f"each {names[place - 1]} sends {steps[place - 1].room} maps over the {name} level"
            )
            axis.text(last / 2, place - 0.5, text, ha="center", va="center")
    axis.set(xlim=(0, last), ylim=(len(LEVELS) + 0.4, -0.4), xticks=[0, last])
    axis.set_xticklabels(["start of the document", "end"])
    axis.set_yticks(range(len(names)), ["parts of a rank", *(f"maps of a {n}" for n in LEVELS)])
    for label, side in zip(axis.get_xticklabels(), ("left", "right"), strict=True):
        label.set_ha(side)
    axis.tick_params(length=0)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def _row(axis: Any, place: int, runs: list[Run], name: str, colour: Any) -> None:
    """A box for each run, with the group that has its map."""
    for run in runs:
        width = run.stop - run.first
        box = axis.barh(
            place, width - 0.1, left=run.first + 0.05, height=0.42, color=colour, linewidth=0
        )
        text = f"{name} {run.group}" if width > 1 else f"{run.group}"
        ink = "black" if name in ("rank", "pair") else "white"
        axis.bar_label(box, [text], label_type="center", fontsize=8, color=ink)


def main() -> None:
    """Draw the picture."""
    parser = make_parser(__doc__, "picture")
    default = Path("docs/images/state-scan.png")
    parser.add_argument("--out", type=in_a_folder, default=default)
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
