"""Requests to stop, remembered from a command's first moment and acted on between two steps.

SIGUSR1 is what a scheduler sends when the time limit is near, SIGTERM when it wants the machine
back. Nothing slow is imported here: the handlers stand before torch is.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
_SET_PARENT_DEATH_SIGNAL = 1  # prctl
# A signal belongs to the process, and so does its memory; forked ranks inherit both.
_received: list[int] = []


@contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Meanwhile `handler` is called for these signals; afterwards whatever was before."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def stops_remembered() -> Iterator[None]:
    """Meanwhile the signals only leave a note, however often they come."""
    _received.clear()
    with handled(STOPPING, _remember):
        yield


def _remember(number: int, _frame: object) -> None:
    _received.append(number)


@contextmanager
def termination_raised() -> Iterator[None]:
    """Meanwhile SIGTERM ends the command as Ctrl-C does, with all that it cleans up, and the exit
    code that a shell gives it."""
    with handled([signal.SIGTERM], _exit):
        yield


def _exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def stop_requested() -> bool:
    """Whether this process has been asked to stop since it began to remember."""
    return bool(_received)


@contextmanager
def stops_held_back() -> Iterator[None]:
    """Processes started meanwhile never notice the signals, which a scheduler sends to all of a
    job's processes; what comes in for this one waits until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this forked process when `parent`, the process that forked it, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)
