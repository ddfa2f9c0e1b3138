"""The job of a site, also in a network namespace of its own."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.benchmarks.shared.links import NIC
from scripts.benchmarks.shared.measuring import ROOT

PORT = 7001
PERIOD_SECONDS = 0.2
"""Of a site that is stopped for a share of the time."""


def site_keys(addresses: Sequence[str], folder: Path, number: int, keys: str) -> str:
    """The override of site `number`, with these keys of `sites` and a secret in `folder`."""
    secret = folder / "secret"
    secret.write_text("a secret for this comparison\n")
    shared = f"addresses: [{', '.join(addresses)}], secret: {secret}, {keys}"
    return f"sites={{{shared}, number: {number}}}"


class Job:
    """A training, which may be stopped, killed and started again."""

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path,
        inside: Sequence[str] = (),
        share: float = 1.0,
    ) -> None:
        """arguments: of megafrontier train. output: a file to append to. inside: the start of the
        command in a namespace. share: of the time in which it runs; the rest it is stopped."""
        self._command = [*inside, sys.executable, "-m", "megafrontier", "train", *arguments]
        self._output, self._share = output, share
        nic = {"GLOO_SOCKET_IFNAME": NIC} if inside else {}
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), **nic}
        self._lock = threading.Lock()
        self.start()
        if share < 1:
            threading.Thread(target=self._throttle, daemon=True).start()

    def start(self) -> None:
        """Start it, also again."""
        with self._output.open("a") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self._process.poll() is not None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still inside."""
        with self._lock:
            self._signal(signal.SIGSTOP)
            try:
                yield
            finally:
                self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill all its processes."""
        with self._lock:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, or None if it has not ended in so many seconds."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _signal(self, number: int) -> None:
        if not self.has_ended:
            os.killpg(self._process.pid, number)

    def _throttle(self) -> None:
        while True:
            with self.stopped():
                time.sleep(PERIOD_SECONDS * (1 - self._share))
            time.sleep(PERIOD_SECONDS * self._share)
