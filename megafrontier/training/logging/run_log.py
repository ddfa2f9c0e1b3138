"""The run's log: metrics go to the sinks and the progress line, other lines to log.txt."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from megafrontier.common.errors import as_run_directory_error
from megafrontier.config import Config
from megafrontier.training.logging.progress import ProgressLine
from megafrontier.training.logging.sinks import JsonLines, Sink, open_sinks


class RunLogger:
    """Writes metrics and log lines; without `progress`, on all ranks but the first, it writes
    nothing.

    If a disk is full, the run loses lines and goes on. That is reported once for each sink.
    """

    def __init__(self, progress: ProgressLine | None) -> None:
        self._progress = progress
        self._sinks: list[Sink] = []
        self._failed: set[str] = set()

    def open_sinks(self, config: Config, resume_step: int) -> None:
        """Write metrics from here on, those of the steps after `resume_step`."""
        if self._progress is not None:
            self._sinks = open_sinks(config, Path(config.run.directory), resume_step)

    def write(self, values: dict[str, Any], **shown: float) -> None:
        """Write one line of metrics. The progress line has `shown` as well."""
        for sink in self._sinks:
            self._attempt(sink, partial(sink.write, values))
        if self._progress is not None:
            self._progress.update(values | shown)

    def sync(self) -> None:
        """Flush the metrics so far to the disk."""
        for sink in self._sinks:
            if isinstance(sink, JsonLines):
                self._attempt(sink, sink.sync)

    def info(self, line: str) -> None:
        """Write one line for people, to the terminal and log.txt."""
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
            # Other packages may raise anything, for example if their process has ended.
            if sink.name not in self._failed:
                self._failed.add(sink.name)
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                reason = " ".join(reason.split())
                self.info(f"warning: metrics are not written to {sink.name}: {reason}")


@contextmanager
def open_run_logger(config: Config, is_first: bool) -> Iterator[RunLogger]:
    """The log of a run directory. Raises UserError if that cannot be written."""
    if not is_first:
        yield RunLogger(None)
        return
    train = config.train
    with _open_log(config) as log:
        progress = ProgressLine(train.steps, sys.stdout, config.log.every, log, train.stop_at)
        with closing(RunLogger(progress)) as run_logger:
            yield run_logger


def check_directory(config: Config) -> None:
    """Raises UserError if the run directory cannot be written."""
    with _open_log(config):
        pass


def check_parents(config: Config) -> None:
    """Raise UserError if a file lies where the run directory or a folder above it must be. Unlike
    `check_directory`, creates nothing."""
    folder = Path(config.run.directory)
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if nearest.exists() and not nearest.is_dir():
        number = errno.EEXIST if nearest == folder else errno.ENOTDIR
        raise as_run_directory_error(OSError(number, os.strerror(number)), folder)


@contextmanager
def _open_log(config: Config) -> Iterator[TextIO]:
    folder = Path(config.run.directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / "log.txt").open("a", encoding="utf-8")
    except OSError as error:
        # error.filename may be another user's log in that folder.
        raise as_run_directory_error(error, error.filename) from error
    try:
        yield log
    finally:
        with suppress(OSError):  # the disk may be full
            log.close()
