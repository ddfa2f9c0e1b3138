"""What the trials of mutants say, as Markdown."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.mutants.operators import OPERATORS

Line = dict[str, Any]
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
"""A line for each mutant that computes the same: its key, and why."""
_TRIVIAL = re.compile(r"(Name|Attribute|Type|Import|UnboundLocal|User)Error")


def read_lines(path: Path) -> dict[str, Line]:
    """The newest line of each mutant, by its key."""
    rows = path.read_text().splitlines() if path.exists() else []
    return {line["key"]: line for line in map(json.loads, rows)}


def read_equivalent() -> dict[str, str]:
    """Why mutants are equivalent, by their keys."""
    return dict(row.split(" ", 1) for row in EQUIVALENT.read_text().splitlines())


def kind_of(line: Line) -> str:
    """How a trial ended: survived, promise, crash, hang; equivalent, if it survived because it
    computes the same; or trivial, with an error that a type checker or the first run of anything
    shows."""
    end = line["end"]
    if not end:
        return "equivalent" if line["key"] in read_equivalent() else "survived"
    if end == "hang" or "no end after" in end:
        return "hang"
    if not end.startswith(("crash: ", "runs end well: ")):
        return "promise"
    return "trivial" if _TRIVIAL.search(end) else "crash"


def report(path: Path) -> str:
    """The tables by operator and by package, and the survivors."""
    lines = list(read_lines(path).values())
    packages = dict.fromkeys(sorted(line["file"].partition("/")[0] for line in lines))
    names = [name for name in (*OPERATORS, "by hand") if any(_is(line, name) for line in lines)]
    about = {name: what for name, (what, _) in OPERATORS.items()}
    about["by hand"] = "bugs that were found in other frameworks"
    parts = [
        _table(
            ("operator", "mirrors"),
            [((f"`{n}`", about[n]), [line for line in lines if _is(line, n)]) for n in names],
        ),
        _table(
            ("package", ""),
            [
                ((f"`{p}`", ""), [line for line in lines if line["file"].startswith(p)])
                for p in packages
            ],
        ),
        "\n".join(_promises(lines)),
        "\n\n".join(_survivor(line) for line in lines if kind_of(line) == "survived"),
    ]
    return "\n\n".join(part for part in parts if part)


def _is(line: Line, operator: str) -> bool:
    return bool(line["operator"] == operator)


def _table(head: tuple[str, str], groups: Sequence[tuple[tuple[str, str], Sequence[Line]]]) -> str:
    kinds = ("promise", "crash", "hang", "survived")
    rows = [f"| {head[0]} | {head[1]} | mutants | promise | crash | hang | survived | caught |"]
    rows.append("|---|---|" + "---:|" * 6)
    everything = [line for _, lines in groups for line in lines]
    for (name, what), lines in (*groups, (("all", ""), everything)):
        counts = [sum(kind_of(line) == kind for line in lines) for kind in kinds]
        total = sum(counts)
        share = f"{1 - counts[-1] / total:.1%}" if total else "–"
        rows.append(f"| {name} | {what} | {total} | {' | '.join(map(str, counts))} | {share} |")
    left_out = {"trivial": "that do not start", "equivalent": "that compute the same"}
    numbers = [
        f"{sum(kind_of(line) == kind for line in everything)} {why}"
        for kind, why in left_out.items()
    ]
    return "\n".join(rows) + f"\n\nNot counted: {' and '.join(numbers)}."


def _promises(lines: Iterable[Line]) -> Iterator[str]:
    """How many mutants each promise has caught."""
    counts: dict[str, int] = {}
    for line in lines:
        if kind_of(line) == "promise":
            name = line["end"].partition(":")[0]
            counts[name] = counts.get(name, 0) + 1
    if counts:
        yield "| promise | caught first by it |\n|---|---:|"
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        yield f"| {name} | {count} |"


def _survivor(line: Line) -> str:
    about = f": {line['mirrors']}" if line["mirrors"] else ""
    return (
        f"{line['key']} {line['operator']}{about}, megafrontier/{line['file']}:{line['line']}, "
        f"after {', '.join(line['ran'])}\n```diff\n{line['diff']}\n```"
    )
