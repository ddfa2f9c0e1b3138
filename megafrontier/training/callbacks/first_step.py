"""What a failure has cost is known when the start after it has finished its first step."""

from megafrontier.training.callbacks.base import Callback
from megafrontier.training.resume.restarts import StartRecord
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer


class FirstStep(Callback):
    """Records the first step that a start finishes. `resumed`: the step that it went on from."""

    def __init__(self, record: StartRecord, resumed: int) -> None:
        self._record, self._resumed = record, resumed

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == self._resumed + 1:
            self._record.finish_first_step(result.step, self._resumed, result.seconds)
