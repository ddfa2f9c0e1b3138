"""Ranks that keep their process when another rank is lost.

Note [Survivors]
When a rank has ended, its parent starts it again, and tells the others to abandon their groups. A
thread of each of these ends the watchdog and breaks the rank's connections (Note [Broken
connections]), or aborts NCCL's communicators. The next collective of the main thread then fails, if
it does not wait in one, and the exception ends the run as any other: files are closed and the run
lock is released. The process stays, with its imports, its device and its compiled code. It reports
to the parent and, when all ranks are there, runs again from the meeting on, as the new ranks do.

A rank that has not reported within LEAVE_SECONDS is killed and started again, too.

A rank of a Slurm job has a parent of its own (Note [Tasks] in `launch/tasks.py`), which knows of no
other rank. The liveness check tells it that another one was lost, and it abandons its groups by
itself.
"""

import gc
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from megafrontier.common.errors import LOST, is_collective, print_error
from megafrontier.launch.health.liveness import call_with_timeout
from megafrontier.launch.health.timeouts import (
    GIVE_UP_GROUPS,
    LEAVE_SECONDS,
    LOCAL_SPEAKER,
    PARENT_SECONDS,
)
from megafrontier.parallel.sockets import CONNECTIONS

ABANDON, LEFT, MET, GIVES_UP = b"abandon", b"left", b"met", b"gives up"
"""What the parent says to the rank; and the rank to the parent: that it has abandoned its groups,
has met the others, or will not meet them again. The parent's other message is a JSON object of
environment variables, with which the rank is to start again."""
LONGEST_MESSAGE = 4096


class Survivor:
    """One rank's part. Made in the rank's process, before its run begins. `is_alone`: its parent
    has no other rank, so it decides itself when to abandon its groups."""

    def __init__(self, parent: socket.socket, is_alone: bool = False) -> None:
        self.is_alone = is_alone
        self._parent = parent
        self._timer: threading.Timer | None = None
        self._abandoning = threading.Lock()
        self._start = 0
        self._is_abandoned = threading.Event()
        self._is_broken = threading.Event()
        """Set when nothing of `abandon` is left to do."""
        self._orders: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        self._on_abandon: Callable[[], None] = lambda: None
        self._has_asked = False
        CONNECTIONS.is_on = True
        self._thread = threading.Thread(target=self._obey, name="survivor", daemon=True)
        self._thread.start()
        self._threads = set(threading.enumerate())

    def _obey(self) -> None:
        while message := self._parent.recv(LONGEST_MESSAGE):
            if message == ABANDON:
                self.abandon()
            else:
                self._orders.put(json.loads(message))

    def abandon(self) -> None:
        """Abandon this rank's groups. Called by another thread than the main one, or by that when
        it is in no collective. Two threads may call it: that of the watchdog, and the one that the
        parent tells to."""
        start = self._start
        self._is_abandoned.set()
        with self._abandoning:
            if start == self._start and not self._is_broken.is_set():
                self._abandon()

    def _abandon(self) -> None:
        if self.is_alone:  # its parent does not know when it began
            self._timer = threading.Timer(LEAVE_SECONDS, _end_late)
            self._timer.daemon = True
            self._timer.start()
        self._on_abandon()
        _break_groups()
        self._is_broken.set()

    def tell_parent(self, message: bytes) -> None:
        """Send MET or GIVES_UP."""
        with suppress(OSError):
            self._parent.send(message)

    def wait(self, seconds: float) -> None:
        """Wait until the rank is to abandon its groups."""
        self._is_abandoned.wait(seconds)

    def on_abandon(self, act: Callable[[], None]) -> None:
        """Call `act`, in another thread, when the rank is to abandon its groups. Replaces the
        function that was given before."""
        self._on_abandon = act
        if self._is_abandoned.is_set():
            act()

    def is_abandoning(self, error: BaseException | None, speaks: bool = False) -> bool:
        """Whether the rank is to abandon its groups, perhaps only because of what has also caused
        `error`; then waits for the parent's word. `speaks`: this rank prints errors that all ranks
        raise; the others wait until it has."""
        seconds = 0.0
        if error is None:
            return self._is_abandoned.is_set()
        if is_collective(error):
            seconds = 0.0 if speaks or self.is_alone else LOCAL_SPEAKER
        elif not self._has_asked:
            seconds, self._has_asked = PARENT_SECONDS, True
        return self._is_abandoned.wait(seconds)

    def start_again(self) -> None:
        """Drop what is left of the run, report to the parent, and return when the rank is to start
        again, with another environment. Does not return if something cannot be dropped."""
        deadline = time.monotonic() + LEAVE_SECONDS
        self._is_broken.wait()  # or it would break the connections of the next start
        gc.enable()
        gc.collect()  # groups, streams and buffers are parts of cycles
        torch.compiler.reset()  # guards of the old model would count as recompilations of the new
        for thread in _our_threads() - self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                print_error(f"megafrontier: thread {thread.name} does not end")
                os._exit(1)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the next run may allocate in another order
        CONNECTIONS.forget()
        # torch counts groups to name them, also one that it could not connect. No public name.
        dist.distributed_c10d._world.group_count = 0
        self._has_asked = False
        self._on_abandon = lambda: None
        with self._abandoning:
            self._start += 1
            self._is_abandoned.clear()
            self._is_broken.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._parent.send(LEFT)
        os.environ.update(self._orders.get())


def _end_late() -> None:
    late = f"has not abandoned its groups within {LEAVE_SECONDS:g} s"
    print_error(f"megafrontier: process {os.getpid()} {late}, and is replaced")
    os._exit(LOST)


def _our_threads() -> set[threading.Thread]:
    """Threads of this package, which may still write to the run's files. Other packages may keep
    theirs for the next start."""
    return {
        thread
        for thread in threading.enumerate()
        if getattr(getattr(thread, "_target", None), "__module__", "").startswith("megafrontier")
    }


def _break_groups() -> None:
    if dist.is_initialized() and dist.get_backend() == "nccl":
        # torch has no public name for it.
        call_with_timeout(GIVE_UP_GROUPS, dist.distributed_c10d._abort_process_group)
    CONNECTIONS.shut_down()


_current: Survivor | None = None


def become_survivor(parent: socket.socket, is_alone: bool = False) -> Survivor:
    """Make this process a rank that can survive others. `parent`: the channel to its parent, which
    has other ranks unless `is_alone`."""
    global _current
    _current = Survivor(parent, is_alone)
    return _current


def current() -> Survivor | None:
    """This process as such a rank; None if it is none."""
    return _current
