"""How a long pass over text is going: a bar on a terminal, now and then a line elsewhere."""

import sys
import time
from typing import Any, Self

from megafrontier.common.errors import print_error

_LINE_SECONDS = 10.0
_SHOWN = 10  # bad texts told one by one


class Progress:
    """Shows bytes read of `total_bytes`, MB/s of text and tokens/s on standard error."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._start = self._last = time.monotonic()
        self._bad = 0
        self._bar = _bar() if sys.stderr.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total_bytes, rates="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._bad > _SHOWN:
            print_error(f"… and {self._bad - _SHOWN} more skipped")

    def update(self, done_bytes: int, text_bytes: int, tokens: int) -> None:
        """Tell bytes read from disk, and bytes of text and tokens made of them, all so far."""
        now = time.monotonic()
        seconds = max(now - self._start, 1e-9)
        rates = f"{text_bytes / 1e6 / seconds:.2f} MB/s, {tokens / seconds:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes, rates=rates)
        elif now - self._last >= _LINE_SECONDS:
            self._last = now
            print_error(f"{done_bytes / 1e6:.1f} of {self._total / 1e6:.1f} MB read, {rates}")

    def skipped(self, message: str) -> None:
        """Tell of a bad text; after a few they are only counted."""
        self._bad += 1
        if self._bad <= _SHOWN:
            (self._bar.console.print if self._bar is not None else print_error)(
                f"skipped {message}"
            )


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [DownloadColumn(), BarColumn(), TextColumn("{task.fields[rates]}")]
    console = Console(stderr=True, markup=False, highlight=False)
    return Progress(*columns, TimeRemainingColumn(), console=console)
