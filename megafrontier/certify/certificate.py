"""A certificate: what was promised, what was found, as one screen and as JSON."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from megafrontier.common.files import write_atomically
from megafrontier.config import Config, config_to_dict

FILE_NAME = "certificate.json"
"""In the run directory."""
Status = Literal["proved", "measured", "open", "broken"]
_ORDER: tuple[Status, ...] = ("broken", "open", "measured", "proved")
NOT_PROVED = (
    "kernels of devices",
    "collectives of NCCL and RCCL",
    "compiled blocks and CUDA graphs",
    "convergence",
)
"""By any certificate."""


@dataclass(frozen=True)
class Finding:
    """What was found about one promise. `figure` and `bound` have the same unit, for most promises
    none: they are relative. `where`: what has the figure, or why the promise is open."""

    promise: str
    status: Status
    figure: float | None = None
    bound: float | None = None
    where: str = ""
    mesh: str = ""
    """The small mesh of the run."""
    cause: str = ""
    """Of a broken promise: the axes without which it holds."""
    command: str = ""
    """Of a broken promise: shows it alone."""

    @classmethod
    def within(cls, promise: str, figure: float, bound: float, where: str = "") -> "Finding":
        """Proved if the figure is at most the bound, else broken. NaN is broken."""
        return cls(promise, "proved" if figure <= bound else "broken", figure, bound, where)


@dataclass
class Certificate:
    """What was found about a configuration on a number of ranks."""

    config: str
    ranks: int
    config_hash: str
    code_hash: str
    versions: dict[str, str]
    created: str
    findings: list[Finding] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What was not tried, for time or because a miniature cannot have it."""
    not_proved: Sequence[str] = NOT_PROVED
    seconds: float = 0.0

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "broken"]

    @property
    def promises(self) -> list[Finding]:
        """One finding for each promise: the worst, with the largest share of its bound."""
        names = dict.fromkeys(finding.promise for finding in self.findings)
        return [worst(f for f in self.findings if f.promise == name) for name in names]

    def write(self, path: Path) -> None:
        """Write the JSON. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """In JSON, where `promises` are the worst findings; figures that are not finite are
        texts."""
        found = asdict(self) | {"promises": [asdict(finding) for finding in self.promises]}
        return _finite(found)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        state = (
            f"BROKEN: {len(self.broken)}" if self.broken else "every promise that was tried holds"
        )
        yield f"certificate of {self.config} on {self.ranks} ranks: {state} ({self.seconds:.0f} s)"
        rows = [("promise", "", "figure", "bound", "")]
        rows += [_row(finding) for finding in self.promises]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
            yield f"  {'  '.join([*cells, row[4]])}".rstrip()
        for finding in self.broken:
            if finding.cause:
                yield f"  {finding.promise} ({finding.mesh}): {finding.cause}"
            if finding.command:
                yield f"    shown alone by: {finding.command}"
        if self.left_out:
            yield f"left out: {'; '.join(self.left_out)}"
        yield f"not proved: {', '.join(self.not_proved)}"


def worst(findings: Iterable[Finding]) -> Finding:
    """The finding of the worst status, among these the one nearest to its bound."""

    def badness(finding: Finding) -> tuple[int, float]:
        share = (finding.figure or 0.0) / (finding.bound or 1.0)
        return -_ORDER.index(finding.status), float("inf") if share != share else share

    return max(findings, key=badness)


def _row(finding: Finding) -> tuple[str, str, str, str, str]:
    figure = "" if finding.figure is None else f"{finding.figure:.3g}"
    bound = "" if finding.bound is None else f"{finding.bound:.3g}"
    where = finding.where if finding.status in ("open", "broken", "measured") else ""
    return finding.promise, finding.status, figure, bound, where


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    is_finite = not isinstance(value, float) or abs(value) < float("inf")
    return value if is_finite else str(value)


def hash_of_config(config: Config) -> str:
    """Of all that a certificate depends on: not of names and folders, logging and data's paths."""
    values = config_to_dict(config)
    for key in ("run", "log", "preflight", "tokenizer"):
        values.pop(key)
    for corpus in (*values["data"]["train"], *values["data"]["valid"]):
        corpus.pop("path")
    values["checkpoint"].pop("resume")
    return _digest(json.dumps(values, sort_keys=True, default=str).encode())


@cache
def hash_of_code() -> str:
    """Of the library's source files."""
    root = Path(__file__).resolve().parent.parent
    parts = [
        f"{p.relative_to(root)}\0".encode() + p.read_bytes() for p in sorted(root.rglob("*.py"))
    ]
    return _digest(b"\0".join(parts))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def versions() -> dict[str, str]:
    return {"megafrontier": version("megafrontier"), "torch": version("torch")}


def describe_certificate(directory: Path, config: Config, ranks: int) -> str:
    """One line: whether the certificate in a run directory is that of a configuration and of this
    code, and what it says."""
    path = directory / FILE_NAME
    try:
        found = json.loads(path.read_text())
        facts = found["config_hash"], found["code_hash"], found["ranks"]
        broken = [f["promise"] for f in found["promises"] if f["status"] == "broken"]
        created, seconds = found["created"], found["seconds"]
    except FileNotFoundError:
        return "certificate: none; `megafrontier certify` makes one"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"certificate: {path}: not readable: {error}"
    expected = hash_of_config(config), hash_of_code(), ranks
    others = [
        name
        for name, a, b in zip(("config", "code", "number of ranks"), facts, expected, strict=True)
        if a != b
    ]
    if others:
        return f"certificate: of {created}, of another {' and '.join(others)}"
    holds = f"BROKEN: {', '.join(broken)}" if broken else "every promise that was tried holds"
    return f"certificate: of {created} ({seconds:.0f} s): {holds}"
