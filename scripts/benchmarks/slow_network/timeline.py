"""Draw traces of `megafrontier train --trace`, or of slow_network --trace, as a picture.

    python -m scripts.benchmarks.slow_network.timeline OUT.png TRACE.json [TITLE] …
        [--begin S] [--seconds S]

A panel for each trace: a row for each level's crossings, the fastest on top, and one for the time
that the computation waited for them. All panels have the same length, from `--begin` seconds after
each trace's first event.
"""

import json
from pathlib import Path

from megafrontier.comm.ledger import WAITING
from megafrontier.common.errors import UserError, exit_on_fatal_error
from megafrontier.report.draw import pyplot
from scripts.benchmarks.shared.measuring import in_a_folder, make_parser
from scripts.benchmarks.shared.pictures import timeline_panel

Bars = dict[str, list[tuple[float, float]]]
"""By row, each bar's begin and length in seconds."""


def read(path: Path) -> Bars:
    """The bars of a trace, from its first event on. Raises UserError where it is none, or empty."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: {error}; need what `train --trace` writes") from error
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    timed = [event for event in events if event["ph"] == "X"]
    if not timed:
        raise UserError(f"{path}: nothing crosses in this trace")
    first = min(event["ts"] for event in timed)
    bars: Bars = {name: [] for name in rows.values()}
    for event in timed:
        bars[rows[event["tid"]]].append(((event["ts"] - first) / 1e6, event["dur"] / 1e6))
    return bars


def main() -> None:
    """Read, and draw."""
    parser = make_parser(__doc__)
    parser.add_argument("out", type=in_a_folder)
    parser.add_argument("traces", nargs="+", metavar="TRACE.json [TITLE]")
    parser.add_argument("--begin", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, help="default: to the end of the longest")
    arguments = parser.parse_args()
    titles: dict[Path, str] = {}
    for word in arguments.traces:
        if word.endswith(".json"):
            titles[Path(word)] = Path(word).stem
        elif titles:
            titles[list(titles)[-1]] = word
    if not titles:
        parser.error("TRACE.json: need at least one file with this ending")
    with exit_on_fatal_error("timeline"):
        found = {path: read(path) for path in titles}
    ends = (at + length for bars in found.values() for row in bars.values() for at, length in row)
    seconds = arguments.seconds or max(ends) - arguments.begin
    plt = pyplot()
    figure, axes = plt.subplots(
        len(found), figsize=(10, 1.7 * len(found) + 0.5), squeeze=False, layout="constrained"
    )
    for axis, (path, bars) in zip(axes.flat, found.items(), strict=True):
        shown = {name: [(at - arguments.begin, of) for at, of in bars[name]] for name in bars}
        waiting = shown.pop(WAITING)
        timeline_panel(axis, titles[path], shown | {WAITING: waiting}, WAITING)
        axis.set_xlim(0, seconds)
    axes.flat[-1].set_xlabel("seconds")
    figure.savefig(arguments.out)


if __name__ == "__main__":
    main()
