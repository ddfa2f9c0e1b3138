"""The ledger: bytes this rank sent and seconds its collectives took, per level."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megafrontier.partition.comm.trace import WAITING, Trace

MOST_EVENTS = 20_000
"""On a GPU, crossings and waits that have not been read: several times those of a large step."""


class Ledger:
    """Counts what the moves hand to the collectives until `take` empties it."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._device = device
        self._lock = threading.Lock()  # crossings end on the lanes' threads
        self.trace: Trace | None = None
        self._events: list[tuple[int, str, Any, Any]] = []
        # Per level the newest crossing's label, begin, and event or word that it is over.
        self._newest: list[tuple[str, float, Any]] = [("none", 0.0, True)] * len(self.names)
        if device.type == "cuda":
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._began = time.perf_counter()
        self._thread = threading.get_ident()
        self._is_waiting = False
        self._waited = 0.0
        self._waits: list[tuple[str, Any, Any]] = []
        self._clear()

    def _clear(self) -> None:
        self._bytes = [0] * len(self.names)
        self._seconds = [0.0] * len(self.names)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what crosses meanwhile: it belongs to no training step. Nothing may be under
        way at either end."""
        kept, waited = self.take(wait=True), self.take_waited(wait=True)
        try:
            yield
        finally:
            self.take(wait=True)
            self.take_waited(wait=True)
            (self._bytes, self._seconds), self._waited = kept, waited

    @contextmanager
    def crossing(self, level: int, label: str) -> Iterator[list[int]]:
        """Time one collective over `level`; the caller appends the bytes it sent. `label` names it
        in the trace."""
        sent: list[int] = []
        called = time.perf_counter()
        self._newest[level] = label, called, False
        if self._device.type == "cuda":
            # Events mark the stream without stopping it; they are read when the step is over.
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield sent
            stop.record()
            self._newest[level] = label, called, stop
            with self._lock:
                self._events.append((level, label, start, stop))
            if self._is_exposed():
                self._waits.append((label, start, stop))
            self._bound()
        else:
            yield sent
            self._newest[level] = label, called, True
            seconds = time.perf_counter() - called
            self._note(level, label, called, seconds)
            if self._is_exposed():
                self._note_wait(label, called, seconds)
        with self._lock:
            self._bytes[level] += sum(sent)

    def last(self) -> dict[str, str]:
        """In words, the crossing that each level is at: for a run that hangs, from any thread.

        On a GPU it is the oldest that is not over, for the host may have given it many more since;
        `waiting` is one that the device has not come to, behind one of another level.
        """
        now = time.perf_counter()
        found = {
            name: f"{label}, {'done' if _is_over(end) else f'in flight for {now - begin:.1f} s'}"
            for name, (label, begin, end) in zip(self.names, self._newest, strict=True)
        }
        # A copy, and without the lock: who holds it may be waiting for the device.
        for level, label, start, stop in reversed(list(self._events)):
            if not stop.query():
                found[self.names[level]] = f"{label}, {'in flight' if start.query() else 'waiting'}"
        return found

    def _note(self, level: int, label: str, begin: float, seconds: float) -> None:
        with self._lock:
            self._seconds[level] += seconds
        if self.trace is not None:
            self.trace.add(self.names[level], label, begin, seconds)

    def _is_exposed(self) -> bool:
        """Whether a crossing runs where the computation does, and not within `waiting` already."""
        if self._is_waiting:
            return False
        if self._device.type == "cuda":
            computing = torch.cuda.default_stream(self._device)
            return bool(torch.cuda.current_stream(self._device) == computing)
        return threading.get_ident() == self._thread

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """The computation waits for a move: exposed communication. On a GPU the host does not
        wait; there events show how long the computing stream stood still."""
        self._is_waiting = True
        begin = time.perf_counter()
        if self._device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._waits.append((label, start, stop))
            self._bound()
        else:
            yield
            self._note_wait(label, begin, time.perf_counter() - begin)
        self._is_waiting = False

    def _note_wait(self, label: str, begin: float, seconds: float) -> None:
        self._waited += seconds
        if self.trace is not None:
            self.trace.add(WAITING, label, begin, seconds)

    def _bound(self) -> None:
        """Let events go in a loop of one's own that never takes."""
        if len(self._events) + len(self._waits) > MOST_EVENTS:
            self._read_events()
            self._read_waits()

    def take_waited(self, wait: bool = False) -> float:
        """Seconds that the computation waited for others since the last call; as `take`."""
        self._read_waits(wait)
        waited, self._waited = self._waited, 0.0
        return waited

    def _read_waits(self, wait: bool = False) -> None:
        waits, self._waits = _split_over(self._waits, wait)
        for label, start, stop in waits:
            self._note_wait(label, *self._span(start, stop))

    def take(self, wait: bool = False) -> tuple[list[int], list[float]]:
        """(bytes, seconds) per level since the last call.

        What is under way on a lane counts where it ends: a publication that runs under the next
        forward belongs to the next step. So do on a GPU the seconds of what is still under way
        there, unless asked to `wait` for it.
        """
        self._read_events(wait)
        with self._lock:
            taken = self._bytes, self._seconds
            self._clear()
        return taken

    def _read_events(self, wait: bool = False) -> None:
        with self._lock:
            events, self._events = _split_over(self._events, wait)
        for level, label, start, stop in events:
            self._note(level, label, *self._span(start, stop))

    def _span(self, start: Any, stop: Any) -> tuple[float, float]:
        """(begin, seconds) of two events of a device, by the host's clock."""
        begin = self._began + self._origin.elapsed_time(start) / 1000
        return begin, start.elapsed_time(stop) / 1000


def _split_over(events: list[Any], wait: bool) -> tuple[list[Any], list[Any]]:
    """Those whose last member, a GPU's event, is over, and the others; with `wait` all are."""
    over: list[Any] = []
    left: list[Any] = []
    for event in events:
        if wait:
            event[-1].synchronize()
        (over if event[-1].query() else left).append(event)
    return over, left


def _is_over(end: Any) -> bool:
    return end if isinstance(end, bool) else end.query()
