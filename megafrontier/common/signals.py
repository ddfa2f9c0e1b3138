"""Requests to stop: noted from a command's first moment, and acted on between two steps.

SIGUSR1 is what a scheduler sends when the time limit is near, SIGTERM when it wants the machine
back. This module imports nothing slow, so that the handlers are installed before torch is imported.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
# One list for the process, as signals are. Forked ranks inherit both.
_received: list[int] = []


@contextmanager
def handle_signals(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle these signals with `handler` during the body."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def record_stop_requests() -> Iterator[None]:
    """During the body, requests to stop are only noted, for `stop_requested`."""
    _received.clear()
    with handle_signals(STOPPING, lambda number, _frame: _received.append(number)):
        yield


def stop_requested() -> bool:
    """Whether this process was asked to stop within `record_stop_requests`."""
    return bool(_received)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """During the body, SIGTERM ends the command as Ctrl-C does, with all cleanup, and with the exit
    code that a shell reports for the signal."""
    with handle_signals([signal.SIGTERM], _exit):
        yield


def _exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


@contextmanager
def block_stop_requests() -> Iterator[None]:
    """During the body, requests to stop are blocked; this process handles them afterwards.

    Processes started in the body never handle them. A scheduler sends them to all processes of a
    job, and these would end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process `parent`, which forked it, ends. Only
    Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)
