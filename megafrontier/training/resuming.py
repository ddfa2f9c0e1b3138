"""How a run takes up a checkpoint: which one, and whether it is of the same model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.folder import list_checkpoints, set_later_aside
from megafrontier.checkpoint.manifest import Manifest
from megafrontier.checkpoint.read import Checkpoint, read_manifest
from megafrontier.checkpoint.resume import load_checkpoint, open_newest
from megafrontier.config import Config, ModelConfig
from megafrontier.errors import UserError
from megafrontier.model.sizes import head_size, kv_heads, rotary_size
from megafrontier.training.logbook import Logbook
from megafrontier.training.saving import checkpoint_root, shards
from megafrontier.training.trainer import Trainer


def check_resume(config: Config) -> None:
    """Raises UserError where `checkpoint.resume` names a checkpoint that is needed and not sound at
    first sight."""
    path = named_checkpoint(config)
    if path is None or not (leads_back(config) or not list_checkpoints(checkpoint_root(config))):
        return
    try:
        read_manifest(path)
    except UserError as error:
        raise UserError(
            f"checkpoint.resume: {error}; need auto, never or the path of a checkpoint"
        ) from error


def named_checkpoint(config: Config) -> Path | None:
    """The path in `checkpoint.resume`, None for auto and never."""
    wanted = config.checkpoint.resume
    return None if wanted in ("auto", "never") else Path(wanted)


def is_requeued() -> bool:
    """Whether this is a Slurm job that has been started before, with the same arguments."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0


def leads_back(config: Config) -> bool:
    """Whether the run is to go back to a checkpoint of its own. A requeued job has done so."""
    path = named_checkpoint(config)
    if path is None or is_requeued():
        return False
    return path.resolve().parent == checkpoint_root(config).resolve()


def resume(trainer: Trainer, logbook: Logbook) -> None:
    """Take up the checkpoint that `checkpoint.resume` asks for, if any.

    A path is where a run begins: once it has checkpoints of its own it goes on from them, or a job
    in the queue would begin again at each start. Only a path among its own leads back, and those
    after it are set aside.

    Raises UserError when it cannot be had, is of another model, or when `never` would mix two runs
    in one directory.
    """
    config, root = trainer.config, checkpoint_root(trainer.config)
    if config.checkpoint.resume == "never" and not is_requeued():
        _refuse_old_checkpoints(trainer, root)
        return
    load = partial(_fill, trainer)
    is_back, path = leads_back(config), named_checkpoint(config)
    found = None if is_back else open_newest(root, load, trainer.hierarchy, logbook.remark)
    if found is None and path is not None:
        found = load_checkpoint(path, load, trainer.hierarchy)
    if found is None:
        return
    trainer.engine.place(from_masters="published" not in restored(trainer, found.manifest))
    _take_up(trainer, found.manifest)
    logbook.remark(f"resumed from {found.path} at step {trainer.step}")
    for line in _changes(trainer, found.manifest):
        logbook.remark(line)
    if is_back:
        trainer.hierarchy.together(partial(_give_up_later, trainer, root))


def _refuse_old_checkpoints(trainer: Trainer, root: Path) -> None:
    old = next(root.glob("step-*"), None) if trainer.is_first and root.is_dir() else None
    problem = trainer.hierarchy.first_error(None if old is None else str(old))
    if problem is not None:
        raise UserError(
            f"checkpoint.resume: never, but {problem} is there; need another run.name, or move it"
        )


def _give_up_later(trainer: Trainer, root: Path) -> None:
    if not trainer.is_first:
        return
    try:
        set_later_aside(root, trainer.step)
    except OSError as error:
        raise UserError(
            f"checkpoint.resume: {root}: {error.strerror}, need to set later checkpoints aside"
        ) from error


def _fill(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """This rank's part of every state that both sides have."""
    _check_model(trainer.config.model, checkpoint)
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
    if "data" in manifest.extra:
        step, sample = manifest.extra["data"]
        trainer.loader.go_on((step, sample))


def _check_model(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Refuse weights that fit, of a model that computes something else with them."""
    saved = _saved_model(checkpoint.manifest)
    if saved is None:
        return
    ours = _function(model)
    for name, theirs in _function(saved).items():
        if ours[name] != theirs:
            raise UserError(
                f"model.{name}: {ours[name]}, but {checkpoint.path} was trained with {theirs}"
            )


def _function(model: ModelConfig) -> dict[str, Any]:
    """What the shapes of the weights do not tell, under the names of the config's keys."""
    return {
        "heads": model.heads,
        "kv_heads": kv_heads(model),
        "head_size": head_size(model),
        "norm": model.norm,
        "norm_eps": model.norm_eps,
        "activation": model.activation,
        "position": model.position,
        "rotary_fraction": rotary_size(model) / head_size(model),
        "parallel_residual": model.parallel_residual,
    }


def _saved_model(manifest: Manifest) -> ModelConfig | None:
    saved = manifest.config.get("model")
    if not isinstance(saved, Mapping):
        return None
    known = {field.name for field in fields(ModelConfig)}
    return ModelConfig(**{name: value for name, value in saved.items() if name in known})


def _changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """What may be another on purpose, such as the rotary base for longer sequences."""
    lines = []
    model, saved = trainer.config.model, _saved_model(manifest)
    if saved is not None and model.position == "rotary" and saved.rotary_base != model.rotary_base:
        lines.append(f"warning: model.rotary_base: {model.rotary_base}, was {saved.rotary_base}")
    before = manifest.config.get("train", {}).get("global_batch")
    now = trainer.config.train.global_batch
    if "data" in manifest.extra and before != now:
        _, sample = trainer.loader.position(trainer.step)
        lines.append(f"train.global_batch: {now}, was {before}; the data go on at sample {sample}")
    return lines
