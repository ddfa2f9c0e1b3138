"""How far long work is, on stderr."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from megafrontier.common.errors import print_error

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 10.0
_SECONDS_ON_TERMINAL = 0.1


class Progress:
    """Says how far some work is: on a terminal in one line that is drawn anew and deleted at the
    end, elsewhere in a line every `SECONDS_BETWEEN_LINES`.

    work: what each line begins with.
    """

    def __init__(self, work: str) -> None:
        self._work = work
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._started = self._last = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Delete the line on a terminal, before other output."""
        if self._is_terminal:
            self._draw("")

    def __call__(self, text: str, done: float | None = None) -> None:
        """Show `text`, unless a line was shown a moment ago. `done`: the fraction of the work, for
        the time that is left."""
        now = time.monotonic()
        pause = _SECONDS_ON_TERMINAL if self._is_terminal else SECONDS_BETWEEN_LINES
        if now - self._last < pause:
            return
        self._last = now
        line = f"{self._work}: {text}"
        if done:
            line += f", {_duration((now - self._started) * (1 - done) / done)} left"
        if self._is_terminal:
            self._draw(line)
        else:
            print_error(line)

    def _draw(self, line: str) -> None:
        # The cursor goes back to the start, so that other output replaces the line.
        with suppress(OSError, ValueError):  # the terminal is gone, the work goes on
            print(f"\r\033[K{line}\r", end="", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def track(work: str, items: Iterable[T], total: int, unit: str) -> Iterator[T]:
    """Yield the `total` items, and show how many of them are done."""
    with Progress(work) as progress:
        for done, item in enumerate(items):
            progress(f"{done} of {total} {unit}", done / total)
            yield item
