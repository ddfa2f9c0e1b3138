"""RUN/bad-nodes.txt: hosts on which the run cannot go on, one a line, for whoever starts it again
to leave out. slurm/train.sbatch does, and a person may add or strike out some."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

NAME = "bad-nodes.txt"


def listed(directory: Path) -> set[str]:
    """The hosts there, none where there is no list."""
    with suppress(OSError):
        return set((directory / NAME).read_text(encoding="utf-8").split())
    return set()


def add(directory: Path, hosts: Iterable[str]) -> None:
    """Append those that are not there. Raises OSError where the list cannot be written."""
    found = sorted({*hosts} - listed(directory))
    with (directory / NAME).open("a", encoding="utf-8") as file:
        file.writelines(f"{host}\n" for host in found)
