"""Which mutants are tried: a fair share of each file's executed places, chosen by a seed."""

import difflib
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from scripts.mutants.operators import Place, Source

SCOPE = (
    "splits", "pipeline", "partition", "optim", "comm", "checkpoint", "model/moe", "model/loss.py",
    "training", "parallel", "data/sampling",
)  # fmt: skip
"""What is mutated, under the package. What stands beside the numbers is left out:"""
_LEFT_OUT = (
    "comm/ledger.py", "checkpoint/commands.py", "training/logging", "training/device.py",
    "training/resume/restarts.py", "training/resume/compatibility.py",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One file of the package, changed at one place."""

    operator: str
    file: str
    """Relative to the package."""
    line: int
    last: int
    old: str
    """The whole file's text."""
    new: str
    mirrors: str = ""
    """The bug that a mutant by hand mirrors."""

    @property
    def key(self) -> str:
        """The same as long as the changed lines are, wherever they stand."""
        changed = [line for line in self.diff.splitlines() if line[0] in "+-"]
        number = self.old.splitlines()[: self.line].count(changed[0][1:])
        text = "\n".join([self.operator, self.file, *changed, str(number)])
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def diff(self) -> str:
        """The changed lines, with one line around them."""
        lines = difflib.unified_diff(self.old.splitlines(), self.new.splitlines(), n=1, lineterm="")
        return "\n".join(list(lines)[3:])


def files_of(package: Path, scope: Sequence[str] = SCOPE) -> list[str]:
    """The files of the scope, relative to the package."""
    found = []
    for part in scope:
        path = package / part
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    names = [str(path.relative_to(package)) for path in found]
    return [name for name in names if not name.startswith(_LEFT_OUT)]


def mutate(file: str, text: str, place: Place) -> Mutant:
    """The file's text with one place changed."""
    raw = text.encode()
    new = raw[: place.start] + place.new.encode() + raw[place.stop :]
    return Mutant(place.operator, file, place.line, place.last, text, new.decode())


def choose(package: Path, executed: Mapping[str, set[int]], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of lines that some certificate executes, at most one of a line.

    A file's share grows with the square root of its places, and each operator has its turn.
    """
    queues = {}
    for file in sorted(executed):
        text = (package / file).read_text()
        places = [p for p in Source(text).places() if {*range(p.line, p.last + 1)} & executed[file]]
        if places:
            order = _in_turn(places, random.Random(f"{seed} {file}"))
            queues[file] = text, sqrt(len(places)), order
    taken, found = Counter[str](), list[Mutant]()
    while len(found) < count and queues:
        file = max(queues, key=lambda name: queues[name][1] / (taken[name] + 1))
        text, _, order = queues[file]
        found.append(mutate(file, text, order.pop(0)))
        taken[file] += 1
        if not order:
            del queues[file]
    return found


def _in_turn(places: Sequence[Place], rng: random.Random) -> list[Place]:
    """One place of each operator, then the next of each. One of a line."""
    by_operator, lines = defaultdict[str, list[Place]](list), set[int]()
    for place in places:
        by_operator[place.operator].append(place)
    groups = list(by_operator.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    found = []
    while any(groups):
        for group in groups:
            while group and (place := group.pop()):
                if place.line not in lines:
                    lines.add(place.line)
                    found.append(place)
                    break
    return found
