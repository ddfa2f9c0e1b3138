"""Markers of tests by what they need, and sessions of equal length.

`slurm` needs a real Slurm, `gpu` a GPU, `ranks` several processes. `fast` are the files that took
at most FAST_SECONDS in the last recorded run, without the first two: what one runs before each
commit. A file that has not been recorded yet is fast. `exhaustive` sweeps run with --exhaustive
only.

    python -m tests.tiers 5                 # the files of five sessions, a line each
    python -m tests.tiers --record FOLDER   # keep the seconds that sessions have left in FOLDER
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = Path(__file__).with_name("seconds.json")
FAST_SECONDS = 6.0
RECORD = "MEGAFRONTIER_TEST_SECONDS"
STARTS_PROCESSES = {"run_ranks", "run_script", "fork_ranks", "runs", "subprocess"}

_spent: defaultdict[str, float] = defaultdict(float)


def recorded() -> dict[str, float]:
    """Seconds of each file of tests, by its path from the root, in the last recorded run."""
    seconds: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    return seconds


def sessions(count: int) -> list[list[str]]:
    """All files of tests in `count` lists that take about as long: each goes to the shortest list,
    the longest file first."""
    seconds = recorded()
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py")}
    lists: list[list[str]] = [[] for _ in range(count)]
    lengths = [0.0] * count
    for file in sorted(files, key=lambda f: (-seconds.get(f, 1.0), f)):
        shortest = lengths.index(min(lengths))
        lists[shortest].append(file)
        lengths[shortest] += seconds.get(file, 1.0)
    return lists


def record(folder: Path) -> None:
    """Keep the means of the recorded seconds and of those that the sessions have written into
    `folder`. They differ, because a file waits for what runs beside it."""
    before, seconds = recorded(), dict[str, float]()
    for part in folder.glob("*.json"):
        seconds |= json.loads(part.read_text())
    means = {file: (before.get(file, spent) + spent) / 2 for file, spent in seconds.items()}
    rounded = {file: round(mean, 1) for file, mean in sorted(means.items())}
    SECONDS.write_text(json.dumps(rounded, indent=1) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the exhaustive sweeps too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = recorded()
    if not config.getoption("--exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        path = item.path.relative_to(ROOT)
        if path.parts[1] == "slurm":
            item.add_marker("slurm")
        elif path.name == "test_gpu.py":
            item.add_marker("gpu")
        elif not item.get_closest_marker("gpu") and seconds.get(str(path), 0.0) <= FAST_SECONDS:
            item.add_marker("fast")
        if STARTS_PROCESSES & set(vars(item.module)):  # type: ignore[attr-defined]
            item.add_marker("ranks")
    # Ranks that are forked from this process cannot use a GPU that it has used itself.
    items.sort(key=lambda item: "unused_gpus" not in getattr(item, "fixturenames", ()))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _spent[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish() -> None:
    if folder := os.environ.get(RECORD):
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(_spent))


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        record(Path(sys.argv[2]))
    else:
        for files in sessions(int(sys.argv[1])):
            print(*files)
