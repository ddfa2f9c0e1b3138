"""The ledger: bytes that this rank sent and seconds that its collectives took, by level and kind.

It also measures how long the computation waited, and can record everything as a trace.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

import torch

TrafficKind = Literal["weights", "gradients", "activations", "tokens"]
"""What a collective moves. `gradients`: of parameters, and what an optimizer makes of them.
`activations`: hidden states, keys and values, statistics of the loss, and the gradients of all
these. `tokens`: what expert parallelism dispatches and combines."""

KINDS: tuple[TrafficKind, ...] = get_args(TrafficKind)
_Row = tuple[int, TrafficKind] | None
"""What was timed: a collective over a level, or None: the computation waited."""

MAX_PENDING_EVENTS = 20_000
"""Timed spans on a device that have not been read: several times those of a large step."""

MAX_TRACE_EVENTS = 200_000
"""Events in a trace, so that a long run does not fill the memory. Later ones are only counted."""

WAITING = "waiting"
"""The row of a trace that shows when the computation waited."""


@dataclass
class Traffic:
    """The collectives of one kind over one level."""

    bytes: int = 0
    """Sent by this rank."""
    seconds: float = 0.0
    """Spent in the collectives."""
    hidden: float = 0.0
    """The part of `seconds` during which the computation did not wait, for these collectives or for
    any other one."""

    def add(self, sent: int, seconds: float, hidden: float) -> None:
        """Count a collective."""
        self.bytes += sent
        self.seconds += seconds
        self.hidden += hidden


class Ledger:
    """Counts the collectives of an engine until `take` and `take_waited` reset the counts."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """`names`: those of the levels."""
        self.names = tuple(names)
        self.trace: Trace | None = None
        self._device = device
        self._lock = threading.Lock()  # collectives end on the threads of streams
        # (what was timed, its label, first event, last event)
        self._events: list[tuple[_Row, str, Any, Any]] = []
        # Per level, the newest collective: its label, when it began, and whether it is over, as a
        # bool or as an event.
        self._newest: list[tuple[str, float, Any]] = [("none", 0.0, True)] * len(self.names)
        if device.type == "cuda":
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._began = time.perf_counter()
        self._thread = threading.get_ident()
        self._is_waiting = False
        self._label = ""
        """What the host waits for."""
        self._waited = 0.0
        self._waits = _Waits()
        self._counts = self._zeros()

    def add_level(self, name: str) -> int:
        """Count one more level, whose messages are not collectives of the engine. Returns its
        number."""
        self.names = (*self.names, name)
        self._newest.append(("none", 0.0, True))
        self._counts.append({kind: Traffic() for kind in KINDS})
        return len(self.names) - 1

    def count(self, level: int, kind: TrafficKind, sent: int) -> None:
        """Count a message of `sent` bytes whose seconds are not measured."""
        with self._lock:
            self._counts[level][kind].bytes += sent

    def _zeros(self) -> list[dict[TrafficKind, Traffic]]:
        return [{kind: Traffic() for kind in KINDS} for _ in self.names]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count collectives inside, because they belong to no training step. No collective
        may be in flight at either end."""
        kept, waited = self.take_kinds(wait=True), self.take_waited(wait=True)
        try:
            yield
        finally:
            self.take_kinds(wait=True)
            self.take_waited(wait=True)
            self._counts, self._waited = kept, waited

    @contextmanager
    def collective(self, level: int, label: str, kind: TrafficKind) -> Iterator[list[int]]:
        """Time one collective over `level`. The caller appends the bytes that it sent to the list.
        `label` names the collective in traces and reports."""
        sent: list[int] = []
        begin, row, is_exposed = time.perf_counter(), (level, kind), self._is_exposed()
        self._newest[level] = label, begin, False
        self._label = label if is_exposed else self._label
        with self._timed(label, [None, row] if is_exposed else [row]) as end:
            yield sent
        self._label = "" if is_exposed else self._label
        self._newest[level] = label, begin, end
        with self._lock:
            self._counts[level][kind].bytes += sum(sent)

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """Time how long the computation waits for a collective. On a GPU the host does not wait;
        events measure how long the computation's stream stands still."""
        self._is_waiting, self._label = True, label
        if self._device.type != "cuda":
            with self._lock:
                self._waits.begin(time.perf_counter())
        with self._timed(label, [None]):
            yield
        self._is_waiting, self._label = False, ""

    def waits_for(self) -> str:
        """The label of what the computation waits for, if it does; from any thread."""
        if self._device.type != "cuda":
            return self._label
        return next(
            (
                label
                for row, label, start, stop in list(self._events)
                if row is None and not stop.query() and start.query()
            ),
            "",
        )

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
        for row, label, start, stop in reversed(list(self._events)):
            if row is not None and not stop.query():
                state = "in flight" if start.query() else "waiting"
                found[self.names[row[0]]] = f"{label}, {state}"
        return found

    def take(self, wait: bool = False) -> tuple[list[int], list[float]]:
        """(bytes, seconds) per level since the last call.

        A collective counts when it ends: a publication that overlaps with the next forward belongs
        to the next step. On a GPU, bytes count when the collective is enqueued, and seconds only
        when it has ended, unless `wait` makes the host wait for it.
        """
        levels = [kinds.values() for kinds in self.take_kinds(wait)]
        sent = [sum(traffic.bytes for traffic in kinds) for kinds in levels]
        return sent, [sum(traffic.seconds for traffic in kinds) for kinds in levels]

    def take_kinds(self, wait: bool = False) -> list[dict[TrafficKind, Traffic]]:
        """`take`, with all kinds of each level."""
        self._read_events(wait)
        with self._lock:
            taken, self._counts = self._counts, self._zeros()
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
    def _timed(self, label: str, rows: Sequence[_Row]) -> Iterator[Any]:
        """Time what runs inside for each of `rows`. Yields True or an event: whether it is over,
        afterwards."""
        if self._device.type == "cuda":
            # Events mark the stream without stopping it. They are read when the step is over.
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield stop
            stop.record()
            with self._lock:
                self._events += [(row, label, start, stop) for row in rows]
            if len(self._events) > MAX_PENDING_EVENTS:  # a loop that never calls `take`
                self._read_events()
        else:
            begin = time.perf_counter()
            yield True
            seconds = time.perf_counter() - begin
            for row in rows:
                self._count(row, label, begin, seconds)
            with self._lock:
                self._waits.forget(min(self._begins_in_flight(), default=begin + seconds))

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
        begun = [(row, self._time_of(start)) for row, _, start, _ in pending if start.query()]
        # Waits first, because the hidden part of a collective follows from them.
        for row, label, start, stop in sorted(over, key=lambda event: event[0] is not None):
            self._count(row, label, self._time_of(start), start.elapsed_time(stop) / 1000, begun)
        with self._lock:
            self._waits.forget(min((t for row, t in begun if row is not None), default=inf))

    def _time_of(self, event: Any) -> float:
        return self._began + self._origin.elapsed_time(event) / 1000

    def _begins_in_flight(self) -> Iterator[float]:
        return (begin for _, begin, end in self._newest if end is False)

    def _count(
        self,
        row: _Row,
        label: str,
        begin: float,
        seconds: float,
        begun: Sequence[tuple[_Row, float]] = (),
    ) -> None:
        """`begun`: what goes on, on a device, and since when."""
        with self._lock:
            if row is None:
                self._waited += seconds
                self._waits.end(begin, begin + seconds)
            else:
                level, kind = row
                since = [start for waits, start in begun if waits is None]
                waited = self._waits.within(begin, begin + seconds, since)
                self._counts[level][kind].add(0, seconds, max(0.0, seconds - waited))
        if self.trace is not None:
            name, about = (WAITING, WAITING) if row is None else (self.names[row[0]], row[1])
            self.trace.add(name, label, begin, seconds, about)


class _Waits:
    """When the computation waited, as far as a collective in flight may have to know it."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque()
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """The computation begins to wait."""
        self._since = now

    def end(self, begin: float, end: float) -> None:
        """The computation has waited from `begin` to `end`."""
        self._spans.append((begin, end))
        self._since = None

    def within(self, begin: float, end: float, since: Sequence[float] = ()) -> float:
        """Seconds between `begin` and `end`, which is past, during which the computation waited.
        `since`: when waits began that go on."""
        waiting = [*since] if self._since is None else [*since, self._since]
        total = sum(max(0.0, end - max(start, begin)) for start in waiting)
        for start, stop in reversed(self._spans):
            if stop <= begin:
                break
            total += max(0.0, min(stop, end) - max(start, begin))
        return total

    def forget(self, before: float) -> None:
        """Forget the waits that were over `before`."""
        while self._spans and self._spans[0][1] <= before:
            self._spans.popleft()


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

    def add(
        self, row: str, label: str, start_seconds: float, seconds: float, category: str
    ) -> None:
        """Add a bar. `start_seconds` may be of any clock, the same for all bars."""
        event = {
            "name": label,
            "cat": category,
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
