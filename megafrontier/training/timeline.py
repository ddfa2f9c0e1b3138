"""The first rank's timeline, written when the run ends."""

from pathlib import Path

from megafrontier.partition.trace import Trace
from megafrontier.training.callback import Callback
from megafrontier.training.trainer import Trainer


class Timeline(Callback):
    """Hangs a trace on the ledger of a run that asks for one, and writes it to trace.json."""

    def __init__(self, trainer: Trainer) -> None:
        self._trace: Trace | None = None
        if trainer.config.log.trace and trainer.is_first:
            ledger = trainer.engine.ledger
            self._trace = ledger.trace = Trace(ledger.names)

    def at_end(self, trainer: Trainer) -> None:
        if self._trace is not None:
            self._trace.write(Path(trainer.config.run.directory) / "trace.json")
