"""The first rank's timeline, written when the run ends."""

from pathlib import Path

from megafrontier.partition.comm.trace import Trace
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.trainer import Trainer


class TraceWriter(Callback):
    """Hangs a trace on the ledger of a run that asks for one, and writes it to trace.json."""

    def __init__(self, trainer: Trainer, run_logger: RunLogger) -> None:
        self._run_logger = run_logger
        self._trace: Trace | None = None
        if trainer.config.log.trace and trainer.is_first:
            ledger = trainer.engine.ledger
            self._trace = ledger.trace = Trace(ledger.names)

    def at_end(self, trainer: Trainer) -> None:
        if not trainer.config.log.trace:
            return
        trainer.engine.finish_publishing()  # by all ranks: the last step's ends with it
        if self._trace is None:
            return
        trainer.engine.ledger.take(wait=True)  # what a device has still to tell
        trainer.engine.ledger.take_waited(wait=True)
        path = Path(trainer.config.run.directory) / "trace.json"
        try:
            self._trace.write(path)
        except OSError as error:  # after the run has been saved
            self._run_logger.info(f"warning: {path} is not written: {error.strerror}")
            return
        if self._trace.left_out:
            self._run_logger.info(
                f"{path} ends before the run: {self._trace.left_out} bars too many"
            )
