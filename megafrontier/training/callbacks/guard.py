"""Report skipped steps, and stop a run that no longer learns."""

from typing import Any

from megafrontier.common.errors import RunFailed
from megafrontier.data.sampling.loader import Loader
from megafrontier.optim.gradients import is_scale_overflow
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer


class Guard(Callback):
    """Says which `data.skip` leaves out the samples of a skipped step, and counts non-finite steps.

    At `train.nonfinite_limit` of them in a row it raises RunFailed, on every rank alike. The count
    is kept in checkpoints: a run that is restarted in between is stopped at the same step.
    """

    def __init__(self) -> None:
        self._nonfinite_steps = 0

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        is_finite = result.spiked or not result.skipped or result.tokens == 0
        scale = result.loss_scale if trainer.loss_scale.enabled else 0
        if not is_finite and is_scale_overflow(scale, result.loss):
            return  # the progress line says so, and the samples are not the cause
        self._nonfinite_steps = 0 if is_finite else self._nonfinite_steps + 1
        if result.skipped:
            trainer.run_logger.info(_how_to_skip(result, trainer.loader))
        limit = trainer.config.train.nonfinite_limit
        if self._nonfinite_steps >= limit:
            first, last = result.samples
            raise RunFailed(
                f"step {result.step}: the last {limit} steps had a non-finite loss or gradient "
                f"(train.nonfinite_limit), the newest with samples {first} to {last - 1}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"nonfinite_steps": self._nonfinite_steps} if self._nonfinite_steps else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._nonfinite_steps = int(state_dict["nonfinite_steps"])


def _how_to_skip(result: StepResult, loader: Loader) -> str:
    first, last = result.samples
    begin, end = loader.data_step_of(first), loader.data_step_of(last)
    return (
        f"step {result.step} changed no weight; it read samples {first} to {last - 1}, which "
        f"data.skip=[[{begin},{end}]] leaves out"
    )
