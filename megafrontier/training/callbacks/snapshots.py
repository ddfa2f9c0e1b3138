"""Snapshots near the ranks, between two checkpoints."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megafrontier.checkpoint.local.pending import PendingSnapshot
from megafrontier.checkpoint.local.store import SnapshotStore
from megafrontier.checkpoint.states import own_shards
from megafrontier.parallel.env import Identity
from megafrontier.training.callbacks.base import Callback, is_due
from megafrontier.training.callbacks.save import Save, fixed_state, progress, saved_buffers
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer

LAST_SECONDS = 5.0
"""How long a run that ends waits for a snapshot that is being written."""


class Snapshots(Callback):
    """Takes a snapshot every `checkpoint.local.every` steps, and one at the start of a run that has
    resumed: of the one that it has resumed from, a lost node may have held copies.

    A thread copies the shards to the node's memory under the next forward and backward, before the
    next update changes them, and checks, publishes and sends the copy. The message
    of each step's loss says how many ranks are still writing, so all ranks learn from the same step
    that a snapshot is whole. A snapshot that is not whole when the next one is due is not waited
    for: the next one is left out.
    """

    between_steps = "saves"

    def __init__(self, store: SnapshotStore, save: Save) -> None:
        """`save`: says which step is in the storage at the end."""
        self._store, self._save = store, save
        self._pending: PendingSnapshot | None = None
        self._said: set[str] = set()
        """What this rank has reported."""
        self._has_news = False  # the same on all ranks
        self._left_out = 0

    def at_start(self, trainer: Trainer) -> None:
        if trainer.step:
            self._take(trainer)

    def before_optimizer(self, trainer: Trainer, gradients: Sequence[torch.Tensor]) -> None:
        pending = self._pending
        if pending is not None:
            pending.wait_copied()
        is_writing = pending is not None and not pending.is_done
        has_failed = pending is not None and pending.problem is not None
        counts = [float(is_writing), float(has_failed), float(self._news() is not None)]
        trainer.metrics.add("snapshots", counts, "sum")

    def _news(self) -> str | None:
        """What this rank has to report, and has not reported yet."""
        pending = self._pending
        if pending is None or not pending.is_done or pending.copy_problem in (None, *self._said):
            return None
        return pending.copy_problem

    def needs_settled_state(self, trainer: Trainer, step: int) -> bool:
        return is_due(trainer.config.checkpoint.local.every, step) or self._has_news

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        writing, failed, news = (int(count) for count in result.snapshots)
        if self._pending is not None and not writing:
            # To say it, ranks need a message, for which the step must be the last that has begun.
            self._has_news = bool(failed or news) and trainer.step != result.step
            if not self._has_news:
                self._finish(trainer, self._pending, failed, news)
        if is_due(trainer.config.checkpoint.local.every, result.step):
            self._take(trainer)

    def _finish(self, trainer: Trainer, pending: PendingSnapshot, failed: int, news: int) -> None:
        """No rank is writing any more: keep the snapshot, or forget it if some ranks have failed.
        `news`: how many have something to report."""
        what = f"snapshot of step {pending.step}"
        if failed:
            self._log(trainer, f"{what} dropped", pending.problem, failed)
            self._store.drop(pending)
        else:
            if news:
                self._log(trainer, f"{what}: no copy on another node", self._news(), news)
                self._said.add(pending.copy_problem or "")
            self._store.commit(pending)
        self._pending = None

    def _log(self, trainer: Trainer, what: str, mine: str | None, count: int) -> None:
        world = trainer.world
        line = world.first_error(None if mine is None else f"rank {world.rank}: {mine}")
        more = f" (and {count - 1} more ranks)" if count > 1 else ""
        trainer.run_logger.info(f"warning: {what}: {line}{more}")

    def _take(self, trainer: Trainer) -> None:
        engine = trainer.engine
        has_errors = any(unit.feedback.errors for unit in engine.units)
        if has_errors or engine.have_deltas or any(unit.is_late for unit in engine.units):
            engine.finish_publishing()  # it changes what is copied
        if has_errors:
            # Also without a snapshot: the errors of the next steps must not depend on the clock.
            with engine.ledger.paused():
                engine.fold_errors()
        if self._pending is not None:
            self._left_out += 1
            if self._left_out == 1:
                trainer.run_logger.info(
                    f"snapshot of step {trainer.step} left out, because that of step "
                    f"{self._pending.step} is still being written; so may others be"
                )
            return
        shards = own_shards(engine, trainer.unit_states, saved_buffers(trainer))
        about = trainer.step, trainer.tokens, progress(trainer)
        early = ["error"]  # which backward changes
        self._pending = self._store.start(*about, shards, early)
        if trainer.config.train.cuda_graphs:  # no other thread may use the device while one is made
            self._pending.wait_copied()

    def at_end(self, trainer: Trainer) -> None:
        if self._pending is not None:
            self._pending.wait(LAST_SECONDS)
        trainer.world.barrier()
        self._store.close(is_over=self._save.saved_step == trainer.step)


def open_store(
    trainer: Trainer, identity: Identity, is_new: Callable[[], bool]
) -> SnapshotStore | None:
    """The snapshots of a trainer's run, None without `checkpoint.local.every`; all ranks call it.
    `is_new` and errors as of `SnapshotStore`."""
    config = trainer.config
    if not config.checkpoint.local.every:
        return None
    shards = own_shards(trainer.engine, trainer.unit_states, saved_buffers(trainer))
    return SnapshotStore(
        config.checkpoint.local,
        Path(config.run.directory),
        trainer.world,
        identity,
        shards,
        fixed_state(trainer),
        is_new,
        trainer.run_logger.info,
    )
