"""Checkpoints of a trainer: what they hold, and when they are saved."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.folder import delete, prune
from megafrontier.checkpoint.format import CheckpointWriteError, Manifest
from megafrontier.checkpoint.save import save
from megafrontier.common.errors import RunFailed, StorageFailed
from megafrontier.config import Config, config_to_dict
from megafrontier.data.tokenizers.tokenizer import save_cached_tokenizer
from megafrontier.model.flops import parameter_count
from megafrontier.parallel.world import World
from megafrontier.partition.wires.registry import DTYPES
from megafrontier.training.callbacks.base import Callback, is_due
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.plan import RunPlan
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer

POLL_SECONDS = 1.0
"""How often the watchdog hears that old checkpoints are still being deleted."""


def checkpoint_root(config: Config) -> Path:
    """The folder of the run's checkpoints."""
    return Path(config.run.directory) / "checkpoints"


def checkpoint_bytes(config: Config, plan: RunPlan) -> int:
    """Bytes of one checkpoint: for each parameter fp32 weight and two moments, the published weight
    with delta wires, and the bf16 error with error feedback."""
    published = DTYPES[config.train.precision].itemsize if plan.wires.have_deltas else 0
    return parameter_count(config.model) * (12 + published + (2 if plan.error_feedback else 0))


def shards(trainer: Trainer) -> Mapping[str, Sequence[torch.Tensor]]:
    """This rank's 1-D shard of each unit, by state.

    The weights used in computation are left out, because they follow from the fp32 masters, except
    with delta wires (`published`). So are errors without error feedback.
    """
    units = trainer.engine.units
    found = {"weight": [unit.master for unit in units], **trainer.optimizer.states}
    if trainer.engine.wires.have_deltas and not units[0].computes_with_masters:
        found["published"] = [unit.published for unit in units]
    errors = [unit.feedback.error for unit in units if unit.feedback.error is not None]
    if errors:
        found["error"] = errors
    return found


def save_trainer(trainer: Trainer) -> Path:
    """Save a checkpoint of the current step; all ranks call it. Returns its folder. Raises
    CheckpointWriteError on all ranks."""
    config, hierarchy = trainer.config, trainer.engine.hierarchy
    depth = trainer.engine.placement.optimizer
    trainer.engine.finish_publishing()
    with trainer.engine.ledger.paused():
        trainer.engine.fold_errors()
    index, num_shards = hierarchy.shard_index(depth)
    states = shards(trainer)
    manifest = Manifest(
        step=trainer.step,
        tokens=trainer.tokens,
        units=[unit.layout for unit in trainer.engine.units],
        num_shards=num_shards,
        states={state: tensors[0].dtype for state, tensors in states.items()},
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
    return save(
        checkpoint_root(config),
        manifest,
        states,
        index,
        hierarchy.is_first_replica(depth),
        trainer.world,
        partial(attach_tokenizer, config.tokenizer),
    )


def callback_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The states of callbacks by name, of those that have something to keep."""
    states = {name: stateful.state_dict() for name, stateful in trainer.stateful.items()}
    return {name: state for name, state in states.items() if state}


def attach_tokenizer(tokenizer: str, folder: Path) -> None:
    """Put a tokenizer's files into a checkpoint's folder, so that it can be used on its own."""
    save_cached_tokenizer(tokenizer, folder / "tokenizer")


class Save(Callback):
    """Saves a checkpoint every `checkpoint.every` steps and at the end. If one cannot be written,
    that is a warning, and training goes on."""

    def __init__(self, run_logger: RunLogger, resumed_step: int, beat: Callable[[], None]) -> None:
        """`beat` tells the watchdog that old checkpoints are still being deleted."""
        self._run_logger, self._beat = run_logger, beat
        self.saved_step = self._resumed_step = resumed_step
        """The step from which another start would go on."""
        self.on_saved: Callable[[Trainer, Path], None] | None = None
        """Called on every rank after each checkpoint."""
        self._is_finite = True  # the loss of the newest step
        self._failed_by_storage = False  # the last save
        self._thread = ThreadPoolExecutor(1, "delete")
        self._deletion: Future[None] | None = None

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
        self.finish(trainer.world)
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
        if trainer.is_first and self._is_finite:
            self._prune(trainer.config)
        if self.on_saved is not None:
            self.on_saved(trainer, path)
        return True

    def _prune(self, config: Config) -> None:
        """Hide old checkpoints, and delete them during the next steps: they have many files."""
        try:
            hidden = prune(
                checkpoint_root(config), config.checkpoint.keep, config.checkpoint.keep_every
            )
            self._deletion = self._thread.submit(delete, hidden)
        except OSError as error:
            self._warn(error)

    def finish(self, world: World) -> None:
        """Wait until old checkpoints are deleted; all ranks call it. A rank that left earlier would
        make its launcher end the rank that deletes."""
        while not world.all_true(self._deletion is None or self._deletion.done()):
            self._beat()
            wait([self._deletion] if self._deletion else [], POLL_SECONDS)
        deletion, self._deletion = self._deletion, None
        error = deletion.exception() if deletion else None
        if isinstance(error, OSError):
            self._warn(error)
        elif error is not None:
            raise error

    def _warn(self, error: OSError) -> None:
        self._run_logger.info(f"warning: old checkpoints not deleted: {error}")
