"""Commands and functions in processes forked from this one, which has imported torch: an
interpreter of their own would take seconds for that."""

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

from megafrontier.launch.local import import_early

COMMAND = "import sys\nfrom megafrontier import cli\nsys.exit(cli.main(sys.argv[1:]))"
_FORKING = multiprocessing.get_context("fork")


class Forked:
    """Like a `subprocess.Popen` of `python -c SCRIPT ARGUMENTS…` with text output."""

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._texts = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        given = (script, arguments, dict(environment), self._texts)
        import_early()  # once, and not in each child
        gc.freeze()  # or the process's own collector would copy all there is
        self._process = _FORKING.Process(target=_run, args=given, daemon=True)
        self._process.start()
        gc.unfreeze()

    @property
    def returncode(self) -> int | None:
        """The exit code, or -N for signal N; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def kill(self) -> None:
        """Kill the process, also if it is stopped or has ended."""
        self._process.kill()

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Wait for the end and return (stdout, stderr). Raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout)
        return self._text(0), self._text(1)

    def _text(self, index: int) -> str:
        self._texts[index].seek(0)
        return self._texts[index].read()


def in_child(body: Callable[[], bool]) -> int:
    """Run `body` in a forked process. Returns 0 if it returns True, else 1, or -N if signal N
    killed the process."""
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
    """Run a script to its end, as `subprocess.run` does. Raises TimeoutExpired after 2 minutes."""
    process = Forked(script, arguments)
    try:
        stdout, stderr = process.communicate()
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def children(pid: int) -> list[int]:
    """The children of the main thread of a process, including zombies."""
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether a process runs, and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def wait_for(condition: Callable[[], bool], otherwise: str = "") -> None:
    """Wait until `condition` is true. Fails with `otherwise` after 30 seconds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def _run(
    script: str, arguments: Sequence[str], environment: dict[str, str], texts: list[TextIO]
) -> None:
    """Run the script in the new process, without what pytest has changed."""
    for number, text in enumerate(texts, start=1):
        os.dup2(text.fileno(), number)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest has others
    importlib.reload(warnings)  # pytest keeps them for its summary
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
