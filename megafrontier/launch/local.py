"""Local ranks: forked from one parent that has already imported torch.

A fork costs milliseconds, the import in each rank would cost seconds. The parent must not have
started threads (by a parallel torch operation, or a device) before it forks.
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megafrontier.common.errors import STOPPED, FatalError, UserError, print_error
from megafrontier.common.files import try_writing
from megafrontier.common.signals import STOPPING, die_with_parent, handle_signals
from megafrontier.launch.health.timeouts import LOCAL_GRACE, LOCAL_PEER, LOCAL_SPEAKER

_STORE_BYTES = 2**20
"""More than the file of the store grows to: about 2 KiB a rank."""
_BLOCKED = (*STOPPING, signal.SIGINT)
"""Signals that are blocked while ranks are forked."""


def import_early() -> None:
    """Import what torch imports at the first use of its optimizers and of the meta device. It takes
    seconds, during which other ranks would wait, so do it before ranks fork or meet."""
    importlib.import_module("torch._dynamo")


def fork_ranks(count: int, body: Callable[[], int]) -> int:
    """Run `body` in `count` forked processes, which are ranks 0 … count - 1.

    Returns 0 or STOPPED if all ranks do, else the exit code of the first rank that fails. The
    others are then killed after a grace period. They are not sent SIGTERM, because it requests a
    checkpoint, which they cannot write without their peer. Raises UserError if there is no room for
    the file of the store, or for the processes.
    """
    _check_room_for_store()
    import_early()
    gc.freeze()  # so that garbage collection in the ranks does not copy the parent's pages
    with tempfile.TemporaryDirectory(prefix="megafrontier-") as folder:
        flush_output()
        # Block signals until every rank can be told of them. Python ignores exceptions in its own
        # code around a fork, so that Ctrl-C would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            children = _fork_all(count, Path(folder), body)
        finally:
            gc.unfreeze()
        return _wait_for(children)


def _check_room_for_store() -> None:
    """Raises UserError. With a file that cannot grow, ranks would wait for each other in vain."""
    where = "TMPDIR"
    try:
        where = f"TMPDIR: {tempfile.gettempdir()}"
        try_writing(None, _STORE_BYTES)
    except OSError as error:
        need = f"need a folder with {_STORE_BYTES >> 20} MiB of room, where the ranks meet"
        raise UserError(f"{where}: {error.strerror}, {need}") from error


def _fork_all(count: int, folder: Path, body: Callable[[], int]) -> dict[int, int]:
    """Fork all ranks, or none. Returns the ranks by process id."""
    children: dict[int, int] = {}
    try:
        for rank in range(count):
            children[_fork_one(rank, count, folder, body)] = rank
    except OSError as error:
        _kill_all(children)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        why = f"cannot start rank {len(children)}: {error.strerror}"
        raise UserError(f"--nproc: {count}: {why}, need as many processes") from error
    return children


def _fork_one(rank: int, count: int, folder: Path, body: Callable[[], int]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # Without its parent, a rank would go on unseen, and write where the next run writes.
        die_with_parent(parent)
        # Ctrl-C reaches all processes. Only the parent acts on it, and ends the ranks.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        os.environ["MEGAFRONTIER_LOCAL"] = f"{rank}/{count}"
        os.environ["MEGAFRONTIER_STORE"] = str(folder / "store")
        code = exit_code(body, rank == 0, lambda: time.sleep(LOCAL_SPEAKER))
    except BaseException:
        # Most likely a peer is gone, and has said why. The parent then kills this rank now, before
        # it adds its own traceback.
        time.sleep(LOCAL_PEER)
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def flush_output() -> None:
    """Flush stdout and stderr. A reader that is gone (`| head`) must not keep a rank from its
    exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def exit_code(
    body: Callable[[], int], speaks: bool = True, stay: Callable[[], None] = lambda: None
) -> int:
    """Return what `body` returns, or the exit code of the FatalError that it raises.

    All ranks raise the same error. The rank that `speaks` prints it, and the others `stay` alive
    meanwhile. An error that only one rank raises is printed by that rank.
    """
    try:
        return body()
    except FatalError as error:
        if speaks or error.is_rank_local:
            print_error(f"megafrontier: {error}")
        else:
            stay()
        return error.code


def _wait_for(running: dict[int, int]) -> int:
    """Wait for ranks, given by process id. Returns the exit code of all."""
    forwarded: set[int] = set()
    with handle_signals(STOPPING, _forward_to(running, forwarded)):
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
            return _supervise(running, forwarded)
        finally:
            _kill_all(running)


def _kill_all(children: Iterable[int]) -> None:
    _send(children, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)


def _supervise(running: dict[int, int], forwarded: set[int]) -> int:
    code = 0
    deadline = float("inf")
    while running:
        for rank, status in _reap(running):
            _report_signal(rank, status, forwarded)
            if status and code in (0, STOPPED):
                code = status if status > 0 else 128 - status
                if code != STOPPED:
                    deadline = time.monotonic() + LOCAL_GRACE
        if time.monotonic() > deadline:
            forwarded.add(signal.SIGKILL)
            _send(running, signal.SIGKILL)
        time.sleep(0.02)
    return code


def _reap(running: dict[int, int]) -> list[tuple[int, int]]:
    """Remove the ranks that have ended. Returns their (rank, exit code, or -n for signal n)."""
    ended = []
    for child in list(running):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            ended.append((running.pop(child), os.waitstatus_to_exitcode(status)))
    return ended


def _report_signal(rank: int, status: int, forwarded: set[int]) -> None:
    """Print that a signal ended a rank, unless this process sent the signal."""
    if status < 0 and -status not in forwarded:
        why = f"signal {-status}, {signal.strsignal(-status)}"
        print_error(f"megafrontier: rank {rank} on {socket.gethostname()} was lost: {why}")


def _forward_to(running: dict[int, int], forwarded: set[int]) -> Callable[[int, Any], None]:
    """A signal handler that sends the signal to the ranks as well."""

    def forward(number: int, _frame: object) -> None:
        forwarded.add(number)
        _send(running, number)

    return forward


def _send(children: Iterable[int], number: int) -> None:
    for child in list(children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
