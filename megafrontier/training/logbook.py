"""The run's own record: metrics to the sinks and the progress line, remarks to log.txt."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megafrontier.config import Config
from megafrontier.errors import UserError
from megafrontier.training.callback import Callback
from megafrontier.training.loop import StepResult
from megafrontier.training.metrics import step_metrics
from megafrontier.training.progress import Progress
from megafrontier.training.sinks import Sink, open_sinks
from megafrontier.training.trainer import Trainer


class Logbook:
    """Takes metrics and remarks; on all ranks but the first it keeps nothing."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._sinks: list[Sink] = []

    def open_sinks(self, config: Config, resume_step: int) -> None:
        """Begin to keep metrics, after `resume_step`."""
        if self._progress is not None:
            self._sinks = open_sinks(config, Path(config.run.directory), resume_step)

    def write(self, values: dict[str, Any]) -> None:
        """Keep one line of metrics."""
        for sink in self._sinks:
            sink.write(values)
        if self._progress is not None:
            self._progress.update(values)

    def remark(self, line: str) -> None:
        """Tell the reader something that is not a number."""
        if self._progress is not None:
            self._progress.note(line)

    def close(self) -> None:
        """Flush everything."""
        for sink in self._sinks:
            sink.close()


@contextmanager
def open_logbook(config: Config, is_first: bool) -> Iterator[Logbook]:
    """The logbook of a run directory. Raises UserError when that cannot be written."""
    if not is_first:
        yield Logbook(None)
        return
    folder = Path(config.run.directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / "log.txt").open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"run.directory: {folder}: {error.strerror}, need a folder to write"
        ) from error
    with log, Progress(config.train.steps, sys.stdout, config.log.every, log) as progress:
        logbook = Logbook(progress)
        try:
            yield logbook
        finally:
            logbook.close()


class Log(Callback):
    """Write every step's metrics."""

    def __init__(self, logbook: Logbook) -> None:
        self._logbook = logbook

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._logbook.write(step_metrics(trainer, result))
