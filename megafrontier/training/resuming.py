"""How a run takes up a checkpoint: which one, and whether it is of the same model."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.crowd import from_rank_0
from megafrontier.checkpoint.folder import candidates, list_checkpoints, newest, set_later_aside
from megafrontier.checkpoint.manifest import Manifest
from megafrontier.checkpoint.read import Checkpoint, read_manifest
from megafrontier.checkpoint.resume import load_checkpoint, open_newest
from megafrontier.cluster.hierarchy import Hierarchy
from megafrontier.config import Config, ModelConfig, config_to_dict
from megafrontier.data.loader import data_step
from megafrontier.errors import UserError
from megafrontier.model.sizes import head_size, kv_heads, rotary_size
from megafrontier.partition import Engine
from megafrontier.training.attempts import has_begun, note_begun
from megafrontier.training.logbook import Logbook
from megafrontier.training.saving import checkpoint_root, shards
from megafrontier.training.trainer import Trainer

ORDER_KEYS = (
    "run.seed",
    "model.sequence_length",
    "tokenizer",
    "data.train",
    "data.split",
    "data.document_mask",
)
"""On what it depends which tokens a sample's number stands for."""


def check_resume(config: Config) -> None:
    """Raises UserError where `checkpoint.resume` names a checkpoint that is needed and not sound at
    first sight."""
    path = named_checkpoint(config)
    if path is None:
        return
    own = list_checkpoints(checkpoint_root(config))
    if own and (not leads_back(config) or is_begun(config)):
        return
    try:
        read_manifest(newest(path))
    except UserError as error:
        raise UserError(
            f"checkpoint.resume: {error}; need auto, never or the path of a checkpoint"
        ) from error


def named_checkpoint(config: Config) -> Path | None:
    """The path in `checkpoint.resume`, of a checkpoint or of a folder or run whose newest is meant;
    None for auto and never."""
    wanted = config.checkpoint.resume
    return None if wanted in ("auto", "never") else Path(wanted)


def leads_back(config: Config) -> bool:
    """Whether the run is to go back to a checkpoint of its own."""
    path = named_checkpoint(config)
    return path is not None and path.resolve().parent == checkpoint_root(config).resolve()


def is_begun(config: Config) -> bool:
    """Whether an earlier start of this Slurm job, with the same arguments, has gone back or begun
    anew as they say: then this one goes on."""
    return has_begun(Path(config.run.directory), config.checkpoint.resume)


def goes_on(config: Config) -> bool:
    """Whether another start as this one would take up the newest checkpoint."""
    is_asked_back = config.checkpoint.resume == "never" or leads_back(config)
    return not is_asked_back or is_begun(config)


def resume(trainer: Trainer, logbook: Logbook) -> None:
    """Take up the checkpoint that `checkpoint.resume` asks for, if any.

    A path is where a run begins: once it has checkpoints of its own it goes on from them, or a job
    in the queue would begin again at each start. Only a path among its own leads back, and those
    after it are set aside.

    Raises UserError when it cannot be had, is of another model, or when `never` would mix two runs
    in one directory.
    """
    config, root = trainer.config, checkpoint_root(trainer.config)
    load = partial(_fill, trainer)
    path = named_checkpoint(config)
    # By rank 0's word: file systems do not show all nodes the same at every moment.
    is_begun_now = not trainer.hierarchy.all_true(not (trainer.is_first and is_begun(config)))
    is_back = leads_back(config) and not is_begun_now
    if config.checkpoint.resume == "never" and not is_begun_now:
        _refuse_old_checkpoints(trainer, root)
        _note_begun(trainer)
        return
    found = None if is_back else open_newest(root, load, trainer.hierarchy, logbook.remark)
    if found is not None and path is not None and not leads_back(config):
        logbook.remark(f"checkpoint.resume: {path}: not used, the run has checkpoints of its own")
    is_start = found is None and not is_back
    if found is None and path is not None:
        found = load_checkpoint(_one(path, trainer.hierarchy), load, trainer.hierarchy)
    if found is None:
        return
    states = restored(trainer, found.manifest)
    share_shards(trainer.engine, states)
    trainer.engine.restore("published" in states)
    _take_up(trainer, found.manifest)
    logbook.remark(f"resumed from {found.path} at step {trainer.step}")
    if trainer.step >= trainer.last_step:
        _say_done(trainer, found.path, is_start, logbook)
    for line in _changes(trainer, found.manifest):
        logbook.remark(line)
    if is_back:
        trainer.hierarchy.together(partial(_give_up_later, trainer, root))
        _note_begun(trainer)


def _one(path: Path, hierarchy: Hierarchy) -> Path:
    """The checkpoint that a path stands for, by rank 0's word: another run may be writing there."""
    name = ""

    def look() -> None:
        nonlocal name
        if hierarchy.rank == 0:
            name = str(newest(path))

    hierarchy.together(look)
    return Path(from_rank_0(hierarchy, name))


