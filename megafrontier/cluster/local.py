"""Local ranks: forked from one parent that has already imported torch.

Eight fresh interpreters would each pay for the import; a fork costs milliseconds. The parent must
not have started threads of its own (no parallel torch operation, no device) before it forks.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megafrontier.errors import RankError, RunFailed, UserError

GRACE_SECONDS = 10.0
PEER_SECONDS = 1.0
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
_SET_PARENT_DEATH_SIGNAL = 1


def fork_ranks(count: int, body: Callable[[], int]) -> int:
    """Run `body` in `count` forked processes that find themselves as ranks 0 … count - 1.

    Returns 0 when all return 0, else the first failing rank's exit code; when one fails, the
    others are asked to end and, after a grace period, killed.
    """
    # torch's optimizers import this at their first use: once here, not once in every rank.
    importlib.import_module("torch._dynamo")
    gc.freeze()  # the ranks' collectors leave our objects alone, so their pages stay shared
    with tempfile.TemporaryDirectory(prefix="megafrontier-") as folder:
        _flush()
        # A signal that comes while we fork waits until every rank can be told of it.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        children = {_fork_one(rank, count, Path(folder), body) for rank in range(count)}
        gc.unfreeze()
        return _wait_for(children)


def _fork_one(rank: int, count: int, folder: Path, body: Callable[[], int]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _die_with(parent)
        # Ctrl-C reaches all of us; the parent alone acts on it, and ends us.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        os.environ["MEGAFRONTIER_LOCAL"] = f"{rank}/{count}"
        os.environ["MEGAFRONTIER_STORE"] = str(folder / "store")
        code = exit_code(body, speaks=rank == 0)
    except BaseException:
        # Most likely a peer is gone and its own word says why. Then the parent ends this rank
        # now, before it adds a traceback to that.
        time.sleep(PEER_SECONDS)
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    """Without its parent a rank would train on unseen, and write where the next run does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _flush() -> None:
    """Nobody may be reading any more (`| head`): a forked rank must come to its exit even so."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def exit_code(body: Callable[[], int], speaks: bool = True) -> int:
    """What `body` returns, or the code of the one-line error it ends with.

    All ranks meet the same bad input; the one that `speaks` says so. A RankError is one rank's
    own, which says so itself.
    """
    try:
        return body()
    except (UserError, RunFailed) as error:
        if speaks or isinstance(error, RankError):
            print(f"megafrontier: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 3


def _wait_for(living: set[int]) -> int:
    handlers = {number: signal.signal(number, _forward_to(living)) for number in FORWARDED}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    first_failure = 0
    deadline = float("inf")
    try:
        while living:
            for code in _reap(living):
                if code and not first_failure:
                    first_failure = code
                    deadline = time.monotonic() + GRACE_SECONDS
                    _send(living, signal.SIGTERM)
            if time.monotonic() > deadline:
                _send(living, signal.SIGKILL)
            time.sleep(0.02)
    finally:
        _send(living, signal.SIGKILL)
        for child in living:
            os.waitpid(child, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return first_failure


def _reap(living: set[int]) -> Iterator[int]:
    """Exit codes of the ranks that have ended, which leave `living`; 128 + n for signal n."""
    for child in list(living):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            living.discard(child)
            code = os.waitstatus_to_exitcode(status)
            yield code if code >= 0 else 128 - code


def _forward_to(living: set[int]) -> Callable[[int, Any], None]:
    """Pass what the parent is told on to the ranks, and keep waiting for them."""

    def forward(number: int, _frame: object) -> None:
        _send(living, number)

    return forward


def _send(children: set[int], number: int) -> None:
    for child in list(children):
        try:
            os.kill(child, number)
        except ProcessLookupError:
            continue
