"""The ledger: bytes this rank sent and seconds its collectives took, per level."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megafrontier.partition.trace import WAITING, Trace


class Ledger:
    """Counts what the moves hand to the collectives until `take` empties it."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._device = device
        self._lock = threading.Lock()  # crossings end on the lanes' threads
        self.trace: Trace | None = None
        self._events: list[tuple[int, str, Any, Any]] = []
        if device.type == "cuda":
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
        self._clear()

    def _clear(self) -> None:
        self._bytes = [0] * len(self.names)
        self._seconds = [0.0] * len(self.names)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what crosses meanwhile: it belongs to no training step. Nothing may be under
        way at either end."""
        kept = self.take()
        try:
            yield
        finally:
            self.take()
            self._bytes, self._seconds = kept

    @contextmanager
    def crossing(self, level: int, label: str) -> Iterator[list[int]]:
        """Time one collective over `level`; the caller appends the bytes it sent. `label` names it
        in the trace."""
        sent: list[int] = []
        if self._device.type == "cuda":
            # Events mark the stream without stopping it; they are read when the step is over.
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield sent
            stop.record()
            with self._lock:
                self._events.append((level, label, start, stop))
        else:
            begin = time.perf_counter()
            yield sent
            self._note(level, label, begin, time.perf_counter() - begin)
        with self._lock:
            self._bytes[level] += sum(sent)

    def _note(self, level: int, label: str, begin: float, seconds: float) -> None:
        with self._lock:
            self._seconds[level] += seconds
        if self.trace is not None:
            self.trace.add(self.names[level], label, begin, seconds)

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """The computation waits for a move: exposed communication. On a GPU the host does not
        wait, so there it is the gaps between kernels that show it."""
        begin = time.perf_counter()
        yield
        if self.trace is not None:
            self.trace.add(WAITING, label, begin, time.perf_counter() - begin)

    def take(self) -> tuple[list[int], list[float]]:
        """(bytes, seconds) per level since the last call.

        What is under way on a lane counts where it ends: a publication that runs under the next
        forward belongs to the next step. On a GPU reading an event waits for it.
        """
        with self._lock:
            events, self._events = self._events, []
        for level, label, start, stop in events:
            stop.synchronize()
            begin = self._origin.elapsed_time(start) / 1000
            self._note(level, label, begin, start.elapsed_time(stop) / 1000)
        with self._lock:
            taken = self._bytes, self._seconds
            self._clear()
        return taken
