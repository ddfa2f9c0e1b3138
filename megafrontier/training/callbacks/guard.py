"""Tell of skipped steps, and stop a run that has ceased to learn: too many non-finite in a row."""

from megafrontier.common.errors import RunFailed
from megafrontier.data.sampling.loader import Loader
from megafrontier.optim.loss_scale import is_scale_overflow
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer


class Guard(Callback):
    """Says how `data.skip` leaves out what a skipped step read; counts the non-finite ones and
    raises RunFailed, on every rank alike, at the configured number."""

    def __init__(self, run_logger: RunLogger) -> None:
        self._run_logger = run_logger
        self._in_a_row = 0

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Count and tell of a skipped step. Raises RunFailed at one too many."""
        is_finite = result.spiked or not result.skipped or result.tokens == 0
        scale = result.loss_scale if trainer.loss_scale.enabled else 0
        if not is_finite and is_scale_overflow(scale, result.loss):
            return  # the progress line says so, and its samples are as good as any
        self._in_a_row = 0 if is_finite else self._in_a_row + 1
        if result.skipped:
            self._run_logger.info(_how_to_leave_out(result, trainer.loader))
        limit = trainer.config.train.nonfinite_limit
        if self._in_a_row >= limit:
            first, last = result.samples
            raise RunFailed(
                f"step {result.step}: the last {limit} steps had a non-finite loss or gradient "
                f"(train.nonfinite_limit), the newest with samples {first} to {last - 1}"
            )


def _how_to_leave_out(result: StepResult, loader: Loader) -> str:
    first, last = result.samples
    begin, end = loader.data_step_of(first), loader.data_step_of(last)
    holds = f", from checkpoints of step {loader.counts_from} on" if loader.counts_from else ""
    return (
        f"step {result.step} changed no weight; it read samples {first} to {last - 1}, which "
        f"data.skip=[[{begin},{end}]] leaves out{holds}"
    )
