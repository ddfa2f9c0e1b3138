"""Print constraints that are the lowest versions which pyproject.toml allows.

    python scripts/lowest.py > lowest.txt

What only developers need (the extras `test`, `docs` and `dev`) keeps its line of constraints.txt.
"""

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = {"test", "docs", "dev"}


def lowest(project: dict[str, Any], constraints: list[str]) -> list[str]:
    """`NAME==LOWEST` for each requirement of `project` (pyproject.toml's table), and the lines of
    `constraints` that name other packages."""
    extras = {k: v for k, v in project["optional-dependencies"].items() if k not in TOOLS}
    requirements = chain(project["dependencies"], *extras.values())
    pins = [line.replace(">=", "==") for line in requirements if ">=" in line]
    names = {_name(line) for line in pins}
    return pins + [line for line in constraints if _name(line) not in names]


def _name(line: str) -> str:
    return re.split("[=>]=", line)[0]


if __name__ == "__main__":
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    print(*lowest(table, (ROOT / "constraints.txt").read_text().splitlines()), sep="\n")