def _say_done(trainer: Trainer, path: Path, is_start: bool, logbook: Logbook) -> None:
    """Nothing is left to do: right for a run that is started once more, wrong for a new one."""
    key = "stop_at" if trainer.config.train.stop_at else "steps"
    problem = f"train.{key}: {trainer.last_step}"
    if is_start:
        raise UserError(f"{problem}, need more than {trainer.step}, the step of {path}")
    logbook.remark(f"{problem}: reached, nothing left to do")


def _note_begun(trainer: Trainer) -> None:
    if trainer.is_first:
        note_begun(Path(trainer.config.run.directory), trainer.config.checkpoint.resume)


def _refuse_old_checkpoints(trainer: Trainer, root: Path) -> None:
    old = next(candidates(root), None) if trainer.is_first else None
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
    """This rank's part of every state that both sides have. Others start from zero: a checkpoint
    that proved damaged half-way may have left something in them."""
    units = trainer.engine.units
    for tensors in (*trainer.optimizer.moments.values(), *(u.errors.values() for u in units)):
        for tensor in tensors:
            tensor.zero_()
    states = restored(trainer, checkpoint.manifest)
    fill_shards(checkpoint, trainer.config.model, trainer.engine, states)


def fill_shards(
    checkpoint: Checkpoint,
    model: ModelConfig,
    engine: Engine,
    states: Mapping[str, Sequence[torch.Tensor]],
) -> None:
    """Load this rank's shard of each unit in these states; its replicas wait for `share_shards`, or
    hundreds of them would read the same files. Raises UserError for another model."""
    check_model(model, checkpoint)
    depth = engine.placement.optimizer
    if engine.hierarchy.is_first_replica(depth):
        layouts = [unit.layout for unit in engine.units]
        checkpoint.fill(layouts, states, *engine.hierarchy.piece(depth))


def share_shards(engine: Engine, states: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Give the replicas what the first one has loaded. All ranks call it."""
    for state, tensors in states.items():
        if state != "error":  # of which the first replica alone has to speak
            engine.hierarchy.to_replicas(tensors, engine.placement.optimizer)


def restored(trainer: Trainer, manifest: Manifest) -> dict[str, Sequence[torch.Tensor]]:
    """The states to take up. An imported checkpoint has weights only, and one of another placement
    or other wires may lack some of ours."""
    return {state: found for state, found in shards(trainer).items() if state in manifest.states}


def _take_up(trainer: Trainer, manifest: Manifest) -> None:
    trainer.step = manifest.step
    trainer.tokens = manifest.tokens
    trainer.optimizer.restore(int(manifest.extra.get("optimizer_steps", 0)))
    saved_scale = manifest.extra.get("loss_scale", {})
    trainer.loss_scale.restore(saved_scale)
    # What gradients have left unsaid is in units of the scale, which another precision changes.
    trainer.engine.scale_errors(trainer.loss_scale.scale / saved_scale.get("scale", 1.0))
    trainer.spikes.restore(manifest.extra.get("spikes", {}))
    step, sample = manifest.extra.get("data") or _position(manifest)
    trainer.loader.go_on(manifest.step, (step, sample))


def _position(manifest: Manifest) -> tuple[int, int]:
    """Where the data stood, from before checkpoints said so."""
    own = data_step(manifest.step, _value(manifest.config, "data.skip") or [])
    return own, own * _global_batch(manifest)


def _global_batch(manifest: Manifest) -> int:
    return int(_value(manifest.config, "train.global_batch") or 0)


def check_model(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Refuse weights that fit, of a model that computes something else with them. Raises
    UserError."""
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
        "vocab_size": model.vocab_size,
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
    lines += _data_changes(trainer.config, manifest) or _window_changes(trainer, manifest)
    before, now = _global_batch(manifest), trainer.config.train.global_batch
    if manifest.step and before != now:
        _, sample = trainer.loader.position(trainer.step)
        lines.append(f"train.global_batch: {now}, was {before}; the data go on at sample {sample}")
    return lines


def _data_changes(config: Config, manifest: Manifest) -> list[str]:
    """What gives the numbers of the samples another meaning: some are then read twice."""
    if not manifest.step:
        return []
    now, before = (
        {key: _value(values, key) for key in ORDER_KEYS}
        for values in (config_to_dict(config), manifest.config)
    )
    return [
        f"warning: {key}: {now[key]}, was {before[key]}; samples are others from here on"
        for key in ORDER_KEYS
        if before[key] is not None and before[key] != now[key]
    ]


def _window_changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """The order is one of all windows: a corpus that has grown, or `data.valid` in place of a part
    of `data.train`, changes it from the first to the last."""
    now, before = trainer.loader.windows, manifest.extra.get("windows", trainer.loader.windows)
    if not manifest.step or now == before:
        return []
    return [f"warning: data.train: {now} windows, was {before}; samples are others from here on"]


def _value(config: Mapping[str, Any], key: str) -> Any:
    """None where an older or imported checkpoint does not say."""
    section, _, name = key.rpartition(".")
    return (config.get(section, {}) if section else config).get(name)
