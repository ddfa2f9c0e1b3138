"""The run's own record: metrics to the sinks and the progress line, remarks to log.txt."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from megafrontier.common.errors import as_run_directory_error
from megafrontier.config import Config
from megafrontier.training.logging.progress import Progress
from megafrontier.training.logging.sinks import JsonLines, Sink, open_sinks


class RunLogger:
    """Takes metrics and remarks; on all ranks but the first it keeps nothing.

    A full disk costs lines, not the run: what cannot be written is reported once for each place.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._sinks: list[Sink] = []
        self._failed: set[str] = set()

    def open_sinks(self, config: Config, resume_step: int) -> None:
        """Begin to keep metrics, after `resume_step`."""
        if self._progress is not None:
            directory = Path(config.run.directory)
            self._sinks = open_sinks(config, directory, resume_step, self.info)

    def write(self, values: dict[str, Any], **shown: float) -> None:
        """Keep one line of metrics; what is `shown` the progress line has beside."""
        for sink in self._sinks:
            self._attempt(sink, partial(sink.write, values))
        if self._progress is not None:
            self._progress.update(values | shown)

    def sync(self) -> None:
        """Bring the metrics so far to the disk."""
        for sink in self._sinks:
            if isinstance(sink, JsonLines):
                self._attempt(sink, sink.sync)

    def info(self, line: str) -> None:
        """Tell the reader something that is not a number."""
        if self._progress is not None:
            self._progress.note(line)

    def close(self) -> None:
        """Flush everything."""
        for sink in self._sinks:
            self._attempt(sink, sink.close)

    def _attempt(self, sink: Sink, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            # What others' packages raise, when their process is gone, say, is not known.
            if isinstance(sink, JsonLines) and not isinstance(error, OSError):
                raise
            if sink.name not in self._failed:
                self._failed.add(sink.name)
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                said = " ".join(why.split())
                self.info(f"warning: metrics are not written to {sink.name}: {said}")


@contextmanager
def open_run_logger(config: Config, is_first: bool) -> Iterator[RunLogger]:
    """The logbook of a run directory. Raises UserError when that cannot be written."""
    if not is_first:
        yield RunLogger(None)
        return
    with (
        _open_log(config) as log,
        Progress(
            config.train.steps, sys.stdout, config.log.every, log, config.train.stop_at
        ) as progress,
        closing(RunLogger(progress)) as run_logger,
    ):
        yield run_logger


def check_directory(config: Config) -> None:
    """Raises UserError when the run directory cannot be written."""
    with _open_log(config):
        pass


@contextmanager
def _open_log(config: Config) -> Iterator[TextIO]:
    folder = Path(config.run.directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / "log.txt").open("a", encoding="utf-8")
    except OSError as error:
        # Perhaps not of the folder: of another user's log in it.
        raise as_run_directory_error(error, error.filename) from error
    try:
        yield log
    finally:
        with suppress(OSError):  # what a full disk has kept back
            log.close()
