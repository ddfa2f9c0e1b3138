"""Variants beside each other: in rounds, each in a process of its own, median and spread.

What the benchmarks of one device share. The machine's speed drifts, so all variants take a turn in
each round; memory is a process' peak, so each turn is a new process. Every turn is written to
OUT/results.json at once, and turns that are there already are not made again: a long comparison may
be stopped and gone on with, or made one group at a time.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megafrontier.common.errors import UserError, exit_on_fatal_error
from megafrontier.common.files import write_atomically
from scripts.benchmarks.shared.measuring import (
    PACKAGES,
    ROOT,
    at_least,
    code_version,
    cpu_name,
    listed,
)
from scripts.benchmarks.shared.tables import markdown

CHILD = "scripts.benchmarks.shared.child"
TIMEOUT_SECONDS = 1800.0
FAILED = "failed: "
OUT_OF_TIME = "out of time: the same command goes on"
"""Printed if turns are missing."""
_PROGRAM = Path(sys.argv[0])
BENCHMARK = _PROGRAM.parent.name if _PROGRAM.stem == "__main__" else _PROGRAM.stem
"""Name of the running benchmark. Results of another benchmark are refused."""


@dataclass(frozen=True)
class Task:
    """One variant to measure: `function` ("module:name") is called with `arguments` in a process of
    its own and returns figures by name. Variants of a group are compared with each other."""

    group: str
    variant: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Measurement:
    """What one turn of a task gave: figures, or why there are none."""

    group: str
    variant: str
    round: int
    arguments: dict[str, Any]
    values: dict[str, float] = field(default_factory=dict)
    skipped: str = ""
    version: str = "unknown"
    """The commit that was measured."""


class Results:
    """The turns in OUT/results.json, each kept as soon as it was made."""

    def __init__(self, out: Path, order: Sequence[str] = ()) -> None:
        """`order`: names of variants, as the tables shall have them. Raises UserError where OUT has
        results of another machine or benchmark."""
        self.path, self._order = out / "results.json", {name: i for i, name in enumerate(order)}
        self.machine, self.version = describe_machine(), code_version()
        self.turns: list[Measurement] = []
        if self.path.is_file():
            saved = json.loads(self.path.read_text())
            if saved["machine"] != self.machine:
                of = listed(saved["machine"])
                raise UserError(f"{self.path}: of another machine, {of}; need another OUT")
            if saved.get("benchmark", BENCHMARK) != BENCHMARK:
                raise UserError(f"{self.path}: of {saved['benchmark']}.py; need another OUT")
            self.turns = [Measurement(**turn) for turn in saved["turns"]]

    def has(self, task: Task, number: int) -> bool:
        """Whether this turn was made and gave figures, with the same arguments and code."""
        wanted = (task.group, task.variant, number, task.arguments, self.version)
        return self._is_known and any(
            (turn.group, turn.variant, turn.round, turn.arguments, turn.version) == wanted
            and not turn.skipped
            for turn in self.turns
        )

    @property
    def _is_known(self) -> bool:
        """Whether the version says how the code differs from any other."""
        return not self.version.endswith(("+", "unknown"))

    def add(self, turn: Measurement) -> None:
        """Keep a turn; those of the same row with other arguments or code are of no more use. Of
        code that is not known those are that an earlier run made, of this round and later ones."""
        row = (turn.group, turn.variant)
        turn.version = self.version
        self.turns = [
            kept
            for kept in self.turns
            if (kept.group, kept.variant) != row
            or (
                (kept.arguments, kept.version) == (turn.arguments, turn.version)
                and (kept.round < turn.round or (self._is_known and kept.round != turn.round))
            )
        ]
        self.turns.append(turn)
        turns = [asdict(turn) for turn in self.turns]
        found = {"benchmark": BENCHMARK, "machine": self.machine, "turns": turns}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(found, indent=1) + "\n")

    def groups(self) -> list[str]:
        """In the order they were first measured."""
        return list(dict.fromkeys(turn.group for turn in self.turns))

    def variants(self, group: str) -> list[str]:
        """Of one group, in the order that was given."""
        names = dict.fromkeys(turn.variant for turn in self.turns if turn.group == group)
        return sorted(names, key=lambda name: self._order.get(name, len(self._order)))

    def values(self, group: str, variant: str, name: str) -> list[float]:
        """One figure of all turns of a row that gave it."""
        return list(self._by_turn(group, variant, name).values())

    def ratios(self, group: str, variant: str, other: str, name: str) -> list[float]:
        """One figure over the other variant's in the same round, of the same code: the machine's
        speed drifts between rounds more than within one."""
        mine, others = (self._by_turn(group, row, name) for row in (variant, other))
        return [value / others[number] for number, value in mine.items() if number in others]

    def _by_turn(self, group: str, variant: str, name: str) -> dict[tuple[int, str], float]:
        return {
            (turn.round, turn.version): turn.values[name]
            for turn in self.turns
            if (turn.group, turn.variant) == (group, variant) and name in turn.values
        }

    def skipped(self, group: str, variant: str) -> str:
        """Why a row has no figures; empty where it has."""
        mine = [turn for turn in self.turns if (turn.group, turn.variant) == (group, variant)]
        return "" if any(turn.values for turn in mine) else mine[0].skipped if mine else "not run"


def describe_machine() -> dict[str, str]:
    """What the figures hold for."""
    on_gpu = torch.cuda.is_available()
    chip = torch.cuda.get_device_name() if on_gpu else f"{cpu_name()}, no GPU"
    return {
        "device": chip,
        "cores": str(len(os.sched_getaffinity(0))),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """What all of these benchmarks take."""
    parser.add_argument("out", type=Path, help="folder of results.json and table.md")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="turns of each variant")
    parser.add_argument(
        "--variants", nargs="+", help="only these, or with one of these in their names"
    )
    parser.add_argument("--groups", nargs="+", help="the same for groups")
    parser.add_argument(
        "--minutes", type=float, help="start no turn after so long; the same command goes on"
    )
    parser.add_argument(
        "--packages", type=Path, help="a folder of `pip install --target` with other frameworks"
    )


def chosen(tasks: Iterable[Task], arguments: argparse.Namespace) -> list[Task]:
    """The tasks that the command line asks for. A whole name is that one's alone. Raises UserError
    if there are none."""
    tasks = [*tasks]
    names = {name for task in tasks for name in (task.variant, task.group)}

    def wanted(name: str, parts: Sequence[str] | None) -> bool:
        return parts is None or any(
            part == name or (part not in names and part.lower() in name.lower()) for part in parts
        )

    found = [
        task
        for task in tasks
        if wanted(task.variant, arguments.variants) and wanted(task.group, arguments.groups)
    ]
    if not found:
        raise UserError("--variants, --groups: nothing has such a name")
    return found


def measure(
    tasks: Sequence[Task], arguments: argparse.Namespace, table: Callable[[Results], str]
) -> None:
    """Make the chosen turns that are not made yet, round by round, and write the table after each.

    Groups come one after the other, so that what is compared was measured close together. A row
    that gives no figures is asked for once only.
    """
    with exit_on_fatal_error(BENCHMARK):
        results = Results(arguments.out, [task.variant for task in tasks])
        wanted = chosen(tasks, arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the turn's process
    deadline = time.monotonic() + 60 * (1e9 if arguments.minutes is None else arguments.minutes)
    hopeless: set[tuple[str, str]] = set()
    for task, number in _in_rounds(wanted, arguments.rounds):
        row = task.group, task.variant
        if results.has(task, number) or row in hopeless:
            continue
        if time.monotonic() > deadline:
            print(OUT_OF_TIME, flush=True)
            break
        turn = _turn(task, number, arguments.packages)
        results.add(turn)
        _show(turn)
        _write_table(results, arguments.out, table)
        if turn.skipped:
            hopeless.add(row)
    print(_write_table(results, arguments.out, table))
    broken = [name for row, name in hopeless if results.skipped(row, name).startswith(FAILED)]
    if broken:
        raise SystemExit(f"{', '.join(broken)}: failed, as said above")


def group_tables(
    results: Results,
    head: Sequence[str],
    cells: Callable[[str, str], list[str]],
    title: Callable[[str], str] = "## {}".format,
    omit: str = "",
) -> str:
    """A table for each group, without the variant `omit`: `cells` of a group and a variant, or why
    the variant has no figures."""
    parts = []
    for group in results.groups():
        rows = []
        for name in results.variants(group):
            if name == omit:
                continue
            skipped = results.skipped(group, name)
            empty = [""] * (len(head) - 2)
            rows.append([name, skipped, *empty] if skipped else [name, *cells(group, name)])
        parts.append(f"{title(group)}\n\n{markdown(head, rows)}")
    return "\n\n".join(parts)


def _in_rounds(tasks: Sequence[Task], rounds: int) -> Iterator[tuple[Task, int]]:
    for group in dict.fromkeys(task.group for task in tasks):
        own = [task for task in tasks if task.group == group]
        for number in range(rounds):
            # Another one first each time: what came before a round is then no one's disadvantage.
            first = number % len(own)
            yield from ((task, number) for task in own[first:] + own[:first])


def _write_table(results: Results, out: Path, table: Callable[[Results], str]) -> str:
    versions = ", ".join(sorted({turn.version for turn in results.turns}))
    text = f"{listed(results.machine)}, commit {versions}\n\n{table(results)}\n"
    (out / "table.md").write_text(text)
    return text


def _turn(task: Task, number: int, packages: Path | None) -> Measurement:
    """Run the task in a process of its own."""
    turn = Measurement(task.group, task.variant, number, task.arguments)
    environment = dict(os.environ, TOKENIZERS_PARALLELISM="false")
    # Last on the path: what both have is taken from where the benchmark runs.
    environment[PACKAGES] = str(packages.resolve()) if packages else ""
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer", Path(folder) / "log"
        command = [sys.executable, "-m", CHILD, task.function, answer, json.dumps(task.arguments)]
        with log.open("wb") as output:
            try:
                subprocess.run(
                    [str(part) for part in command],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    timeout=TIMEOUT_SECONDS,
                    cwd=folder,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                turn.skipped = f"no answer within {TIMEOUT_SECONDS:.0f} s"
        if answer.is_file():
            turn.values, turn.skipped = json.loads(answer.read_text())
        elif not turn.skipped:
            turn.skipped = f"{FAILED}{_last_line(log)}"
            sys.stderr.write(log.read_text(errors="replace")[-4000:])
    return turn


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "without a word"


def _show(turn: Measurement) -> None:
    figures = ", ".join(f"{name} {value:.4g}" for name, value in turn.values.items())
    where = f"{turn.group}, {turn.variant}, round {turn.round + 1}"
    print(f"{where}: {turn.skipped or figures}", flush=True)
