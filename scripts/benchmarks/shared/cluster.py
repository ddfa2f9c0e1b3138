"""The nodes of the slow network as processes, and one job run on some of them."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from megafrontier.common.errors import UserError
from megafrontier.common.signals import handle_signals
from scripts.benchmarks.shared.job import Answer, Job
from scripts.benchmarks.shared.links import Links, Unable, links, machine_cpu_seconds
from scripts.benchmarks.shared.measuring import ROOT

FIRST_PORT = 20_000
NODE = "scripts.benchmarks.shared.node"
SMALL_HEAP = "glibc.malloc.tcache_count=0"
"""What glibc cuts off a tensor to align it, it keeps for small things, and the tensor's place then
fits none of its size again: with many threads the heap grows to five times what lives in it. Not
with this, so that the peaks say what a strategy needs. It can be set before a process starts only.
"""


class JobFailed(Exception):
    """A rank of a job failed; the message ends with the last words of the ranks."""


class Cluster:
    """One process in each namespace, which waits for jobs. A context manager."""

    def __init__(self, links: Links, per_node: int, folder: Path) -> None:
        self.links, self.per_node = links, per_node
        self._log = folder / "ranks.log"
        self._nodes: list[subprocess.Popen[str]] = []
        self._jobs = 0

    def __enter__(self) -> Self:
        for node in range(len(self.links.namespaces)):
            command = [sys.executable, "-m", NODE, str(node), str(self.per_node)]
            self._nodes.append(
                subprocess.Popen(
                    [*self.links.inside(node), *command],
                    env=os.environ | {"GLIBC_TUNABLES": SMALL_HEAP, "PYTHONPATH": str(ROOT)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log.open("a"),
                    text=True,
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._nodes:
            process.kill()  # its ranks die with it
        for process in self._nodes:
            process.wait()

    def run(self, job: Job, nodes: int, timeout_seconds: float) -> list[Answer]:
        """Run a job on the first `nodes` nodes; every rank's answer. Raises JobFailed."""
        return [Answer(**answer) for answer in self.answers(job, nodes, timeout_seconds)]

    def answers(self, job: Job, nodes: int, timeout_seconds: float) -> list[dict[str, Any]]:
        """`run` of a job whose function has answers of its own: their JSON."""
        self._jobs += 1
        with tempfile.TemporaryDirectory(prefix="slow-network-") as folder:
            job = replace(
                job,
                ranks=nodes * self.per_node,
                address=self.links.address(0),
                port=FIRST_PORT + self._jobs,
                folder=folder,
            )
            self._log.write_text("")
            for process in self._nodes[:nodes]:
                assert process.stdin is not None
                process.stdin.write(json.dumps(asdict(job)) + "\n")
                process.stdin.flush()
            if not self._all_well(self._nodes[:nodes], timeout_seconds):
                raise JobFailed(self._last_words())
            files = [Path(folder, f"{rank}.json") for rank in range(job.ranks)]
            return [json.loads(file.read_text()) for file in files]

    def _all_well(self, nodes: Sequence[subprocess.Popen[str]], timeout_seconds: float) -> bool:
        """Wait until every node has answered; when one fails or is late, end the others' ranks."""
        waiting = {process.stdout: process for process in nodes}
        deadline = time.monotonic() + timeout_seconds
        well = True
        while waiting:
            left = deadline - time.monotonic()
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, left))
            failed = not ready
            for stream in ready:
                line = stream.readline()
                failed |= not line or json.loads(line)["code"] != 0
                del waiting[stream]
            if failed:
                if not well and not ready:
                    raise JobFailed("a node does not answer")
                well, deadline = False, time.monotonic() + 10
                for process in waiting.values():
                    process.send_signal(signal.SIGUSR1)
        return well

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line]
        return "\n".join(lines[-25:]) or "no rank said why; perhaps it took too long"


def wait_for_quiet(cores: float, patience_seconds: float) -> None:
    """Return when others have kept fewer cores busy for a second, or patience is over."""
    give_up = time.monotonic() + patience_seconds
    while time.monotonic() < give_up:
        before, begin = machine_cpu_seconds(), time.monotonic()
        time.sleep(1)
        if machine_cpu_seconds() - before < cores * (time.monotonic() - begin):
            return


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Leave through the context managers when told to end, as after Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with handle_signals((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def open_cluster(program: str, nodes: int, per_node: int) -> Iterator[tuple[Cluster, Path]]:
    """A cluster of new nodes, and a folder for its inputs. Both are gone when the context ends.

    What cannot be measured here ends the program with 2 and one line, Ctrl-C and SIGTERM with 130.
    """
    try:
        with (
            interrupted_by_signals(),
            tempfile.TemporaryDirectory(prefix="slow-network-") as folder,
            links(nodes) as made,
            Cluster(made, per_node, Path(folder)) as cluster,
        ):
            yield cluster, Path(folder)
    except (Unable, UserError, JobFailed) as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        print(f"{program}: interrupted, all is cleaned up", file=sys.stderr)
        raise SystemExit(130) from None
