"""Checkpoints of a trainer: what they hold, and when they are saved."""

import math
from collections.abc import Sequence
from math import prod
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from megafrontier.checkpoint.folder import Deletions
from megafrontier.checkpoint.format import CheckpointWriteError
from megafrontier.checkpoint.save import PendingSave
from megafrontier.checkpoint.states import States, engine_states, persistent_buffers, start_save
from megafrontier.common.checkpoints import checkpoints_of
from megafrontier.common.errors import RunFailed, StorageFailed
from megafrontier.config import Config, config_to_dict
from megafrontier.data.tokenizers.tokenizer import save_cached_tokenizer
from megafrontier.plan.footprint import stored_itemsize
from megafrontier.plan.resolve import RunPlan, optimizer_groups
from megafrontier.plan.saves import minutes_between_saves
from megafrontier.training.callbacks.base import Callback, is_due
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer


def checkpoint_root(config: Config) -> Path:
    """The folder of the run's checkpoints."""
    return checkpoints_of(config.run.directory)


def checkpoint_bytes(config: Config, plan: RunPlan) -> int:
    """Bytes of one checkpoint, as if all units had the default rules."""
    return sum(
        prod(spec.shape) * stored_itemsize(config, plan, plan.default, optimizer)
        for optimizer, specs in optimizer_groups(config).by_optimizer().items()
        for spec in specs
    )


def shards(trainer: Trainer) -> States:
    """This rank's 1-D shard of each unit, by state."""
    return engine_states(trainer.engine, trainer.unit_states)


def start_saving(trainer: Trainer) -> PendingSave:
    """Begin to save a checkpoint of the current step; all ranks call it. Raises
    CheckpointWriteError on all ranks."""
    config, fixed = trainer.config, fixed_state(trainer)
    return start_save(
        checkpoint_root(config),
        trainer.engine,
        trainer.unit_states,
        lambda folder: save_cached_tokenizer(config.tokenizer, folder / "tokenizer"),
        buffers=saved_buffers(trainer),
        step=trainer.step,
        tokens=trainer.tokens,
        config=fixed["config"],
        rng=fixed["rng"],
        extra=progress(trainer) | fixed["extra"],
    )


