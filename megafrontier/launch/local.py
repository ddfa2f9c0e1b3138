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
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from megafrontier.common.errors import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
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
from megafrontier.launch.health.timeouts import LOCAL_GRACE, LOCAL_SPEAKER
from megafrontier.parallel.env import COMMAND, LAUNCHED, RESTARTS

_BLOCKED = (*STOPPING, signal.SIGINT)
"""Signals that are blocked while ranks are forked."""


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

    Never again: after bad input, a run that cannot go on, and a request to stop. `on_failure` is
    called with the exit code and what was lost.
    """
    os.environ[COMMAND] = f"{os.getpid()}@{socket.gethostname()} {time.time():.3f}"
    for number in range(restarts + 1):
        os.environ[RESTARTS], os.environ[LAUNCHED] = str(number), str(time.time())
        lost: list[str] = []
        signals: set[int] = set()
        code = fork_ranks(count, body, lost.append, signals)
        if code in (0, BAD_INPUT, FAILED, STOPPED, INTERRUPTED):
            break
        on_failure(code, lost[0] if lost else f"exit code {code} of a rank")
        if number == restarts or signals or stop_requested():
            break
        print_error(f"megafrontier: exit code {code}, restart {number + 1} of {restarts}")
    return code


def fork_ranks(
    count: int,
    body: Callable[[], int],
    on_lost: Callable[[str], object] = lambda line: None,
    forwarded: set[int] | None = None,
) -> int:
    """Run `body` in `count` forked processes, which are ranks 0 … count - 1.

    Returns 0 or STOPPED if all ranks do, else the exit code of the first rank that fails. The
    others are then killed after a grace period. They are not sent SIGTERM, because it requests a
    checkpoint, which they cannot write without their peer. `on_lost` is called with a line for each
    rank that a signal has ended. `forwarded` gets the signals that were sent to the ranks.
    """
    import_early()
    gc.freeze()  # so that garbage collection in the ranks does not copy the parent's pages
    flush_output()
    running: dict[int, int] = {}
    forwarded = set() if forwarded is None else forwarded
    # Block signals until every rank can be told of them. Python ignores exceptions in its own code
    # around a fork, so that Ctrl-C would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=count) as server:
            for rank in range(count):
                running[_fork_one(rank, count, server, body)] = rank
        with handle_signals(STOPPING, partial(_forward, running, forwarded)):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
            return _supervise(running, forwarded, on_lost)
    finally:
        _send(running, signal.SIGKILL)
        for child in running:
            os.waitpid(child, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        gc.unfreeze()


def _fork_one(rank: int, count: int, server: socket.socket, body: Callable[[], int]) -> int:
    """`server`: the listening socket of the store, which rank 0 takes over."""
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
        # torch makes a new pool of threads after a fork. If two threads do so at once, one fails.
        torch.set_num_threads(torch.get_num_threads())
        os.environ["MEGAFRONTIER_LOCAL"] = f"{rank}/{count}"
        os.environ["MEGAFRONTIER_PORT"] = str(server.getsockname()[1])
        if rank == 0:
            os.environ["MEGAFRONTIER_SOCKET"] = str(server.detach())
        server.close()
        code = body()
    except FatalError as error:
        code = report(error, speaks=rank == 0)
        if rank and is_collective(error):
            time.sleep(LOCAL_SPEAKER)
    except BaseException:
        # Most likely a peer is gone, and has said why. The parent then kills this rank now, before
        # it adds its own traceback.
        time.sleep(2 * LOCAL_GRACE)
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


def report(error: FatalError, speaks: bool) -> int:
    """Print an error on the rank that `speaks` for all, or that met it alone. Returns its exit
    code."""
    if speaks or error.is_rank_local:
        print_error(f"megafrontier: {error}")
    return error.code


def _supervise(
    running: dict[int, int], forwarded: set[int], on_lost: Callable[[str], object]
) -> int:
    """Wait for ranks, given by process id, until all have ended or the grace period after the first
    failure is over. Returns the exit code of all. A signal that ends a rank is printed, unless this
    process `forwarded` it."""
    code = 0
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if not done:
                continue
            rank, status = running.pop(child), os.waitstatus_to_exitcode(status)
            if status < 0 and -status not in forwarded:
                why = f"signal {-status}, {signal.strsignal(-status)}"
                line = f"rank {rank} on {socket.gethostname()} was lost: {why}"
                print_error(f"megafrontier: {line}")
                on_lost(line)
            if status and code in (0, STOPPED):
                code = status if status > 0 else 128 - status
                deadline = float("inf") if code == STOPPED else time.monotonic() + LOCAL_GRACE
        time.sleep(0.02)
    return code


def _forward(running: dict[int, int], forwarded: set[int], number: int, _frame: Any) -> None:
    """The parent's signal handler: send the signal to the ranks as well."""
    forwarded.add(number)
    _send(running, number)


def _send(children: Iterable[int], number: int) -> None:
    for child in list(children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
