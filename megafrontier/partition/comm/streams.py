"""Lanes: where the crossings of levels run, and in what order.

A lane runs tasks one after another in the order they were given, beside the computation. The
overlap policy says how many there are:

    none   no lane: every task runs at once, where it is given
    safe   one lane for all levels: one collective in flight at a time
    full   one lane a level: levels run side by side

Note on deadlock. Tasks are given in program order, which is the same on every rank, and a task
waits only for tasks given before it. So every lane of every rank sees the same row of collectives,
and some lane can always go on.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from megafrontier.parallel.hierarchy import CommArbiter

Policy = Literal["none", "safe", "full"]
Task = Callable[[], object]


class Ticket(Protocol):
    """The promise that a task will have run."""

    def wait(self) -> None:
        """Return when the task's results may be used here. Raises what the task raised."""
        ...


class Done:
    """The ticket of what has already happened."""

    def wait(self) -> None:
        """Return at once."""


DONE = Done()


class Lane(Protocol):
    """Runs tasks in order."""

    def run(self, task: Task, after: Ticket) -> Ticket:
        """Run `task` once `after` and all earlier tasks of this lane are done."""
        ...


class InlineLane:
    """Runs each task at once, in the caller."""

    def run(self, task: Task, after: Ticket) -> Ticket:
        """Run now."""
        after.wait()
        task()
        return DONE


class _ThreadTicket:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def settle(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


_Tasks = queue.SimpleQueue[tuple[Task, Ticket, _ThreadTicket] | None]


class ThreadLane:
    """A thread that runs the tasks; collectives on a CPU block without holding Python's lock.

    After an error it runs nothing more: the ranks no longer agree on what comes next, and every
    later ticket raises the same error.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: _Tasks = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, task: Task, after: Ticket) -> Ticket:
        """Queue the task."""
        if self._thread is None:
            # A daemon: a rank whose peer is gone must be able to end while a collective hangs.
            self._thread = threading.Thread(
                target=_work, args=(self._tasks,), name=self._name, daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None)  # which ends it
        ticket = _ThreadTicket()
        self._tasks.put((task, after, ticket))
        return ticket


def _work(tasks: _Tasks) -> None:
    """Run tasks until None comes. It knows the queue only: a lane that nobody has any more ends."""
    error: BaseException | None = None
    while (given := tasks.get()) is not None:
        task, after, ticket = given
        if error is None:
            try:
                after.wait()
                task()
            except BaseException as raised:
                error = raised
        ticket.settle(error)
        del given, task, after, ticket  # or the tensors in them would live until the next task


class _StreamTicket:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class StreamLane:
    """A device stream (CUDA or ROCm): the caller only enqueues."""

    def __init__(self, device: torch.device) -> None:
        # Its small kernels come first, or each would wait behind a matrix product's. ROCm only has
        # one more queue on the same hardware for that, with no priority (ROCm/rocm-systems#8485).
        self._stream = torch.cuda.Stream(device, priority=0 if torch.version.hip else -1)

    def run(self, task: Task, after: Ticket) -> Ticket:
        """Enqueue behind what the calling stream has been given so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            after.wait()
            task()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _StreamTicket(event)


class Lanes:
    """The lanes of a policy, by number. Those of other engines use the same groups, in `turn`."""

    def __init__(
        self, policy: Policy, levels: int, device: torch.device, turn: CommArbiter
    ) -> None:
        self._turn = turn
        self._newest: dict[int, Ticket] = {}
        if policy == "full":
            self._lanes = [_make_lane(f"level-{i}", device) for i in range(levels)]
        else:
            self._lanes = [InlineLane() if policy == "none" else _make_lane("levels", device)]

    def number(self, level: int) -> int:
        """The lane of a level."""
        return min(level, len(self._lanes) - 1)

    def run(self, number: int, task: Task, after: Ticket) -> Ticket:
        """Run `task` on a lane after `after`."""
        self._turn.acquire(self)
        self._newest[number] = ticket = self._lanes[number].run(task, after)
        return ticket

    def outlive(self, owner: object) -> None:
        """When `owner` is garbage-collected, have the computation wait for all lanes: torch would
        hand out memory again that a stream still uses. (Threads hold references to theirs.)"""
        if any(isinstance(lane, StreamLane) for lane in self._lanes):
            weakref.finalize(owner, self.drain).atexit = False

    def drain(self) -> None:
        """Return when all that was given is done. Raises what a task raised, the first time."""
        newest, self._newest = self._newest, {}
        for ticket in newest.values():
            ticket.wait()


def _make_lane(name: str, device: torch.device) -> Lane:
    return StreamLane(device) if device.type == "cuda" else ThreadLane(name)
