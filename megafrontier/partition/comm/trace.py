"""A timeline of one rank in Chrome's trace format: one row a level, one for waiting."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WAITING = "waiting"
LARGEST = 200_000
"""Events kept, so that a long run does not fill the memory; later ones are only counted."""


class Trace:
    """Collects what the ledger times; open the file in chrome://tracing or ui.perfetto.dev."""

    left_out = 0
    """Events that came after the LARGEST number."""

    def __init__(self, rows: Sequence[str]) -> None:
        self._rows = {name: number for number, name in enumerate((WAITING, *rows))}
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, row: str, label: str, start_seconds: float, seconds: float) -> None:
        """One bar, from `start_seconds` of any fixed clock."""
        event = {
            "name": label,
            "ph": "X",
            "pid": 0,
            "tid": self._rows[row],
            "ts": start_seconds * 1e6,
            "dur": seconds * 1e6,
        }
        with self._lock:
            if len(self._events) < LARGEST:
                self._events.append(event)
            else:
                self.left_out += 1

    def write(self, path: Path) -> None:
        """Write the file."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": row}}
            for row, number in self._rows.items()
        ]
        path.write_text(json.dumps({"traceEvents": [*names, *self._events]}))
