"""How a run takes up a checkpoint, and which one."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megafrontier.checkpoint.folder import (
    candidates,
    is_set_aside,
    list_checkpoints,
    of_newest,
    set_later_aside,
    step_of,
    take_back,
)
from megafrontier.checkpoint.load import Checkpoint, read_manifest
from megafrontier.checkpoint.manifest import Manifest
from megafrontier.checkpoint.resume import load_checkpoint, open_newest
from megafrontier.common.errors import StorageFailed, UserError, as_fatal_error
from megafrontier.config import Config, ModelConfig
from megafrontier.model.flops import parameter_shapes
from megafrontier.partition import Engine
from megafrontier.training.callbacks.save import checkpoint_root, shards
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.resume.compatibility import changes, check_model, old_position
from megafrontier.training.resume.restarts import has_begun, reached_step, record_begun
from megafrontier.training.trainer import Trainer


def check_resume(config: Config) -> None:
    """Raises UserError where `checkpoint.resume` names a checkpoint that is needed and not sound at
    first sight."""
    path = named_checkpoint(config)
    if config.checkpoint.weights_only and (path is None or leads_back(config)):
        raise UserError(
            f"checkpoint.resume: {config.checkpoint.resume}, but checkpoint.weights_only is true; "
            "need the path of another run's checkpoint"
        )
    if path is None:
        return
    if leads_back(config) and step_of(path) is None and not is_set_aside(path):
        raise UserError(
            f"checkpoint.resume: {path}: another name among the run's own checkpoints; need its "
            "name, as step-00000100, which checkpoint.keep_every may keep for good"
        )
    if _own_newest(config) is not None:
        return
    try:
        of_newest(path, read_manifest)
    except UserError as error:
        raise UserError(
            f"checkpoint.resume: {error}; need auto, never or the path of a checkpoint"
        ) from error


def check_own(config: Config) -> None:
    """Raises UserError as `check_resume`, and where the run cannot go on from what it would: a
    checkpoint is of another model, or `checkpoint.resume` is `never` and some are there. The ranks
    find out themselves; this looks at one manifest, before a job waits for them."""
    check_resume(config)
    if config.checkpoint.resume == "never":
        if not is_begun(config):
            _refuse_old_checkpoints(checkpoint_root(config))
        return
    path, one = named_checkpoint(config), _own_newest(config)

    def look_at(one: Path) -> None:
        checkpoint = Checkpoint(one, read_manifest(one))
        checkpoint.check_shapes(parameter_shapes(config.model))
        check_model(config.model, checkpoint)

    if one is not None:
        look_at(one)
    elif path is not None:
        of_newest(path, look_at)


def _own_newest(config: Config) -> Path | None:
    """The run's own newest checkpoint, where it goes on from that."""
    own = list_checkpoints(checkpoint_root(config))
    return own[-1] if own and (not leads_back(config) or is_begun(config)) else None


def named_checkpoint(config: Config) -> Path | None:
    """The path in `checkpoint.resume`, of a checkpoint or of a folder or run whose newest is meant;
    None for auto and never. A link to one of the run's own stands for that."""
    wanted = config.checkpoint.resume
    if wanted in ("auto", "never"):
        return None
    meant = Path(wanted).resolve()
    return meant if _is_own(config, meant) else Path(wanted)


def _is_own(config: Config, path: Path) -> bool:
    """Whether a path is in the run's own folder, wherever a link there leads: checkpoints may lie
    elsewhere."""
    return path.parent.resolve() == checkpoint_root(config).resolve()


def leads_back(config: Config) -> bool:
    """Whether the run is to go back to a checkpoint of its own."""
    path = named_checkpoint(config)
    return path is not None and _is_own(config, path)


def is_begun(config: Config) -> bool:
    """Whether an earlier start of this Slurm job or by this torchrun, with the same arguments, has
    gone back or begun anew as they say: then this one goes on."""
    return has_begun(Path(config.run.directory), config.checkpoint.resume)


def goes_on(config: Config) -> bool:
    """Whether another start as this one would take up the newest checkpoint."""
    if config.checkpoint.resume != "never" and not leads_back(config):
        return True
    try:
        # Whom torchrun started, a user starts with another one.
        return "SLURM_JOB_ID" in os.environ and is_begun(config)
    except StorageFailed:
        return False


def resume(trainer: Trainer, run_logger: RunLogger) -> None:
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
    is_begun_now = trainer.world.broadcast_from_rank_0(lambda: str(is_begun(config))) == "True"
    is_back = leads_back(config) and not is_begun_now
    if config.checkpoint.resume == "never" and not is_begun_now:
        refuse = partial(_refuse_old_checkpoints, root)
        trainer.world.run_on_all(refuse if trainer.is_first else lambda: None)
        trainer.world.run_on_all(partial(_note_begun, trainer))
        return
    trainer.world.run_on_all(partial(_refuse_loose_link, trainer, root))
    found = None if is_back else open_newest(root, load, trainer.world, run_logger.info)
    if found is not None and path is not None and not leads_back(config):
        run_logger.info(f"checkpoint.resume: {path}: not used, the run has checkpoints of its own")
    is_start = found is None and not is_back
    if found is None and path is not None:
        load = partial(load, is_start=is_start)
        load_it = partial(load_checkpoint, load=load, world=trainer.world)
        found = of_newest(path, load_it, trainer.world.broadcast_from_rank_0)
    if found is None:
        _say_lost(trainer, root, run_logger)
        return
    _go_on_from(found, trainer, is_start, run_logger)
    if is_back:
        trainer.world.run_on_all(partial(_give_up_later, trainer, root, found.path, run_logger))
        trainer.world.run_on_all(partial(_note_begun, trainer))