def saved_buffers(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The buffers that checkpoints keep, by name."""
    return persistent_buffers(trainer.model) | trainer.optimizer.buffers


def fixed_state(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The fields of a checkpoint's manifest that no step changes."""
    samples = trainer.loader.samples
    # Only the first rank's manifest is written, so the other ranks need not read the contents.
    contents = samples.fingerprints if trainer.is_first else None
    return {
        "config": config_to_dict(trainer.config),
        "rng": {"seed": trainer.config.run.seed},
        "extra": {"windows": samples.windows, "contents": contents},
    }


def progress(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint's manifest keeps of the present step, besides its number and tokens."""
    kept = callback_states(trainer)
    return {
        "optimizer_steps": trainer.optimizer.steps,
        "loss_scale": trainer.loss_scale.state_dict(),
        "spikes": trainer.spikes.state_dict(),
        "data": trainer.loader.position(trainer.step),
        **({"callbacks": kept} if kept else {}),
    }


def callback_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The states of callbacks by name, of those that have something to keep."""
    states = {name: stateful.state_dict() for name, stateful in trainer.stateful.items()}
    return {name: state for name, state in states.items() if state}


class Save(Callback):
    """Saves a checkpoint every `checkpoint.every` steps, `checkpoint.minutes` after the one before,
    and at the end. If one cannot be written, that is a warning, and training goes on.

    Only rank 0's clock counts. The message of a step's loss tells the others that a checkpoint is
    due by time, and the next step is saved.

    With `checkpoint.asynchronous` training waits only for copies in host memory. These are written
    behind the next steps, and the checkpoint is published after the first step whose results say
    that all ranks have written. It is waited for when the next one is due by steps and when no step
    follows. Old checkpoints are deleted behind the steps as well.
    """

    between_steps = "saves"

    def __init__(self, run_logger: RunLogger, resumed_step: int) -> None:
        self._run_logger = run_logger
        self.saved_step = self._resumed_step = resumed_step
        """The step from which another start would go on."""
        self.listeners: Sequence[Callback] = ()
        """Those that learn of each checkpoint."""
        self._is_finite = True  # the loss of the newest step
        self._failed_by_storage = False  # the last save
        self._is_written = False  # the pending save, by all ranks
        self._prunes = False  # after the pending save
        self._is_requested = False  # by time, after the next step; the same on all ranks
        self._begun_at = monotonic()  # the last save, or the run
        self._late_step: int | None = None  # of a pending save that the log says to be late
        self._deletions = Deletions()

    def at_start(self, trainer: Trainer) -> None:
        self._begun_at = monotonic()

    def before_optimizer(self, trainer: Trainer, gradients: Sequence[torch.Tensor]) -> None:
        # Recorded by all ranks in each step, as the message of the loss needs it.
        trainer.metrics.add("save_requests", float(self._requests(trainer)), "sum")

    def _requests(self, trainer: Trainer) -> bool:
        """Whether this rank asks for a checkpoint, because one is due by time."""
        minutes = minutes_between_saves(trainer.config, trainer.plan)
        if not (trainer.is_first and minutes and monotonic() - self._begun_at >= 60 * minutes):
            return False
        if (late := trainer.pending_save) is None:
            return True
        if late.step != self._late_step:
            self._late_step = late.step
            what = f"the checkpoint of step {late.step} is still being written"
            self._run_logger.info(f"{what}: the next one is due by time and follows it")
        return False

    def needs_settled_state(self, trainer: Trainer, step: int) -> bool:
        # Publishing uses collectives, so nothing else may be in flight.
        return self._is_due(trainer, step) or self._is_written

    def _is_due(self, trainer: Trainer, step: int) -> bool:
        # The last step is saved before its evaluation, which may be cut short.
        by_steps = is_due(trainer.config.checkpoint.every, step) or step == trainer.last_step
        return by_steps or self._is_requested

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._is_finite = math.isfinite(result.loss)
        is_due = self._is_due(trainer, result.step)
        # Whoever asked before this step was saved has what it asked for.
        self._is_requested = result.asks_to_save and not is_due
        self._is_written = trainer.pending_save is not None and not result.is_saving
        # The same on all ranks: whether the next step has begun, and what the step's results say.
        is_settled = trainer.step == result.step
        if is_due or (self._is_written and is_settled):
            if (late := trainer.pending_save) is not None and not self._is_written:
                what = f"the checkpoint of step {late.step} is still being written"
                self._run_logger.info(f"{what}: waiting for it, because the next one is due")
            self._publish(trainer)
        if is_due:
            is_last = result.stop or result.step == trainer.last_step
            self._save(trainer, trainer.config.checkpoint.asynchronous and not is_last)
        self._warn_of_deletions()

    def at_end(self, trainer: Trainer) -> None:
        """Save the newest step if that has not been done, in two tries.

        Raises RunFailed if nothing of this start could be saved for a reason that needs a person,
        and StorageFailed if the storage failed, or if the last step of the run could not be saved.
        """
        self._publish(trainer)
        if self.saved_step == trainer.step or self._save(trainer) or self._save(trainer):
            self._finish_deletions(trainer)
            return
        what = f"step {trainer.step}: could not be saved; log.txt has the reason"
        if self.saved_step == self._resumed_step and not self._failed_by_storage:
            raise RunFailed(f"{what}, nor could any step of this start")
        if trainer.step >= trainer.last_step or self._failed_by_storage:
            raise StorageFailed(what)

    def _save(self, trainer: Trainer, is_behind: bool = False) -> bool:
        """Save the current step, or begin to with `is_behind`. Returns whether that succeeded."""
        self._begun_at = monotonic()
        self._run_logger.sync()
        # With another loss the weights may be broken, and would replace older ones that are not.
        self._prunes = self._is_finite
        try:
            trainer.pending_save = start_saving(trainer)
        except CheckpointWriteError as error:
            self._warn(trainer.step, error)
            return False
        if not is_behind:
            return self._publish(trainer)
        trainer.pending_save.write_behind()
        return True

    def _publish(self, trainer: Trainer) -> bool:
        """Finish the pending save, if there is one. Returns whether a checkpoint was published."""
        pending, trainer.pending_save = trainer.pending_save, None
        if pending is None:
            return False
        self._is_written = False
        try:
            path = pending.finish()
        except CheckpointWriteError as error:
            self._warn(pending.step, error)
            return False
        self.saved_step = pending.step
        self._run_logger.info(f"checkpoint {path}")
        if self._prunes:
            self._prune(trainer)
        for callback in self.listeners:
            callback.on_checkpoint_saved(trainer, path)
        return True

    def _warn(self, step: int, error: CheckpointWriteError) -> None:
        self._run_logger.info(f"warning: no checkpoint at step {step}: {error}")
        self._failed_by_storage = error.by_storage

    def _prune(self, trainer: Trainer) -> None:
        """Begin to delete old checkpoints on rank 0. A failure is a warning, because the newest
        checkpoints are there all the same."""
        keep = trainer.config.checkpoint
        if trainer.is_first:
            try:
                self._deletions.start(checkpoint_root(trainer.config), keep.keep, keep.keep_every)
            except OSError as error:
                self._run_logger.info(f"warning: old checkpoints not deleted: {error}")

    def _finish_deletions(self, trainer: Trainer) -> None:
        """Wait for deletions after the last step of the run, because no start follows that would
        delete the rest. All ranks wait: if one left, its launcher might end rank 0."""
        if trainer.step >= trainer.last_step:
            self._deletions.wait()
            trainer.world.barrier()
        self._warn_of_deletions()

    def _warn_of_deletions(self) -> None:
        for error in self._deletions.problems():
            self._run_logger.info(f"warning: old checkpoints not deleted: {error}")
