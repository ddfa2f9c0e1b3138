"""Checkpoints of a trainer: what they hold, and when they are saved."""

import math
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from megafrontier.checkpoint.folder import delete, prune
from megafrontier.checkpoint.format import CheckpointWriteError
from megafrontier.checkpoint.states import States, engine_states, save_engine
from megafrontier.common.errors import RunFailed, StorageFailed
from megafrontier.config import Config, config_to_dict
from megafrontier.data.tokenizers.tokenizer import save_cached_tokenizer
from megafrontier.optim.groups import optimizer_itemsize
from megafrontier.partition.wires.registry import DTYPES
from megafrontier.training.callbacks.base import Callback, is_due
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.plan import RunPlan, optimizer_groups
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer


def checkpoint_root(config: Config) -> Path:
    """The folder of the run's checkpoints."""
    return Path(config.run.directory) / "checkpoints"


def checkpoint_bytes(config: Config, plan: RunPlan) -> int:
    """Bytes of one checkpoint: for each parameter the fp32 weight and the optimizer's states, the
    published weight with delta wires, and the bf16 error with error feedback."""
    published = DTYPES[config.train.precision].itemsize if plan.wires.have_deltas else 0
    others = published + (2 if plan.error_feedback else 0)
    return sum(
        prod(spec.shape) * (optimizer_itemsize(optimizer) + others)
        for optimizer, specs in optimizer_groups(config).by_optimizer().items()
        for spec in specs
    )


def shards(trainer: Trainer) -> States:
    """This rank's 1-D shard of each unit, by state."""
    return engine_states(trainer.engine, trainer.optimizer.states)


def save_trainer(trainer: Trainer) -> Path:
    """Save a checkpoint of the current step; all ranks call it. Returns its folder. Raises
    CheckpointWriteError on all ranks."""
    config = trainer.config
    return save_engine(
        checkpoint_root(config),
        trainer.engine,
        trainer.optimizer.states,
        lambda folder: save_cached_tokenizer(config.tokenizer, folder / "tokenizer"),
        step=trainer.step,
        tokens=trainer.tokens,
        config=config_to_dict(config),
        rng={"seed": config.run.seed},
        extra={
            "optimizer_steps": trainer.optimizer.steps,
            "loss_scale": trainer.loss_scale.state_dict(),
            "spikes": trainer.spikes.state_dict(),
            "data": trainer.loader.position(trainer.step),
            "windows": trainer.loader.samples.windows,
            # Only the first rank's manifest is written, so the other ranks need not read this.
            "contents": trainer.loader.samples.fingerprints if trainer.is_first else None,
            **({"callbacks": kept} if (kept := callback_states(trainer)) else {}),
        },
    )


def callback_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The states of callbacks by name, of those that have something to keep."""
    states = {name: stateful.state_dict() for name, stateful in trainer.stateful.items()}
    return {name: state for name, state in states.items() if state}


class Save(Callback):
    """Saves a checkpoint every `checkpoint.every` steps and at the end. If one cannot be written,
    that is a warning, and training goes on."""

    def __init__(self, run_logger: RunLogger, resumed_step: int) -> None:
        self._run_logger = run_logger
        self.saved_step = self._resumed_step = resumed_step
        """The step from which another start would go on."""
        self.listeners: Sequence[Callback] = ()
        """Those that learn of each checkpoint."""
        self._is_finite = True  # the loss of the newest step
        self._failed_by_storage = False  # the last save

    def needs_settled_state(self, trainer: Trainer, step: int) -> bool:
        # The last step is saved before its evaluation, which may be cut short.
        return is_due(trainer.config.checkpoint.every, step) or step == trainer.last_step

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._is_finite = math.isfinite(result.loss)
        if self.needs_settled_state(trainer, result.step):
            self._save(trainer)

    def at_end(self, trainer: Trainer) -> None:
        """Save the newest step if that has not been done, in two tries.

        Raises RunFailed if nothing of this start could be saved for a reason that needs a person,
        and StorageFailed if the storage failed, or if the last step of the run could not be saved.
        """
        if self.saved_step == trainer.step or self._save(trainer) or self._save(trainer):
            return
        what = f"step {trainer.step}: could not be saved; log.txt has the reason"
        if self.saved_step == self._resumed_step and not self._failed_by_storage:
            raise RunFailed(f"{what}, nor could any step of this start")
        if trainer.step >= trainer.last_step or self._failed_by_storage:
            raise StorageFailed(what)

    def _save(self, trainer: Trainer) -> bool:
        self._run_logger.sync()
        try:
            path = save_trainer(trainer)
        except CheckpointWriteError as error:
            self._run_logger.info(f"warning: no checkpoint at step {trainer.step}: {error}")
            self._failed_by_storage = error.by_storage
            return False
        self.saved_step = trainer.step
        self._run_logger.info(f"checkpoint {path}")
        # With another loss the weights may be broken, and would replace older ones that are not.
        if self._is_finite:
            self._prune(trainer)
        for callback in self.listeners:
            callback.on_checkpoint_saved(trainer, path)
        return True

    def _prune(self, trainer: Trainer) -> None:
        """Delete old checkpoints on rank 0. The others wait: if one left, its launcher might end
        rank 0."""
        keep = trainer.config.checkpoint
        if trainer.is_first:
            try:
                delete(prune(checkpoint_root(trainer.config), keep.keep, keep.keep_every))
            except OSError as error:
                self._run_logger.info(f"warning: old checkpoints not deleted: {error}")
        trainer.world.barrier()
