"""Stop a run that has ceased to learn: too many non-finite steps in a row."""

from megafrontier.errors import RunFailed
from megafrontier.training.callback import Callback
from megafrontier.training.loop import StepResult
from megafrontier.training.trainer import Trainer


class Guard(Callback):
    """Counts skipped steps; raises RunFailed, on every rank alike, at the configured number."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        trainer.skipped_in_a_row = trainer.skipped_in_a_row + 1 if result.skipped else 0
        limit = trainer.config.train.nonfinite_limit
        if trainer.skipped_in_a_row >= limit:
            first, last = result.samples
            raise RunFailed(
                f"step {result.step}: the last {limit} steps had a non-finite loss or gradient "
                f"(train.nonfinite_limit), the newest with samples {first} to {last - 1}"
            )
