"""Local ranks: forked from one parent that has already imported torch.

A fork costs milliseconds, the import in each rank would cost seconds. The parent must not have
started threads (by a parallel torch operation, or a device) before it forks.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs

from megafrontier.common.errors import (
    FINAL,
    LOST,
    STOPPED,
    FatalError,
    is_collective,
    print_error,
)
from megafrontier.common.signals import (
    STOPPING,
    die_with_parent,
    handle_signals,
    stop_requested,
)
from megafrontier.launch.health.timeouts import LEAVE_SECONDS, LOCAL_GRACE, LOCAL_SPEAKER
from megafrontier.launch.rendezvous import allow_sockets
from megafrontier.launch.survivors import ABANDON, LEFT, LONGEST_MESSAGE, Survivor, become_survivor
from megafrontier.parallel.env import COMMAND, LAUNCHED, RESTARTS, ROUND, STORE

_BLOCKED = (*STOPPING, signal.SIGINT)
"""Signals that are blocked while ranks are forked."""
_PORT = "MEGAFRONTIER_PORT"
STORE_NAME = "ranks-store"
"""The name of the process of the store."""


def import_early() -> None:
    """Import what torch imports at the first use of its optimizers and of the meta device. It takes
    seconds, during which other ranks would wait, so do it before ranks fork or meet."""
    importlib.import_module("torch._dynamo")


def fork_ranks_again(
    count: int,
    body: Callable[[], int],
    restarts: int,
    on_failure: Callable[[int, str], None] = lambda code, reason: None,
) -> int:
    """`fork_ranks`, and after a failure again, up to `restarts` times. Returns the last exit code.

    Ranks that have not ended keep their process, and run `body` again in it (Note [Survivors]).
    Never again: after bad input, a run that cannot go on, and a request to stop. `on_failure` is
    called with the exit code and what was lost.
    """
    os.environ[COMMAND] = f"{os.getpid()}@{socket.gethostname()} {time.time():.3f}"
    with LocalRanks(range(count), body, can_survive=restarts > 0) as ranks:
        for number in range(restarts + 1):
            os.environ[RESTARTS], os.environ[LAUNCHED] = str(number), str(time.time())
            ranks.start()
            lost: list[str] = []
            code = ranks.wait(lost.append, may_restart=number < restarts)
            if code in FINAL:
                break
            on_failure(code, lost[0] if lost else f"exit code {code} of a rank")
            if number == restarts or ranks.forwarded or stop_requested():
                break
            kept = ranks.gather()
            if ranks.forwarded:
                break
            print_error(
                f"megafrontier: exit code {code}, restart {number + 1} of {restarts}: "
                f"{kept} of {count} ranks keep their process"
            )
    return code


def fork_ranks(
    count: int,
    body: Callable[[], int],
    on_lost: Callable[[str], object] = lambda line: None,
) -> int:
    """Run `body` in `count` forked processes, which are ranks 0 … count - 1.

    Returns 0 or STOPPED if all ranks do, else the exit code of the first rank that fails. The
    others are then killed after a grace period. They are not sent SIGTERM, because it requests a
    checkpoint, which they cannot write without their peer. `on_lost` is called with a line for each
    rank that a signal has ended.
    """
    with LocalRanks(range(count), body) as ranks:
        ranks.start()
        return ranks.wait(on_lost)


class LocalRanks:
    """The processes of ranks, as their parent sees them. They are killed when the context ends.
    `forwarded`: the signals that were sent to them.

    With `can_survive`, ranks outlive the failure of another one, and a process of its own has the
    store at which they meet.
    """

    is_alone = False
    """Whether there are ranks with other parents."""

    def __init__(
        self, ranks: Sequence[int], body: Callable[[], int], can_survive: bool = False
    ) -> None:
        self.forwarded: set[int] = set()
        self._ranks, self._body, self._can_survive = ranks, body, can_survive
        self._running: dict[int, int] = {}
        """Ranks, by process id."""
        self._channels: dict[int, socket.socket] = {}
        """To the ranks that can survive."""
        self._left: set[int] = set()
        """Ranks that have abandoned their groups."""
        self._said: set[bytes] = set()
        """What the ranks have said since they started."""
        self._store: int | None = None
        """The process of the store."""
        self._server: socket.socket | None = None
        """The listening socket of the store, which rank 0 or the store's process takes over."""

    def __enter__(self) -> Self:
        import_early()
        gc.freeze()  # so that garbage collection in the ranks does not copy the parent's pages
        # Block signals until every rank can be told of them. Python ignores exceptions in its own
        # code around a fork, so that Ctrl-C would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        return self

    def __exit__(self, *error: object) -> None:
        children = [*self._running, *([] if self._store is None else [self._store])]
        _send(children, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        self._close_sockets()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        gc.unfreeze()

    def _close_sockets(self) -> None:
        for channel in (*self._channels.values(), *([self._server] if self._server else [])):
            channel.close()
        self._channels, self._server = {}, None

    def start(self) -> None:
        """Fork the ranks that do not run. The others, which `gather` has gathered, start again."""
        flush_output()
        self._left, self._said = set(), set()
        if self._store is None or os.waitpid(self._store, os.WNOHANG)[0]:
            self._open_store()
        if self._channels:
            names = (RESTARTS, ROUND, LAUNCHED, _PORT)
            orders = {name: os.environ[name] for name in names if name in os.environ}
            self._tell(json.dumps(orders).encode())
        for rank in sorted({*self._ranks} - {*self._running.values()}):
            self._running[self._fork(rank)] = rank

    def _open_store(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = self._create_server()
        if self._can_survive and self._server is not None:
            parent, self._store = os.getpid(), os.fork()
            if self._store == 0:
                _keep_store(parent, self._server)
            self._server.close()

    def _create_server(self) -> socket.socket | None:
        """The listening socket of the store; None if another process has it."""
        server = socket.create_server(("127.0.0.1", 0), backlog=4 * len(self._ranks))
        os.environ[_PORT] = str(server.getsockname()[1])
        return server

    def _environment(self, rank: int) -> dict[str, str]:
        """What a rank has in its environment."""
        store = {STORE: "parent"} if self._can_survive else {}
        return {"MEGAFRONTIER_LOCAL": f"{rank}/{len(self._ranks)}", **store}

    def _fork(self, rank: int) -> int:
        parent, ours, theirs = os.getpid(), None, None
        if self._can_survive:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child = os.fork()
        if child:
            if ours is not None and theirs is not None:
                theirs.close()
                ours.setblocking(False)
                self._channels[rank] = ours
            return child
        try:
            if ours is not None:
                ours.close()
            # Without its parent, a rank would go on unseen, and write where the next run writes.
            die_with_parent(parent)
            self._become(rank)
            _run_rank(rank, self._body, theirs, self.is_alone)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _become(self, rank: int) -> None:
        """Make this forked process a rank."""
        # Ctrl-C reaches all processes. Only the parent acts on it, and ends the ranks.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        # torch makes a new pool of threads after a fork. If two threads do so at once, one fails.
        torch.set_num_threads(torch.get_num_threads())
        os.environ.pop(STORE, None)
        os.environ.update(self._environment(rank))
        if rank == 0 and not self._can_survive and self._server is not None:
            os.environ["MEGAFRONTIER_SOCKET"] = str(self._server.detach())
        self._close_sockets()

    def wait(self, on_lost: Callable[[str], object], may_restart: bool = False) -> int:
        """Wait until all ranks have ended, or the grace period after the first failure is over.
        Returns the exit code of all. A signal that ends a rank is printed, unless it was forwarded.

        With `may_restart`, returns at the first failure after which the ranks may start again, and
        has told those that live to abandon their groups; or if one has done so by itself.
        """
        code, deadline = 0, float("inf")
        with self._forwarding():
            while self._running and time.monotonic() < deadline:
                for rank, status in self._ended():
                    if status < 0 and -status not in self.forwarded:
                        on_lost(_say_lost(rank, -status))
                    if status and code in (0, STOPPED):
                        code = status if status > 0 else 128 - status
                        no_limit = code == STOPPED
                        deadline = float("inf") if no_limit else time.monotonic() + LOCAL_GRACE
                self._listen()
                if may_restart and self._left:
                    return LOST  # the rank has no siblings to be told
                if may_restart and code not in FINAL and not self.forwarded:
                    self._tell(ABANDON)
                    break
                time.sleep(0.02)
        return code

    def gather(self) -> int:
        """Wait until every rank has ended or has abandoned its groups, and kill those that do not
        in time. Returns how many keep their process."""
        deadline = time.monotonic() + LEAVE_SECONDS
        with self._forwarding():
            while self._left < {*self._running.values()} and not self.forwarded:
                self._listen()
                self._left -= {rank for rank, _ in self._ended()}
                if time.monotonic() > deadline:
                    self._replace({*self._running.values()} - self._left)
                    deadline = float("inf")
                time.sleep(0.01)
        return len(self._left)

    def _listen(self) -> None:
        """Take what the ranks have said."""
        for rank in self._channels:
            self._listen_to(rank)

    def _listen_to(self, rank: int) -> None:
        with contextlib.suppress(OSError):  # nothing to read, or it has ended
            while message := self._channels[rank].recv(LONGEST_MESSAGE):
                self._said.add(message)
                if message == LEFT:
                    self._left.add(rank)

    def _replace(self, ranks: set[int]) -> None:
        """Kill these ranks, which then start again in new processes."""
        for rank in sorted(ranks):
            where = f"rank {rank} on {socket.gethostname()}"
            late = f"has not abandoned its groups within {LEAVE_SECONDS:g} s"
            print_error(f"megafrontier: {where}: {late}, its process is replaced")
        _send([child for child, rank in self._running.items() if rank in ranks], signal.SIGKILL)

    def _ended(self) -> list[tuple[int, int]]:
        """The ranks that have ended since the last call, and their exit codes; negative for a
        signal."""
        ended = []
        for child in list(self._running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                rank = self._running.pop(child)
                if rank in self._channels:
                    self._listen_to(rank)
                    self._channels.pop(rank).close()
                ended.append((rank, os.waitstatus_to_exitcode(status)))
        return ended

    def _tell(self, message: bytes) -> None:
        """Send a message to every rank that lives."""
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                channel.send(message)

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """During the body, signals that request a stop are sent to the ranks as well."""
        with handle_signals(STOPPING, self._forward):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)

    def _forward(self, number: int, _frame: Any) -> None:
        self.forwarded.add(number)
        _send(self._running, number)


def _say_lost(rank: int, number: int) -> str:
    """Print, and return, that a signal has ended a rank."""
    why = f"signal {number}, {signal.strsignal(number)}"
    line = f"rank {rank} on {socket.gethostname()} was lost: {why}"
    print_error(f"megafrontier: {line}")
    return line


def _keep_store(parent: int, server: socket.socket) -> None:
    """Have the store of all starts, as a forked process. Does not return."""
    try:
        die_with_parent(parent)
        port = server.getsockname()[1]
        with contextlib.suppress(OSError):  # for whoever looks at the processes
            Path("/proc/self/comm").write_text(STORE_NAME)
        allow_sockets(os.getpid())
        store = TCPStore(
            "localhost",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
        while store is not None:  # the signals of the parent stay blocked
            time.sleep(3600)
    finally:
        os._exit(1)


def _run_rank(
    rank: int, body: Callable[[], int], parent: socket.socket | None, is_alone: bool
) -> None:
    """Run `body` as a rank, and again when its parent says so. Ends the process."""
    survivor = None if parent is None else become_survivor(parent, is_alone)
    while (code := _run_once(rank, body, survivor)) is None:
        assert survivor is not None
        survivor.start_again()
    flush_output()
    os._exit(code)


def _run_once(rank: int, body: Callable[[], int], survivor: Survivor | None) -> int | None:
    """The exit code of the rank; None if it is to start again."""
    code = 1
    try:
        code = body()
    except BaseException as error:
        if survivor is None or not survivor.is_abandoning(error, speaks=rank == 0):
            return _report_end(rank, error)
    return None if survivor is not None and survivor.is_abandoning(None) else code


def _report_end(rank: int, error: BaseException) -> int:
    """Print the error that ends a rank, unless another one does. Returns the exit code."""
    if isinstance(error, FatalError):
        code = report(error, speaks=rank == 0)
        if rank and is_collective(error):
            time.sleep(LOCAL_SPEAKER)
        return code
    # Most likely a peer is gone, and has said why. The parent then kills this rank now, before it
    # adds its own traceback.
    time.sleep(2 * LOCAL_GRACE)
    traceback.print_exception(error)
    return 1


def flush_output() -> None:
    """Flush stdout and stderr. A reader that is gone (`| head`) must not keep a rank from its
    exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def report(error: FatalError, speaks: bool) -> int:
    """Print an error on the rank that `speaks` for all, or that met it alone. Returns its exit
    code."""
    if speaks or error.is_rank_local:
        print_error(f"megafrontier: {error}")
    return error.code


def _send(children: Iterable[int], number: int) -> None:
    for child in list(children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
