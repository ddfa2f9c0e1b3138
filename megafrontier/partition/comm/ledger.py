"""The ledger: bytes that this rank sent and seconds that its collectives took, per level.

It also measures how long the computation waited, and can record everything as a trace.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

MAX_PENDING_EVENTS = 20_000
"""Timed spans on a device that have not been read: several times those of a large step."""

MAX_TRACE_EVENTS = 200_000
"""Events in a trace, so that a long run does not fill the memory. Later ones are only counted."""

WAITING = "waiting"
"""The row of a trace that shows when the computation waited."""


class Ledger:
    """Counts the collectives of an engine until `take` and `take_waited` reset the counts."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """`names`: those of the levels."""
        self.names = tuple(names)
        self.trace: Trace | None = None
        self._device = device
        self._lock = threading.Lock()  # collectives end on the threads of streams
        # (level, None while the computation waits; label; first event; last event)
        self._events: list[tuple[int | None, str, Any, Any]] = []
        # Per level, the newest collective: its label, when it began, and whether it is over, as a
        # bool or as an event.
        self._newest: list[tuple[str, float, Any]] = [("none", 0.0, True)] * len(self.names)
        if device.type == "cuda":
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._began = time.perf_counter()
        self._thread = threading.get_ident()
        self._is_waiting = False
        self._waited = 0.0
        self._clear()

    def _clear(self) -> None:
        self._bytes = [0] * len(self.names)
        self._seconds = [0.0] * len(self.names)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count collectives inside, because they belong to no training step. No collective
        may be in flight at either end."""
        kept, waited = self.take(wait=True), self.take_waited(wait=True)
        try:
            yield
        finally:
            self.take(wait=True)
            self.take_waited(wait=True)
            (self._bytes, self._seconds), self._waited = kept, waited

    @contextmanager
    def collective(self, level: int, label: str) -> Iterator[list[int]]:
        """Time one collective over `level`. The caller appends the bytes that it sent to the list.
        `label` names the collective in traces and reports."""
        sent: list[int] = []
        begin = time.perf_counter()
        self._newest[level] = label, begin, False
        with self._timed(label, [level, None] if self._is_exposed() else [level]) as end:
            yield sent
        self._newest[level] = label, begin, end
        with self._lock:
            self._bytes[level] += sum(sent)

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """Time how long the computation waits for a collective. On a GPU the host does not wait;
        events measure how long the computation's stream stands still."""
        self._is_waiting = True
        with self._timed(label, [None]):
            yield
        self._is_waiting = False

    def last(self) -> dict[str, str]:
        """Describe the current collective of each level, for a run that hangs; from any thread.

        On a GPU it is the oldest one in flight, because the host may have enqueued many more. It is
        "waiting" if the device has not started it yet.
        """
        now = time.perf_counter()
        found = {
            name: f"{label}, {'done' if _is_over(end) else f'in flight for {now - begin:.1f} s'}"
            for name, (label, begin, end) in zip(self.names, self._newest, strict=True)
        }
        # A copy, without the lock: its holder may be waiting for the device.
        for level, label, start, stop in reversed(list(self._events)):
            if level is not None and not stop.query():
                found[self.names[level]] = f"{label}, {'in flight' if start.query() else 'waiting'}"
        return found

    def take(self, wait: bool = False) -> tuple[list[int], list[float]]:
        """(bytes, seconds) per level since the last call.

        A collective counts when it ends: a publication that overlaps with the next forward belongs
        to the next step. On a GPU, bytes count when the collective is enqueued, and seconds only
        when it has ended, unless `wait` makes the host wait for it.
        """
        self._read_events(wait)
        with self._lock:
            taken = self._bytes, self._seconds
            self._clear()
        return taken

    def take_waited(self, wait: bool = False) -> float:
        """Seconds that the computation waited for other ranks since the last call; `wait` as in
        `take`."""
        self._read_events(wait)
        waited, self._waited = self._waited, 0.0
        return waited

    def _is_exposed(self) -> bool:
        """Whether a collective runs where the computation runs, and not inside `waiting`."""
        if self._is_waiting:
            return False
        if self._device.type == "cuda":
            computing = torch.cuda.default_stream(self._device)
            return bool(torch.cuda.current_stream(self._device) == computing)
        return threading.get_ident() == self._thread

    @contextmanager
    def _timed(self, label: str, levels: Sequence[int | None]) -> Iterator[Any]:
        """Time what runs inside for each of `levels`. Yields True or an event: whether it is over,
        afterwards."""
        if self._device.type == "cuda":
            # Events mark the stream without stopping it. They are read when the step is over.
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield stop
            stop.record()
            with self._lock:
                self._events += [(level, label, start, stop) for level in levels]
            if len(self._events) > MAX_PENDING_EVENTS:  # a loop that never calls `take`
                self._read_events()
        else:
            begin = time.perf_counter()
            yield True
            seconds = time.perf_counter() - begin
            for level in levels:
                self._count(level, label, begin, seconds)

    def _read_events(self, wait: bool = False) -> None:
        """Count the spans that are over on the device; with `wait`, wait for all."""
        over: list[Any] = []
        pending: list[Any] = []
        with self._lock:
            for event in self._events:
                if wait:
                    event[-1].synchronize()
                (over if event[-1].query() else pending).append(event)
            self._events = pending
        for level, label, start, stop in over:
            begin = self._began + self._origin.elapsed_time(start) / 1000
            self._count(level, label, begin, start.elapsed_time(stop) / 1000)

    def _count(self, level: int | None, label: str, begin: float, seconds: float) -> None:
        with self._lock:
            if level is None:
                self._waited += seconds
            else:
                self._seconds[level] += seconds
        if self.trace is not None:
            row = WAITING if level is None else self.names[level]
            self.trace.add(row, label, begin, seconds)


def _is_over(end: Any) -> bool:
    return end if isinstance(end, bool) else end.query()


class Trace:
    """A timeline of one rank in Chrome's trace format: one row per level, and one for waiting.

    Open the file in chrome://tracing or ui.perfetto.dev.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: those of the levels."""
        self._rows = {name: number for number, name in enumerate((WAITING, *names))}
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, row: str, label: str, start_seconds: float, seconds: float) -> None:
        """Add a bar. `start_seconds` may be of any clock, the same for all bars."""
        event = {
            "name": label,
            "ph": "X",
            "pid": 0,
            "tid": self._rows[row],
            "ts": start_seconds * 1e6,
            "dur": seconds * 1e6,
        }
        with self._lock:
            if len(self._events) < MAX_TRACE_EVENTS:
                self._events.append(event)

    def write(self, path: Path) -> None:
        """Write the trace as JSON."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": row}}
            for row, number in self._rows.items()
        ]
        path.write_text(json.dumps({"traceEvents": [*names, *self._events]}))
