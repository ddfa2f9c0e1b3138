"""How far long work is, on stderr."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from megafrontier.common.errors import print_error

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 10.0
_SECONDS_ON_TERMINAL = 0.1
_BAR_WIDTH = 20
_LOST = OSError, ValueError
"""What writing raises if the terminal is gone. The work goes on."""


class Progress:
    """Says how far some work is: on a terminal in a bar that is deleted at the end, elsewhere, or
    without the package rich, in a line every `SECONDS_BETWEEN_LINES`.

    work: what the bar, or each line, begins with.
    """

    def __init__(self, work: str) -> None:
        self._work = work
        self._bar = _make_bar()
        self._started = self._last = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with suppress(*_LOST):
                self._bar.stop()

    def __call__(self, text: str, done: float | None = None) -> None:
        """Show `text`, unless something was shown a moment ago. `done`: the fraction of the work,
        for the bar and the time that is left."""
        now = time.monotonic()
        pause = SECONDS_BETWEEN_LINES if self._bar is None else _SECONDS_ON_TERMINAL
        if now - self._last < pause:
            return
        self._last = now
        if done:
            text += f", {_duration((now - self._started) * (1 - done) / done)} left"
        if self._bar is None:
            print_error(f"{self._work}: {text}")
        else:
            with suppress(*_LOST):
                self._draw(self._bar, text, done)

    def note(self, line: str) -> None:
        """Print a line that stays."""
        if self._bar is None:
            print_error(line)
        else:
            with suppress(*_LOST):
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _draw(self, bar: "Bar", text: str, done: float | None) -> None:
        text = text[: max(0, bar.console.width - len(self._work) - _BAR_WIDTH - 2)]
        if not bar.tasks:
            bar.add_task(self._work, text=text)
        total = None if done is None else 1.0
        bar.update(bar.task_ids[0], total=total, completed=done or 0, text=text)
        bar.start()  # does nothing if it runs
        bar.refresh()


def _make_bar() -> "Bar | None":
    """A bar of rich for the terminal on stderr; None if there is no terminal, or no rich."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
    except ModuleNotFoundError:  # the extra `train` brings it
        return None
    console = Console(stderr=True)
    if console.is_dumb_terminal:
        return None
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(_BAR_WIDTH),
        TextColumn("{task.fields[text]}", markup=False),
        console=console,
        auto_refresh=False,  # its thread would be lost in the processes that commands fork
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@contextmanager
def track(work: str, items: Iterable[T], total: int, unit: str) -> Iterator[Iterator[T]]:
    """The `total` items, one by one, while a `Progress` shows how many of them are done."""
    with Progress(work) as progress:

        def shown() -> Iterator[T]:
            for done, item in enumerate(items):
                progress(f"{done} of {total} {unit}", done / total)
                yield item

        yield shown()
