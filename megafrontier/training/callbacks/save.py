"""Checkpoints of a trainer: what goes into one, and when."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.errors import CheckpointWriteError
from megafrontier.checkpoint.folder import delete, prune
from megafrontier.checkpoint.manifest import Manifest
from megafrontier.checkpoint.save import save
from megafrontier.common.errors import RunFailed, StorageFailed
from megafrontier.config import Config, config_to_dict
from megafrontier.data.tokenizers.tokenizer import save_cached_tokenizer
from megafrontier.parallel.world import World
from megafrontier.training.callbacks.base import Callback, is_due
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer

DELETING_SECONDS = 1.0
"""How often it is told that old checkpoints are still being deleted."""


def checkpoint_root(config: Config) -> Path:
    """Where the run's checkpoints lie."""
    return Path(config.run.directory) / "checkpoints"


def shards(trainer: Trainer) -> Mapping[str, Sequence[torch.Tensor]]:
    """This rank's 1-D shard of each unit, by state.

    The computing weights follow from the masters and are not among them, unless delta wires have
    left them a little behind; nor is gradient error, unless it is fed back.
    """
    units = trainer.engine.units
    found = {"weight": [unit.master for unit in units], **trainer.optimizer.moments}
    if trainer.engine.wires.have_deltas and not units[0].computes_with_masters:
        found["published"] = [unit.published for unit in units]
    errors = [unit.feedback.error for unit in units if unit.feedback.error is not None]
    if errors:
        found["error"] = errors
    return found


def save_trainer(trainer: Trainer) -> Path:
    """Write a checkpoint of the present step. Raises CheckpointWriteError on all ranks alike."""
    config, hierarchy = trainer.config, trainer.hierarchy
    depth = trainer.engine.placement.optimizer
    trainer.engine.finish_publishing()
    with trainer.engine.ledger.paused():
        trainer.engine.fold_errors()
    piece, pieces = hierarchy.shard_index(depth)
    states = shards(trainer)
    manifest = Manifest(
        step=trainer.step,
        tokens=trainer.tokens,
        units=[unit.layout for unit in trainer.engine.units],
        pieces=pieces,
        states={state: tensors[0].dtype for state, tensors in states.items()},
        config=config_to_dict(config),
        rng={"seed": config.run.seed},
        extra={
            "optimizer_steps": trainer.optimizer.steps,
            "loss_scale": trainer.loss_scale.state(),
            "spikes": trainer.spikes.state(),
            "data": trainer.loader.position(trainer.step),
            "windows": trainer.loader.samples.windows,
            # The first rank's manifest is the one that is written: thousands need not look, too.
            "contents": trainer.loader.samples.fingerprints if trainer.is_first else None,
            **({"callbacks": kept} if (kept := callback_states(trainer)) else {}),
        },
    )
    return save(
        checkpoint_root(trainer.config),
        manifest,
        states,
        piece,
        hierarchy.is_first_replica(depth),
        trainer.world,
        partial(attach_tokenizer, config.tokenizer),
    )


def callback_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The states of callbacks by name, of those that have something to keep."""
    states = {name: stateful.state_dict() for name, stateful in trainer.stateful.items()}
    return {name: state for name, state in states.items() if state}


def attach_tokenizer(tokenizer: str, folder: Path) -> None:
    """Put a tokenizer's files into a checkpoint's folder, so that it needs nothing else."""
    save_cached_tokenizer(tokenizer, folder / "tokenizer")


class Save(Callback):
    """Checkpoint every so many steps and at the end; what cannot be written on the way is reported
    and the run goes on, the older checkpoints intact."""

    def __init__(self, run_logger: RunLogger, resumed_step: int, beat: Callable[[], None]) -> None:
        """`beat` hears that deletions go on, which may take minutes. `saved_step` is where another
        start goes on."""
        self._run_logger, self._beat = run_logger, beat
        self.saved_step = self._resumed_step = resumed_step
        self._is_sound = True  # by the newest step's loss, as far as a loss can tell
        self._is_late = False  # for want of a step with a finite loss
        self.on_saved: Callable[[Trainer, Path], None] | None = None
        """Is called on every rank after each checkpoint."""
        self._is_storages = False  # the fault that kept the last save from being one
        self._thread = ThreadPoolExecutor(1, "delete")
        self._deleting: Future[None] | None = None

    def needs_settled_state(self, trainer: Trainer, step: int) -> bool:
        # The last step before its evaluation, which may be cut short.
        is_due_now = is_due(trainer.config.checkpoint.every, step) or step == trainer.last_step
        return is_due_now or self._is_late

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._is_sound = math.isfinite(result.loss)
        if not self.needs_settled_state(trainer, result.step):
            return
        # Weights that give such a loss may be broken, and would push the sound ones out.
        is_late, self._is_late = self._is_late, not self._is_sound
        if not self._is_late:
            self._save(trainer)
        elif not is_late:
            self._run_logger.info(
                f"no checkpoint at step {result.step}, whose loss is not finite: after the next "
                "step whose loss is"
            )

    def at_end(self, trainer: Trainer) -> None:
        """Save what has not been. Raises RunFailed where nothing of this start could be, for a
        reason that will not go by itself, and StorageFailed where the storage failed, or the run's
        end could not be saved: no other job is to take it for done."""
        if self.saved_step == trainer.step or self._save(trainer) or self._save(trainer):
            return
        what = f"step {trainer.step}: could not be saved; log.txt has the reason"
        if self.saved_step == self._resumed_step and not self._is_storages:
            raise RunFailed(f"{what}, nor could any step of this start")
        if trainer.step >= trainer.last_step or self._is_storages:
            raise StorageFailed(what)

    def _save(self, trainer: Trainer) -> bool:
        self.finish(trainer.world)
        self._run_logger.sync()
        try:
            path = save_trainer(trainer)
        except CheckpointWriteError as error:
            self._run_logger.info(f"warning: no checkpoint at step {trainer.step}: {error}")
            self._is_storages = error.is_storages
            return False
        self.saved_step = trainer.step
        self._run_logger.info(f"checkpoint {path}")
        if trainer.is_first and self._is_sound:
            self._prune(trainer)
        if self.on_saved is not None:
            self.on_saved(trainer, path)
        return True

    def _prune(self, trainer: Trainer) -> None:
        """Delete old checkpoints under the steps that follow: they have a file for every rank."""
        keep = trainer.config.checkpoint
        with self._telling():
            hidden = prune(checkpoint_root(trainer.config), keep.keep, keep.keep_every)
            self._deleting = self._thread.submit(delete, hidden)

    def finish(self, world: World) -> None:
        """Return, on all ranks, when old checkpoints are gone: before the next save; at the end
        after the evaluation, for it may take minutes, and not without the others, or a launcher
        would end the one that deletes."""
        while not world.all_true(self._deleting is None or self._deleting.done()):
            self._beat()
            wait([self._deleting] if self._deleting else [], DELETING_SECONDS)
        deleting, self._deleting = self._deleting, None
        with self._telling():
            if deleting is not None:
                deleting.result()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._run_logger.info(f"warning: old checkpoints not deleted: {error}")
