"""Checkpoints of a trainer: what goes into one, when, and how a run takes it up again."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from megafrontier.checkpoint.errors import CheckpointWriteError
from megafrontier.checkpoint.folder import prune
from megafrontier.checkpoint.manifest import Manifest
from megafrontier.checkpoint.read import Checkpoint
from megafrontier.checkpoint.resume import load_checkpoint, open_newest
from megafrontier.checkpoint.write import save
from megafrontier.config import config_to_dict
from megafrontier.data.tokenizer import load_tokenizer
from megafrontier.errors import UserError
from megafrontier.training.callback import Callback, is_due
from megafrontier.training.logbook import Logbook
from megafrontier.training.result import StepResult
from megafrontier.training.trainer import Trainer


def checkpoint_root(trainer: Trainer) -> Path:
    """Where the run's checkpoints lie."""
    return Path(trainer.config.run.directory) / "checkpoints"


def shards(trainer: Trainer) -> Mapping[str, Sequence[torch.Tensor]]:
    """This rank's 1-D shard of each unit, by state.

    The computing weights follow from the masters and are not among them, unless delta wires have
    left them a little behind; nor is gradient error, unless it is fed back.
    """
    units = trainer.engine.units
    found = {"weight": [unit.master for unit in units], **trainer.optimizer.moments}
    if trainer.engine.wires.have_deltas:
        found["published"] = [unit.published for unit in units]
    errors = [unit.error for unit in units if unit.error is not None]
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
    piece, pieces = hierarchy.piece(depth)
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
        },
    )
    return save(
        checkpoint_root(trainer),
        manifest,
        states,
        piece,
        hierarchy.is_first_replica(depth),
        hierarchy,
        partial(attach_tokenizer, config.tokenizer),
    )


def attach_tokenizer(tokenizer: str, folder: Path) -> None:
    """Put a tokenizer's files into a checkpoint's folder, so that it needs nothing else."""
    (folder / "tokenizer").mkdir()
    load_tokenizer(tokenizer).save(folder / "tokenizer")


def resume(trainer: Trainer, logbook: Logbook) -> None:
    """Take up the checkpoint that `checkpoint.resume` asks for, if any.

    Raises UserError when it cannot be had, or when `never` would mix two runs in one directory.
    """
    wanted = trainer.config.checkpoint.resume
    root = checkpoint_root(trainer)
    if wanted == "never":
        _refuse_old_checkpoints(trainer, root)
        return

    def load(checkpoint: Checkpoint) -> None:
        _fill(trainer, checkpoint)

    if wanted == "auto":
        found = open_newest(root, load, trainer.hierarchy, logbook.remark)
    else:
        found = load_checkpoint(Path(wanted), load, trainer.hierarchy)
    if found is None:
        return
    trainer.engine.place(from_masters="published" not in restored(trainer, found.manifest))
    _take_up(trainer, found.manifest)
    logbook.remark(f"resumed from {found.path} at step {trainer.step}")


def _refuse_old_checkpoints(trainer: Trainer, root: Path) -> None:
    old = next(root.glob("step-*"), None) if trainer.is_first and root.is_dir() else None
    problem = trainer.hierarchy.first_error(None if old is None else str(old))
    if problem is not None:
        raise UserError(
            f"checkpoint.resume: never, but {problem} is there; need another run.name, or move it"
        )


def _fill(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """This rank's part of every state that both sides have."""
    piece, pieces = trainer.hierarchy.piece(trainer.engine.placement.optimizer)
    layouts = [unit.layout for unit in trainer.engine.units]
    checkpoint.fill(layouts, restored(trainer, checkpoint.manifest), piece, pieces)
    if not trainer.hierarchy.is_first_replica(trainer.engine.placement.optimizer):
        for unit in trainer.engine.units:
            if unit.error is not None:
                unit.error.zero_()  # the first replica says it


def restored(trainer: Trainer, manifest: Manifest) -> dict[str, Sequence[torch.Tensor]]:
    """The states to take up. An imported checkpoint has weights only, and one of another placement
    or other wires may lack some of ours."""
    return {state: found for state, found in shards(trainer).items() if state in manifest.states}


def _take_up(trainer: Trainer, manifest: Manifest) -> None:
    trainer.step = manifest.step
    trainer.tokens = manifest.tokens
    trainer.optimizer.restore(int(manifest.extra.get("optimizer_steps", 0)))
    trainer.loss_scale.restore(manifest.extra.get("loss_scale", {}))
    trainer.spikes.restore(manifest.extra.get("spikes", {}))


class Save(Callback):
    """Checkpoint every so many steps and at the end; what cannot be written is reported and the
    run goes on, the older checkpoints intact."""

    def __init__(self, logbook: Logbook, resumed_step: int) -> None:
        self._logbook = logbook
        self._last = resumed_step

    def wants(self, trainer: Trainer, step: int) -> bool:
        return is_due(trainer.config.checkpoint.every, step)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self.wants(trainer, result.step):
            self._save(trainer)

    def at_end(self, trainer: Trainer) -> None:
        if self._last != trainer.step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        try:
            path = save_trainer(trainer)
        except CheckpointWriteError as error:
            self._logbook.remark(f"warning: no checkpoint at step {trainer.step}: {error}")
            return
        self._last = trainer.step
        self._logbook.remark(f"checkpoint {path}")
        if trainer.is_first:
            self._prune(trainer)

    def _prune(self, trainer: Trainer) -> None:
        keep = trainer.config.checkpoint
        try:
            prune(checkpoint_root(trainer), keep.keep, keep.keep_every)
        except OSError as error:
            self._logbook.remark(f"warning: old checkpoints not deleted: {error}")
