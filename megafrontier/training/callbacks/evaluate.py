"""Loss on held-out data, with the model as it is sharded."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from megafrontier.data.sampling.loader import Loader
from megafrontier.data.sampling.samples import Batch
from megafrontier.parallel.mesh import Mesh
from megafrontier.pipeline.work import Runner, Work
from megafrontier.training.callbacks.base import Callback, is_due
from megafrontier.training.loop import stop_agreed
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer, read_step


@dataclass(frozen=True)
class Evaluation:
    """Sum of cross-entropies in nats over `tokens`, which encode `utf8_bytes` of text (0 if they
    were not counted)."""

    loss_sum: float
    tokens: int
    utf8_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token; NaN without a token."""
        return self.loss_sum / self.tokens if self.tokens else math.nan


def evaluate(
    runner: Runner,
    loader: Loader,
    mesh: Mesh,
    batches: int,
    count_bytes: Callable[[Batch], int] | None = None,
    heartbeat: Callable[[], None] = lambda: None,
    stops: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Loss over the first `batches` global batches of `loader`, the same on every rank.

    count_bytes: the bytes of text that a micro-batch stands for.
    heartbeat: is called for each of this rank's micro-batches.
    stops: is called before each global batch, with the same result on all ranks; if it returns
        True, evaluation is broken off and the result is None.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    text_bytes = 0
    # Ranks that do other parts of the work have the same texts.
    is_counted = mesh.work_rank == 0 and mesh.pipeline_rank == 0
    runner.model.eval()
    for step in range(batches):
        if stops():
            runner.model.train()
            return None
        work = Work(read_step(loader, step, mesh.rank), after=heartbeat)
        totals += runner.evaluate(work)
        if count_bytes is not None and is_counted:
            text_bytes += sum(count_bytes(batch) for batch in work.batches)
    runner.model.train()
    if not mesh.counts_loss:
        totals = torch.zeros_like(totals)
    totals = torch.cat([totals, totals.new_tensor([text_bytes])])
    loss_sum, tokens_sum, bytes_sum = mesh.world.sum(totals).tolist()
    return Evaluation(loss_sum, int(tokens_sum), int(bytes_sum))


class Evaluate(Callback):
    """Evaluates every `evaluate.every` steps and at the end of the run.

    A run that is asked to stop skips the evaluation, because the checkpoint is more important.
    """

    def __init__(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        self._heartbeat = heartbeat
        self._is_last = False

    def needs_settled_state(self, trainer: Trainer, step: int) -> bool:
        return is_due(trainer.config.evaluate.every, step)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._is_last = result.step == trainer.last_step
        if self.needs_settled_state(trainer, result.step) and not (self._is_last or result.stop):
            self._run(trainer)

    def at_end(self, trainer: Trainer) -> None:
        if self._is_last:
            self._run(trainer)

    def _run(self, trainer: Trainer) -> None:
        """Evaluate. A request to stop breaks it off, except at the last step."""
        batches = trainer.config.evaluate.batches
        if trainer.valid_loader is None or batches == 0:
            return
        trainer.engine.finish_publishing()  # counts as the step's traffic; evaluation does not
        with trainer.engine.ledger.paused():
            found = evaluate(
                trainer.runner,
                trainer.valid_loader,
                trainer.mesh,
                batches,
                heartbeat=self._heartbeat,
                stops=(lambda: False) if self._is_last else partial(stop_agreed, trainer.world),
            )
        if found is not None:
            line = {"step": trainer.step, "valid_loss": found.loss, "tokens": trainer.tokens}
            trainer.run_logger.write(line)