def _go_on_from(found: Checkpoint, trainer: Trainer, is_start: bool, run_logger: RunLogger) -> None:
    """After this rank's part of it has been read."""
    manifest = _taken(trainer.config, found.manifest, is_start)
    states = restored(trainer, manifest)
    share_shards(trainer.engine, states)
    trainer.engine.restore("published" in states)
    _take_up(trainer, manifest)
    of = "" if manifest is found.manifest else "the weights of "
    run_logger.info(f"resumed from {of}{found.path} at step {trainer.step}")
    if trainer.step >= trainer.last_step:
        _say_done(trainer, found.path, is_start, run_logger)
        return
    for line in changes(trainer, manifest):
        run_logger.info(line)


def _taken(config: Config, manifest: Manifest, is_start: bool) -> Manifest:
    """What a run takes up of a checkpoint. With `checkpoint.weights_only` it begins with no more
    than an imported one has."""
    if not (is_start and config.checkpoint.weights_only):
        return manifest
    weights = {"weight": manifest.states["weight"]}
    return replace(manifest, step=0, tokens=0, states=weights, rng={}, extra={"data": (0, 0)})


def _refuse_loose_link(trainer: Trainer, root: Path) -> None:
    """Without the storage that it leads to, the run would begin anew and could not save."""
    if trainer.is_first and root.is_symlink() and not root.exists():
        raise StorageFailed(f"{root}: leads to {root.readlink()}, which is not there")


def _say_lost(trainer: Trainer, root: Path, run_logger: RunLogger) -> None:
    """That a run which has been further begins at step 0: perhaps its checkpoints are away."""
    if trainer.is_first:
        reached = reached_step(Path(trainer.config.run.directory) / "metrics.jsonl")
        if reached:
            run_logger.info(
                f"warning: {root}: no checkpoints, though metrics.jsonl has step {reached}; "
                "beginning at step 0"
            )


def _say_done(trainer: Trainer, path: Path, is_start: bool, run_logger: RunLogger) -> None:
    """Nothing is left to do: right for a run that is started once more, wrong for a new one."""
    key = "stop_at" if trainer.config.train.stop_at else "steps"
    problem = f"train.{key}: {trainer.last_step}"
    if is_start:
        raise UserError(
            f"{problem}, need more than {trainer.step}, the step of {path}, or "
            "checkpoint.weights_only=true"
        )
    run_logger.info(f"{problem}: reached, nothing left to do; another run.name begins anew")


def _note_begun(trainer: Trainer) -> None:
    if trainer.is_first:
        record_begun(Path(trainer.config.run.directory), trainer.config.checkpoint.resume)


def _refuse_old_checkpoints(root: Path) -> None:
    try:
        old = next(candidates(root), None)
    except OSError as error:
        raise as_fatal_error(error, f"checkpoint.resume: {root}: {error.strerror}") from error
    if old is not None:
        raise UserError(
            f"checkpoint.resume: never, but {old} is there; need another run.name, or move it"
        )


def _give_up_later(trainer: Trainer, root: Path, path: Path, run_logger: RunLogger) -> None:
    """Begin a line of training at the checkpoint at `path`: of those in `root` it is the newest."""
    if not trainer.is_first:
        return
    try:
        set_later_aside(root, trainer.step)
        if is_set_aside(path):
            run_logger.info(f"{path} is {take_back(path, trainer.step).name} again")
    except OSError as error:
        line = f"checkpoint.resume: {root}: {error.strerror}, need to set checkpoints aside"
        raise as_fatal_error(error, line) from error


def _fill(trainer: Trainer, checkpoint: Checkpoint, is_start: bool = False) -> None:
    """This rank's part of every state that both sides have. Others start from zero: a checkpoint
    that proved damaged half-way may have left something in them."""
    units = trainer.engine.units
    for unit in units:
        unit.feedback.clear()
    for tensors in trainer.optimizer.moments.values():
        for tensor in tensors:
            tensor.zero_()
    states = restored(trainer, _taken(trainer.config, checkpoint.manifest, is_start))
    try:
        fill_shards(checkpoint, trainer.config.model, trainer.engine, states)
    except UserError as error:
        # Others are of one that is damaged, say.
        if type(error) is not UserError or not _is_own(trainer.config, checkpoint.path):
            raise
        raise UserError(f"{error}; another run.name begins anew") from error


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
        checkpoint.fill(layouts, states, *engine.hierarchy.shard_index(depth))


def share_shards(engine: Engine, states: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Give the replicas what the first one has loaded. All ranks call it."""
    for state, tensors in states.items():
        if state != "error":  # which the first replica alone is to send
            engine.hierarchy.broadcast_to_replicas(tensors, engine.placement.optimizer)


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
    # Errors are in units of the scale, which another precision changes.
    trainer.engine.scale_errors(trainer.loss_scale.scale / saved_scale.get("scale", 1.0))
    trainer.spikes.restore(manifest.extra.get("spikes", {}))
    for name, state in manifest.extra.get("callbacks", {}).items():
        if name in trainer.stateful:
            trainer.stateful[name].load_state_dict(state)
    step, sample = manifest.extra.get("data") or old_position(manifest)
    trainer.loader.resume_at(manifest.step, (step, sample))
