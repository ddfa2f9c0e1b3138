"""The ledger: bytes this rank sent and seconds its collectives took, per level."""

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
        self._bytes = [0] * len(self.names)
        self._seconds = [0.0] * len(self.names)
        self._events: list[tuple[int, Any, Any]] = []

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
            self._events.append((level, start, stop))
        else:
            begin = time.perf_counter()
            yield sent
            self._seconds[level] += time.perf_counter() - begin
        self._bytes[level] += sum(sent)

    def take(self) -> tuple[list[int], list[float]]:
        """(bytes, seconds) per level since the last call. On a GPU, after it has been waited for:
        reading an event that has not happened waits for it."""
        for level, start, stop in self._events:
            stop.synchronize()
            self._seconds[level] += start.elapsed_time(stop) / 1000
        taken = self._bytes, self._seconds
        self._events = []
        self._bytes = [0] * len(self.names)
        self._seconds = [0.0] * len(self.names)
        return taken
