"""Loss on held-out data, and results of tasks, with the model as it is sharded."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megafrontier.common.errors import UserError, is_collective
from megafrontier.data.sampling.loader import Loader
from megafrontier.data.sampling.samples import Batch
from megafrontier.evaluation.tasks import evaluate_tasks
from megafrontier.parallel.mesh import Mesh
from megafrontier.pipeline.work import Runner, Work
from megafrontier.training.callbacks.base import Callback, is_due
from megafrontier.training.callbacks.weight_average import WeightAverage
from megafrontier.training.loop import stop_agreed
from megafrontier.training.resume.restarts import recorded_keys
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
    """Evaluates every `evaluate.every` steps and at the end of the run, tasks every
    `evaluate.tasks_every` steps.

    A run that is asked to stop skips the evaluation, because the checkpoint is more important. The
    next start makes up for what was skipped, or cut short by a kill, after the step that it resumes
    from.
    """

    between_steps = "evaluation"

    def __init__(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        self._heartbeat = heartbeat
        self._is_last = False
        self._has_bad_tasks = False

    def at_start(self, trainer: Trainer) -> None:
        step, chosen = trainer.step, trainer.config.evaluate
        self._average = WeightAverage(chosen.average)
        if step == 0:
            return
        path = Path(trainer.config.run.directory) / "metrics.jsonl"
        recorded = trainer.world.broadcast_from_rank_0(
            lambda: json.dumps(sorted(recorded_keys(path, step)))
        )
        keys = json.loads(recorded)
        self._is_last = step >= trainer.last_step
        for key, every, run in (
            ("valid_loss", chosen.every, self._run),
            ("tasks", chosen.tasks_every, self._run_tasks),
        ):
            # Without the step's own line, the step is another run's, and was evaluated there.
            is_missing = key not in keys and "loss" in keys and is_due(every, step)
            if is_missing or (key not in keys and self._is_last):
                run(trainer)
        self._is_last = False  # at_end would evaluate again

    def needs_settled_state(self, trainer: Trainer, step: int) -> bool:
        chosen = trainer.config.evaluate
        are_tasks_due = bool(chosen.tasks) and is_due(chosen.tasks_every, step)
        return is_due(chosen.every, step) or are_tasks_due

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._is_last = result.step == trainer.last_step
        if self._is_last or result.stop:
            return
        if is_due(trainer.config.evaluate.every, result.step):
            self._run(trainer)
        if is_due(trainer.config.evaluate.tasks_every, result.step):
            self._run_tasks(trainer)

    def at_end(self, trainer: Trainer) -> None:
        if self._is_last:
            self._run(trainer)
            self._run_tasks(trainer)

    def _run(self, trainer: Trainer) -> None:
        """Evaluate. A request to stop breaks it off, except at the last step."""
        if trainer.valid_loader is None or trainer.config.evaluate.batches == 0:
            return
        trainer.engine.finish_publishing()  # counts as the step's traffic; evaluation does not
        with trainer.engine.ledger.paused():
            found = self._losses(trainer, "valid_loss")
            averaged = None if found is None else self._losses_of_average(trainer)
        if found is not None and averaged is not None:
            line = {"step": trainer.step, **found, **averaged, "tokens": trainer.tokens}
            trainer.run_logger.write(line)

    def _losses_of_average(self, trainer: Trainer) -> dict[str, float] | None:
        """Those of the average of the newest weights, with the number of these; nothing if there
        are fewer than two, None if broken off."""
        if not trainer.config.evaluate.average:
            return {}
        average = self._average
        average.add(trainer.engine)
        if len(average) < 2:
            return {}
        with average.applied(trainer.engine):
            found = self._losses(trainer, "average_valid_loss")
        return None if found is None else {**found, "averaged": len(average)}

    def _losses(self, trainer: Trainer, key: str) -> dict[str, float] | None:
        """The loss of all corpora as `key`, and of each named one; None if broken off."""
        assert trainer.valid_loader is not None
        found = {}
        for name, loader in {"": trainer.valid_loader, **trainer.named_loaders}.items():
            one = evaluate(
                trainer.runner,
                loader,
                trainer.mesh,
                trainer.config.evaluate.batches,
                heartbeat=self._heartbeat,
                stops=self._stops(trainer),
            )
            if one is None:
                return None
            found[f"{key}/{name}".removesuffix("/")] = one.loss
        return found

    def _run_tasks(self, trainer: Trainer) -> None:
        """Evaluate the tasks. A request to stop breaks it off, except at the last step.

        Tasks that cannot be loaded do not end a run: it goes on without them, after a warning.
        """
        config = trainer.config
        if not config.evaluate.tasks or self._has_bad_tasks:
            return
        trainer.engine.finish_publishing()
        try:
            with trainer.engine.ledger.paused():
                found = evaluate_tasks(
                    config, trainer.runner, trainer.mesh, self._heartbeat, self._stops(trainer)
                )
        except UserError as error:
            if not is_collective(error):
                raise
            trainer.run_logger.info(f"warning: {error}; the run goes on without tasks")
            self._has_bad_tasks = True
            return
        if found is not None:
            line = {"step": trainer.step, "tokens": trainer.tokens, "tasks": found}
            trainer.run_logger.write(line)

    def _stops(self, trainer: Trainer) -> Callable[[], bool]:
        return (lambda: False) if self._is_last else partial(stop_agreed, trainer.world)
