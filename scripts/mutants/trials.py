"""Try mutants: each in processes forked from this one, which has imported torch but not the
package. A mutant runs the certificates that execute its lines until one is broken."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.mutants.choose import Mutant

Check = Callable[[Path], list[str]]
"""Given a config, imports the package and returns the broken promises."""


@dataclass(frozen=True)
class Measured:
    """A config's certificate of the unchanged package."""

    seconds: float
    lines: Mapping[str, set[int]]
    """By file, relative to the package: the lines that it executes."""

    @property
    def limit(self) -> float:
        """Seconds after which a mutant hangs."""
        return 4 * self.seconds + 20


@dataclass
class Trial:
    """A copy of the package in a folder, and the certificates that are still to run on it."""

    package: Path
    configs: deque[Path]
    mutant: Mutant | None = None
    traces: bool = False
    ran: list[str] = field(default_factory=list)
    folder: Path = Path()
    pid: int = 0
    deadline: float = 0.0

    def open(self) -> None:
        """Make the copy."""
        self.folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        copy = self.folder / self.package.name
        shutil.copytree(self.package, copy)  # with what Python has compiled, and times of files
        if self.mutant is not None:
            path = copy / self.mutant.file
            path.write_text(self.mutant.new)
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                compiled.unlink()

    def start(self, check: Check, limit: float) -> None:
        """Fork the next certificate."""
        config = self.configs.popleft()
        self.ran.append(config.stem)
        self.deadline = time.monotonic() + limit
        self._result.unlink(missing_ok=True)
        sys.stdout.flush()
        parent, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._in_child(parent, check, config)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    @property
    def _result(self) -> Path:
        return self.folder / "result.json"

    def _in_child(self, parent: int, check: Check, config: Path) -> None:
        os.setsid()  # a group that can be killed with all its ranks
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent
        if os.getppid() != parent:
            return
        log = os.open(self.folder / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for number in (1, 2):
            os.dup2(log, number)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest has others
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        (self.folder / "tmp").mkdir(exist_ok=True)
        tempfile.tempdir = os.environ["TMPDIR"] = str(self.folder / "tmp")
        for name in [name for name in sys.modules if name.split(".")[0] == self.package.name]:
            del sys.modules[name]  # in a test, the process has imported the unchanged package
        sys.path.insert(0, str(self.folder))
        if self.traces:
            _trace(self.folder / "lines", f"{self.folder / self.package.name}/")
        self._result.write_text(json.dumps(check(config)))

    def poll(self) -> str | None:
        """None while it runs. Then how it ended: "" if every promise holds, otherwise the broken
        promise, `hang`, or `crash: …` with the error."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        is_late = not done and time.monotonic() > self.deadline
        if not done and not is_late:
            return None
        self.kill()
        if is_late:
            return "hang"
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            broken: list[str] = json.loads(self._result.read_text())
            return broken[0] if broken else ""
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if line[:1].isalpha() and "Error" in line.split(":")[0]]
        last = (errors or lines or [f"code {code}"])[-1][:200]
        return f"crash: {last}"

    def kill(self) -> None:
        """End the certificate and all its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _trace(path: Path, prefix: str) -> None:
    """Write each line of the files under `prefix` that this process, its threads and its forks
    execute to a file, once a process."""
    out = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)  # small appends are not mixed
    seen = set[tuple[str, int]]()

    def of_line(frame: Any, event: str, _argument: Any) -> Any:
        key = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and key not in seen:
            seen.add(key)
            os.write(out, f"{key[0].removeprefix(prefix)}:{key[1]}\n".encode())
        return of_line

    def of_call(frame: Any, _event: str, _argument: Any) -> Any:
        return of_line if frame.f_code.co_filename.startswith(prefix) else None

    threading.settrace(of_call)
    sys.settrace(of_call)


def run(trials: Iterator[Trial], check: Check, limits: Mapping[Path, float], jobs: int) -> Any:
    """Run `jobs` trials at a time; yields each with how it ended and its seconds when it is over.
    None is left when the generator ends or is closed."""
    running: list[tuple[Trial, float]] = []
    is_over = False
    try:
        while True:
            while not is_over and len(running) < jobs:
                trial = next(trials, None)
                is_over = trial is None
                if trial is not None and not trial.configs:  # no certificate executes its lines
                    yield trial, "", 0.0
                elif trial is not None:
                    trial.open()
                    trial.start(check, limits[trial.configs[0]])
                    running.append((trial, time.monotonic()))
            if not running:
                return
            time.sleep(0.02)
            for trial, begun in list(running):
                end = trial.poll()
                if end == "" and trial.configs:
                    trial.start(check, limits[trial.configs[0]])
                elif end is not None:
                    running.remove((trial, begun))
                    yield trial, end, time.monotonic() - begun
                    trial.close()
    finally:
        for trial, _ in running:
            trial.kill()
            trial.close()


def measure(
    package: Path, configs: Sequence[Path], check: Check, jobs: int, limit: float = 1800.0
) -> dict[Path, Measured]:
    """Run each config's certificate on the unchanged package, for its seconds and its lines. A
    config whose certificate is broken is left out."""
    limits = dict.fromkeys(configs, limit)
    lines = dict[Path, dict[str, set[int]]]()
    seconds = dict[Path, float]()
    for traces in (False, True):
        whole = [config for config in configs if not traces or config in seconds]
        trials = (Trial(package, deque([c]), traces=traces) for c in whole)
        for trial, end, took in run(trials, check, limits, jobs):
            config = next(c for c in configs if c.stem == trial.ran[0])
            if end:
                print(f"{config.stem}: left out, because it ends with {end}", flush=True)
                seconds.pop(config, None)
            elif not traces:
                seconds[config] = took
                print(f"{config.stem}: {took:.0f} s", flush=True)
            else:
                rows = (trial.folder / "lines").read_text().splitlines()
                found = lines.setdefault(config, {})
                for file, _, line in (row.rpartition(":") for row in rows):
                    found.setdefault(file, set()).add(int(line))
    return {c: Measured(seconds[c], lines[c]) for c in seconds}


def trial_of(
    package: Path,
    mutant: Mutant,
    measured: Mapping[Path, Measured],
    most: int | None = None,
    ran: Sequence[str] = (),
) -> Trial:
    """The trial of a mutant: the certificates that execute its lines, at most `most` of them, in
    their order, without those that it has survived already (`ran`)."""
    wanted = {*range(mutant.line, mutant.last + 1)}
    configs = [c for c, of in measured.items() if wanted & of.lines.get(mutant.file, set())]
    left = deque(config for config in configs[:most] if config.stem not in ran)
    return Trial(package, left, mutant, ran=[*ran])
