"""The ledger: bytes this rank sent and seconds its collectives took, per level."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Ledger:
    """Counts what the moves hand to the collectives until `take` empties it."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._device = device
        self._lock = threading.Lock()  # crossings end on the lanes' threads
        self._clear()

    def _clear(self) -> None:
        self._bytes = [0] * len(self.names)
        self._seconds = [0.0] * len(self.names)
        self._events: list[tuple[int, Any, Any]] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what crosses meanwhile: it belongs to no training step. Nothing may be under
        way at either end."""
        kept = self._bytes, self._seconds, self._events
        self._clear()
        try:
            yield
        finally:
            self.take()
            self._bytes, self._seconds, self._events = kept

    @contextmanager
    def crossing(self, level: int) -> Iterator[list[int]]:
        """Time one collective over `level`; the caller appends the bytes it sent."""
        sent: list[int] = []
        if self._device.type == "cuda":
            # Events mark the stream without stopping it; they are read when the step is over.
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield sent
            stop.record()
            with self._lock:
                self._events.append((level, start, stop))
                self._bytes[level] += sum(sent)
            return
        begin = time.perf_counter()
        yield sent
        with self._lock:
            self._seconds[level] += time.perf_counter() - begin
            self._bytes[level] += sum(sent)

    def take(self) -> tuple[list[int], list[float]]:
        """(bytes, seconds) per level since the last call.

        What is under way on a lane counts where it ends: a publication that runs under the next
        forward belongs to the next step. On a GPU reading an event waits for it.
        """
        with self._lock:
            sent, seconds, events = self._bytes, self._seconds, self._events
            self._clear()
        for level, start, stop in events:
            stop.synchronize()
            seconds[level] += start.elapsed_time(stop) / 1000
        return sent, seconds
