"""Let thousands of light processes meet as the ranks of a run do, on this machine.

    python -m scripts.benchmarks.meeting [--ranks 2000] [--per-host 8]

The processes are forked from one that has imported torch. Each connects to the store of the first
one, as often as a rank does, takes part in the roll call at the start, and later in that after an
alarm (`launch/rendezvous.py`, `launch/health/liveness.py`). They train nothing. Prints how long
both took, and how many requests rank 0 and another rank have sent to the store, with their bytes.

torch looks up the name of each peer of the store. Where a name server is slow, it is what takes the
time: RES_OPTIONS="timeout:1 attempts:1" makes it give up sooner.
"""

import argparse
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.common.signals import die_with_parent
from megafrontier.launch import rendezvous
from megafrontier.launch.health.liveness import Alarm, LivenessCheck
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.parallel.env import Identity
from scripts.benchmarks.shared.measuring import free_port


class CountingStore:
    """A store that counts its requests, and the bytes of their keys and values."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests = self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def request(*arguments: Any) -> Any:
            answer = method(*arguments)
            self.requests += 1
            self.bytes += _size([*arguments, answer])
            return answer

        return request


def _size(values: Sequence[Any]) -> int:
    """Bytes of keys and values. A number has 8."""
    sizes = {str: len, bytes: len, list: _size, int: lambda _: 8}
    return sum(sizes[type(value)](value) for value in values if type(value) in sizes)


def take_part(identity: Identity, timeouts: Timeouts, folder: Path) -> None:
    """One rank: meet, wait until all are told to go on, raise or answer an alarm. Rank 0 writes its
    times to `folder`."""
    liveness = rendezvous._open_store(identity, timeouts)
    counted: Any = CountingStore(liveness.store)
    liveness.store = counted
    begin = time.time()
    absent = liveness.meet(timeouts.arrive)
    met, requests = time.time(), (counted.requests, counted.bytes)
    assert absent == []
    # The connections of the watchdog.
    liveness.store = counted._store
    listening, raising = liveness.clone(), liveness.clone()
    counted = CountingStore(raising.store)
    is_last = raising.store.add("connected", 1) == identity.world_size
    raising.store = counted
    if is_last:
        raising.raise_alarm(Alarm(identity.rank, "the benchmark", 1, hang=True))
    listening.wait_for_alarm()
    alarmed = time.time()
    answers = _answer(raising)
    assert answers == 0
    if identity.rank < 2:
        times = {"begin": begin, "met": met, "alarmed": alarmed, "answered": time.time()}
        values = times | {"meeting": requests, "roll_call": (counted.requests, counted.bytes)}
        (folder / str(identity.rank)).write_text(json.dumps(values))


def _answer(liveness: LivenessCheck) -> int:
    return len(liveness.answer(hang=False).missing)


def fork_one(identity: Identity, timeouts: Timeouts, folder: Path, parent: int) -> int:
    """Fork a rank. Returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent(parent)
        take_part(identity, timeouts, folder)
        code = 0
    except Exception as error:
        print(f"rank {identity.rank}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def meet(ranks: int, per_host: int) -> str:
    """Fork the ranks, and say how long they took. Raises UserError for too few open files, and
    RuntimeError if a rank fails."""
    place = f"tcp://127.0.0.1:{free_port()}"
    timeouts = replace(Timeouts.of(ranks), answer=120.0)  # all of them share a few cores
    identities = [
        Identity(r, ranks, r % per_host, "slurm", place, f"host{r // per_host:05d}", "meeting")
        for r in range(ranks)
    ]
    rendezvous.check_sockets(identities[0])
    children: list[int] = []
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    gc.freeze()  # so that garbage collection in the children copies no pages
    with TemporaryDirectory() as name:
        folder, begin = Path(name), time.time()
        try:
            for identity in identities:
                children.append(fork_one(identity, timeouts, folder, os.getpid()))
                if identity.rank == 0:
                    _wait_for_store(identity)
            forked = time.time()
            resident = sum(map(_private_bytes, children)) / len(children)
            codes = [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]
            children = []
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
        if any(codes):
            raise RuntimeError(f"{sum(map(bool, codes))} of {ranks} processes failed")
        first, other = (json.loads((folder / str(rank)).read_text()) for rank in range(2))
    return "\n".join(
        [
            f"{ranks} processes, {resident / 1e6:.1f} MB each, forked in {forked - begin:.1f} s",
            f"met {first['met'] - forked:.2f} s after the last one was forked",
            f"after an alarm all were called in {first['answered'] - first['alarmed']:.2f} s",
            f"requests (bytes) of rank 0: {_counts(first)}; of another: {_counts(other)}",
        ]
    )


def _wait_for_store(identity: Identity) -> None:
    """Until rank 0 listens: others that come earlier try again after seconds."""
    address = urlsplit(identity.rendezvous)
    while True:
        with suppress(ConnectionRefusedError):
            socket.create_connection((str(address.hostname), address.port or 0)).close()
            return
        time.sleep(0.01)


def _counts(values: dict[str, Any]) -> str:
    meeting, roll_call = values["meeting"], values["roll_call"]
    return f"{meeting[0]} ({meeting[1]}) to meet, {roll_call[0]} ({roll_call[1]}) after the alarm"


def _private_bytes(process: int) -> int:
    """Memory that a process does not share; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2000)
    parser.add_argument("--per-host", type=int, default=8)
    arguments = parser.parse_args()
    signal.alarm(580)  # whatever happens, nothing stays
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with exit_on_fatal_error("meeting"):
        print(f"at most {limit} open files")
        print(meet(arguments.ranks, arguments.per_host))
    return 0


if __name__ == "__main__":
    sys.exit(main())
