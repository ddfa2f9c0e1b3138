"""All that an accelerator is asked, in order of worth, within some minutes.

    python -m scripts.benchmarks.silicon OUT [--minutes 9] [--sections equal peers …]
        [--packages DIR] [--small]

Each section (sections.py) is a command of its own. Its output is in OUT/SECTION.log, and all tables
are in OUT/report.md, to be laid beside the predictions of docs/performance.md. A section for which
too little time is left is left out, and the last one ends with the time. The same command goes on:
what has succeeded is not run again. Corpora are in OUT, too: on a machine that returns few files,
take report.md alone. `--small` tries the script on a CPU. `--packages`: see one_device.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from megafrontier.common.files import write_atomically
from scripts.benchmarks.shared.measuring import ROOT, at_least, code_version, listed, make_parser
from scripts.benchmarks.shared.rounds import OUT_OF_TIME, describe_machine
from scripts.benchmarks.silicon.sections import SECTIONS, Section

ENDING_SECONDS = 20.0
"""A benchmark starts no turn so shortly before the end of its time."""
SUCCEEDED, CUT = "succeeded", "out of time"
GRACE_SECONDS = 5.0
LINES = 40
"""Of the output of a section without a table."""


class Report:
    """How each section ended, in OUT/sections.json, and what it found, in OUT/report.md."""

    def __init__(self, out: Path) -> None:
        self.out, self._path = out, out / "sections.json"
        out.mkdir(parents=True, exist_ok=True)
        kept = json.loads(self._path.read_text()) if self._path.is_file() else {}
        self._ended: dict[str, str] = kept

    def has(self, section: Section) -> bool:
        """Whether it succeeded."""
        return self._ended.get(section.name, "").startswith(SUCCEEDED)

    def add(self, section: Section, how: str) -> None:
        """Keep how a section ended, and write the report."""
        self._ended[section.name] = how
        write_atomically(self._path, json.dumps(self._ended))
        machine = f"{listed(describe_machine())}, commit {code_version()}"
        parts = [f"## {each.name}: {self._ended[each.name]}\n\n{self._found(each)}"
                 for each in SECTIONS if each.name in self._ended]  # fmt: skip
        (self.out / "report.md").write_text("\n\n".join([f"# {machine}", *parts]) + "\n")
        print(f"{section.name}: {how}", flush=True)

    def _found(self, section: Section) -> str:
        table = self.out / (section.folder or section.name) / "table.md"
        if table.is_file():
            return table.read_text()
        log = log_of(self.out, section)
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        return "\n".join(["```", *lines[-LINES:], "```"])


def log_of(out: Path, section: Section) -> Path:
    """The output of a section."""
    return out / f"{section.name}.log"


def run(section: Section, arguments: argparse.Namespace, seconds: float) -> str:
    """How a section ends that has so many seconds."""
    values = {
        "OUT": str(arguments.out.resolve()),
        "MINUTES": f"{max(0.0, seconds - ENDING_SECONDS) / 60:.2f}",
        "PACKAGES": str(arguments.packages.resolve()),
    }
    words = shlex.split(section.small if arguments.small else section.command)
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    begin = time.monotonic()
    with log_of(arguments.out, section).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
            how = SUCCEEDED if code == 0 else f"failed with exit code {code}"
            if OUT_OF_TIME in log_of(arguments.out, section).read_text(errors="replace"):
                how = CUT
        except subprocess.TimeoutExpired:
            how = CUT
        finally:
            stop(process)
    return f"{how} after {time.monotonic() - begin:.0f} s"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a section's processes, first by SIGTERM: a compiler that is killed leaves half of a file
    in its cache, with which later sections would fail."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(GRACE_SECONDS)


def run_all(sections: Iterable[Section], arguments: argparse.Namespace) -> None:
    """Run what has not succeeded yet, as far as the time goes."""
    report, end = Report(arguments.out), time.monotonic() + 60 * arguments.minutes
    for section in sections:
        left = end - time.monotonic()
        if report.has(section):
            continue
        if left < section.least_seconds:
            print(f"{section.name}: left out, {left:.0f} s are left", flush=True)
            continue
        report.add(section, run(section, arguments, left))


def main() -> None:
    """Run the sections that are asked for."""
    parser = make_parser(__doc__, "silicon")
    names = [section.name for section in SECTIONS]
    parser.add_argument("out", type=Path, help="folder of all files")
    parser.add_argument("--minutes", type=at_least(0, float), default=9.0)
    parser.add_argument("--sections", nargs="+", choices=names, default=names)
    parser.add_argument("--packages", type=Path, default=Path("packages"))
    parser.add_argument("--small", action="store_true", help="the smallest form, on a CPU")
    arguments = parser.parse_args()
    run_all((section for section in SECTIONS if section.name in arguments.sections), arguments)


if __name__ == "__main__":
    main()
