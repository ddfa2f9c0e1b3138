"""Local ranks: forked from one parent that has already imported torch.

Eight fresh interpreters would each pay for the import; a fork costs milliseconds. The parent must
not have started threads of its own (no parallel torch operation, no device) before it forks.
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
from megafrontier.common.files import try_room
from megafrontier.common.signals import STOPPING, die_with_parent, handled

GRACE_SECONDS = 0.5
"""From the first failure to the end of all ranks: time for the one that speaks to say why."""
SPEAKER_SECONDS = 150.0
"""After an end that all ranks come to alike: how long those who do not say why wait for the one
that does, which may have metrics to hand over (W&B has 120 s) before."""
PEER_SECONDS = 1.0
"""Longer than that: a rank with an exception of its own waits whether it is to be ended."""
MEETING_BYTES = 2**20
"""More than the file grows to in which ranks meet: some two KiB for each."""
HELD_BACK = (*STOPPING, signal.SIGINT)
"""Signals that wait while ranks are forked."""


def import_early() -> None:
    """Import what torch imports at the first use of its optimizers and of the meta device, seconds
    of computing: before ranks fork or meet, for then the others wait."""
    importlib.import_module("torch._dynamo")


def fork_ranks(count: int, body: Callable[[], int]) -> int:
    """Run `body` in `count` forked processes that find themselves as ranks 0 … count - 1.

    Returns 0 or STOPPED when all do, else the first failing rank's exit code; when one fails, the
    others are killed after a grace period. They are not asked: SIGTERM asks for a checkpoint, and
    without their peer they can neither write one nor go on. Raises UserError where they have no
    room to meet.
    """
    _check_room_to_meet()
    import_early()  # once here, not once in every rank
    gc.freeze()  # the ranks' collectors leave our objects alone, so their pages stay shared
    with tempfile.TemporaryDirectory(prefix="megafrontier-") as folder:
        flush_output()
        # A signal that comes while we fork waits until every rank can be told of it; Ctrl-C would
        # be lost in what Python itself does at a fork, where exceptions are ignored.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            children = _fork_all(count, Path(folder), body)
        finally:
            gc.unfreeze()
        return _wait_for(children)


def _check_room_to_meet() -> None:
    """Raises UserError: in a file that cannot grow ranks would wait for each other in vain."""
    where = "TMPDIR"
    try:
        where = f"TMPDIR: {tempfile.gettempdir()}"
        try_room(None, MEETING_BYTES)
    except OSError as error:
        need = f"need a folder with {MEETING_BYTES >> 20} MiB of room, where the ranks meet"
        raise UserError(f"{where}: {error.strerror}, {need}") from error


def _fork_all(count: int, folder: Path, body: Callable[[], int]) -> dict[int, int]:
    """Ranks by process number: all, or none where the system has no room for them."""
    children: dict[int, int] = {}
    try:
        for rank in range(count):
            children[_fork_one(rank, count, folder, body)] = rank
    except OSError as error:
        _end(children)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
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
        # Without its parent a rank would train on unseen, and write where the next run does.
        die_with_parent(parent)
        # Ctrl-C reaches all of us; the parent alone acts on it, and ends us.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
        os.environ["MEGAFRONTIER_LOCAL"] = f"{rank}/{count}"
        os.environ["MEGAFRONTIER_STORE"] = str(folder / "store")
        code = exit_code(body, rank == 0, lambda: time.sleep(SPEAKER_SECONDS))
    except BaseException:
        # Most likely a peer is gone and its own word says why. Then the parent ends this rank
        # now, before it adds a traceback to that.
        time.sleep(PEER_SECONDS)
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def flush_output() -> None:
    """Nobody may be reading any more (`| head`): a forked rank must come to its exit even so."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def exit_code(
    body: Callable[[], int], speaks: bool = True, stay: Callable[[], None] = lambda: None
) -> int:
    """What `body` returns, or the code of the one-line error it ends with.

    All ranks come to the same end; the one that `speaks` says so, and the others `stay`. An error
    of one rank alone it tells itself.
    """
    try:
        return body()
    except FatalError as error:
        if speaks or error.is_rank_local:
            print_error(f"megafrontier: {error}")
        else:
            stay()
        return error.code


def _wait_for(living: dict[int, int]) -> int:
    """Wait for ranks by process number; the exit code of them all."""
    passed_on: set[int] = set()
    with handled(STOPPING, _forward_to(living, passed_on)):
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
            return _watch_over(living, passed_on)
        finally:
            _end(living)


def _end(living: Iterable[int]) -> None:
    _send(living, signal.SIGKILL)
    for child in living:
        os.waitpid(child, 0)


def _watch_over(living: dict[int, int], passed_on: set[int]) -> int:
    code = 0
    deadline = float("inf")
    while living:
        for rank, status in _reap(living):
            _tell_of_signal(rank, status, passed_on)
            if status and code in (0, STOPPED):
                code = status if status > 0 else 128 - status
                if code != STOPPED:
                    deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            passed_on.add(signal.SIGKILL)
            _send(living, signal.SIGKILL)
        time.sleep(0.02)
    return code


def _reap(living: dict[int, int]) -> list[tuple[int, int]]:
    """(rank, exit code, or -n for signal n) of the ranks that have ended, which leave `living`."""
    ended = []
    for child in list(living):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            ended.append((living.pop(child), os.waitstatus_to_exitcode(status)))
    return ended


def _tell_of_signal(rank: int, status: int, passed_on: set[int]) -> None:
    """A rank that a signal ends cannot say so itself; one that we passed on is no news, nor that
    we end the others."""
    if status < 0 and -status not in passed_on:
        why = f"signal {-status}, {signal.strsignal(-status)}"
        print_error(f"megafrontier: rank {rank} on {socket.gethostname()} was lost: {why}")


def _forward_to(living: dict[int, int], passed_on: set[int]) -> Callable[[int, Any], None]:
    """Pass what the parent is told on to the ranks, and keep waiting for them."""

    def forward(number: int, _frame: object) -> None:
        passed_on.add(number)
        _send(living, number)

    return forward


def _send(children: Iterable[int], number: int) -> None:
    for child in list(children):
        try:
            os.kill(child, number)
        except ProcessLookupError:
            continue
