"""Commands and functions in processes of their own, forked from this one: torch is there already,
an interpreter of its own would take seconds to import it."""

import gc
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

COMMAND = "import sys\nfrom megafrontier import cli\nsys.exit(cli.main(sys.argv[1:]))"
_FORKING = multiprocessing.get_context("fork")


class Forked:
    """What a `subprocess.Popen` of `python -c SCRIPT ARGUMENTS…` would be, its output text."""

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._texts = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        given = (script, arguments, dict(environment), self._texts)
        gc.freeze()  # or the process's own collector would copy all there is
        self._process = _FORKING.Process(target=_run, args=given, daemon=True)
        self._process.start()
        gc.unfreeze()

    @property
    def returncode(self) -> int | None:
        """None while it runs; -N after signal N."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """`returncode`."""
        return self.returncode

    def kill(self) -> None:
        """Also one that is stopped, or has ended."""
        self._process.kill()

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """What it has printed, (stdout, stderr), once it has ended. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout)
        return self._text(0), self._text(1)

    def _text(self, index: int) -> str:
        self._texts[index].seek(0)
        return self._texts[index].read()


def in_child(body: Callable[[], bool]) -> int:
    """Run `body` in a forked process. Returns 0 where it returns True, 1 where it does not, and
    minus the signal's number where one killed it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if body() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(script: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run to the end, as `subprocess.run` does. Raises TimeoutExpired after two minutes."""
    process = Forked(script, arguments)
    try:
        stdout, stderr = process.communicate()
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def children(pid: int) -> list[int]:
    """What its main thread has started, those that have ended and nobody has waited for too."""
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether it is there and not only waiting to be reaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def wait_for(condition: Callable[[], bool], otherwise: str = "") -> None:
    """Return once it holds. Fails after half a minute, and says what stands `otherwise`."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def _run(
    script: str, arguments: Sequence[str], environment: dict[str, str], texts: list[TextIO]
) -> None:
    """In the new process, which is to find nothing of pytest's."""
    for number, text in enumerate(texts, start=1):
        os.dup2(text.fileno(), number)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest has others
    importlib.reload(warnings)  # pytest keeps them for its summary
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
