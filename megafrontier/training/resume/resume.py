"""Resume: which checkpoint a run goes on from, and how it loads that.

Note [Which checkpoint]
A path in `checkpoint.resume` says where a run begins. Once the run has checkpoints of its own, it
goes on from the newest of these; otherwise a job in the queue would begin again at each start. If
the path is one of the run's own checkpoints, the run goes back to it and sets later ones aside,
once for each launch: a requeued job has the same arguments. The same holds for `never`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megafrontier.checkpoint.folder import is_set_aside, restore, set_later_aside
from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.load import Checkpoint, load_checkpoint, open_newest, read_manifest
from megafrontier.checkpoint.local.store import SnapshotStore
from megafrontier.checkpoint.states import States, fill_shards, persistent_buffers, restore_engine
from megafrontier.common.checkpoints import candidates, list_checkpoints, of_newest, step_of
from megafrontier.common.errors import StorageFailed, UserError
from megafrontier.config import Config
from megafrontier.model.flops import parameter_shapes
from megafrontier.optim.groups import EMA
from megafrontier.training.callbacks.save import checkpoint_root, shards
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.resume.compatibility import changes, check_model, check_optimizer
from megafrontier.training.resume.restarts import has_begun, record_begun
from megafrontier.training.resume.upcycle import upcycled
from megafrontier.training.trainer import Trainer


def check_resume(config: Config) -> None:
    """Raise UserError if `checkpoint.resume` names a checkpoint that the run needs and whose
    manifest is not sound. All ranks need not call it."""
    path = named_checkpoint(config)
    if config.checkpoint.weights_only and (path is None or goes_back(config)):
        raise UserError(
            f"checkpoint.resume: {config.checkpoint.resume}, but checkpoint.weights_only is true; "
            "need the path of another run's checkpoint"
        )
    if path is None:
        return
    if _own_newest(config) is not None:
        return
    try:
        of_newest(path, read_manifest)
    except UserError as error:
        raise UserError(
            f"checkpoint.resume: {error}; need auto, never or the path of a checkpoint"
        ) from error


def check_own(config: Config) -> None:
    """Raise UserError if a run would not start: as `check_resume`, if the checkpoint it resumes
    from is of another model, or if `checkpoint.resume` is `never` and there are checkpoints.

    For use before a job is submitted; the ranks find out themselves. Reads one manifest.
    """
    check_resume(config)
    if config.checkpoint.resume == "never":
        if not has_begun_as_asked(config):
            _refuse_old_checkpoints(checkpoint_root(config))
        return

    def check_one(path: Path) -> None:
        weights_only = config.checkpoint.weights_only
        checkpoint = upcycled(config, Checkpoint(path, read_manifest(path)), weights_only)
        check_model(config.model, checkpoint)  # first, because it names all keys that differ
        checkpoint.check_shapes(parameter_shapes(config.model))
        if not weights_only:
            check_optimizer(config, checkpoint)

    named, own = named_checkpoint(config), _own_newest(config)
    if own is not None:
        check_one(own)
    elif named is not None:
        of_newest(named, check_one)


def named_checkpoint(config: Config) -> Path | None:
    """The path in `checkpoint.resume` (of a checkpoint, or of a run or folder whose newest is
    meant), None for auto and never. A link to one of the run's own checkpoints is resolved."""
    wanted = config.checkpoint.resume
    if wanted in ("auto", "never"):
        return None
    resolved = Path(wanted).resolve()
    return resolved if _is_own(config, resolved) else Path(wanted)


def _is_own(config: Config, path: Path) -> bool:
    """Whether a path is one of the run's own checkpoints, whose folder may be a link."""
    is_checkpoint = step_of(path) is not None or is_set_aside(path)
    return is_checkpoint and path.parent.resolve() == checkpoint_root(config).resolve()


def _own_newest(config: Config) -> Path | None:
    """The run's own newest checkpoint, if the run resumes from it."""
    own = list_checkpoints(checkpoint_root(config))
    return own[-1] if own and (not goes_back(config) or has_begun_as_asked(config)) else None


def goes_back(config: Config) -> bool:
    """Whether `checkpoint.resume` names one of the run's own checkpoints."""
    path = named_checkpoint(config)
    return path is not None and _is_own(config, path)


def has_begun_as_asked(config: Config) -> bool:
    """Whether an earlier start of this launch has gone back, or begun anew, as `checkpoint.resume`
    says. Then this start goes on from the newest checkpoint (Note [Which checkpoint])."""
    return has_begun(Path(config.run.directory), config.checkpoint.resume)


def begins_anew(config: Config) -> bool:
    """Whether this start gives up later steps of the run, because `checkpoint.resume` says so."""
    is_asked = config.checkpoint.resume == "never" or goes_back(config)
    return is_asked and not has_begun_as_asked(config)


def resume(
    trainer: Trainer, run_logger: RunLogger, snapshots: SnapshotStore | None = None
) -> Checkpoint | None:
    """Load the checkpoint that `checkpoint.resume` asks for, if any (Note [Which checkpoint]), or a
    newer snapshot of the run. All ranks call it. Returns what has then replaced all values.

    Raises on all ranks: UserError if the checkpoint cannot be loaded, is of another model, or if
    `never` would mix two runs in one directory; StorageFailed.
    """
    config, root, world = trainer.config, checkpoint_root(trainer.config), trainer.world
    load = partial(_load_shards, trainer)
    path = named_checkpoint(config)
    is_begun = world.broadcast_from_rank_0(lambda: str(has_begun_as_asked(config))) == "True"
    is_back = goes_back(config) and not is_begun
    record = partial(record_begun, Path(config.run.directory), config.checkpoint.resume)
    if config.checkpoint.resume == "never" and not is_begun:
        _on_rank_0(trainer, partial(_refuse_old_checkpoints, root))
        _on_rank_0(trainer, record)
        return None
    _on_rank_0(trainer, partial(_refuse_loose_link, root))
    open_near = (snapshots.open_newest,) if snapshots else ()
    found = None if is_back else open_newest(root, load, world, run_logger.info, *open_near)
    if snapshots is not None:
        snapshots.keep(found)
    if found is not None and path is not None and not goes_back(config):
        run_logger.info(f"checkpoint.resume: {path}: not used, the run has checkpoints of its own")
    is_start = found is None and not is_back
    if found is None and path is not None:
        load = partial(load, is_start=is_start)
        load_named = partial(load_checkpoint, load=load, world=world)
        found = of_newest(path, load_named, world.broadcast_from_rank_0)
    if found is None:
        return None
    _go_on_from(found, trainer, is_start, run_logger)
    if is_back:
        _on_rank_0(trainer, partial(_set_later_aside, root, trainer.step, found.path, run_logger))
        _on_rank_0(trainer, record)
    return found


def _on_rank_0(trainer: Trainer, act: Callable[[], None]) -> None:
    """Call `act` on rank 0. All ranks raise its error."""
    trainer.world.run_on_all(act if trainer.is_first else lambda: None)


def _refuse_old_checkpoints(root: Path) -> None:
    if (old := next(candidates(root), None)) is not None:
        raise UserError(
            f"checkpoint.resume: never, but {old} is there; need another run.name, or move it"
        )


def _refuse_loose_link(root: Path) -> None:
    """If the storage behind the link is away, the run would begin anew and could not save."""
    if root.is_symlink() and not root.exists():
        raise StorageFailed(f"{root}: leads to {root.readlink()}, which is not there")


def _set_later_aside(root: Path, step: int, path: Path, run_logger: RunLogger) -> None:
    """Make the checkpoint at `path`, of this step, the newest in `root`."""
    set_later_aside(root, step)
    if is_set_aside(path):
        run_logger.info(f"{path} is {restore(path, step).name} again")


def _go_on_from(found: Checkpoint, trainer: Trainer, is_start: bool, run_logger: RunLogger) -> None:
    """Take over the state of a checkpoint whose shards this rank has loaded."""
    manifest = _used(trainer.config, found.manifest, is_start)
    states = states_to_load(trainer, manifest)
    restore_engine(trainer.engine, states, persistent_buffers(trainer.model))
    _restore_progress(trainer, manifest)
    of = "" if manifest is found.manifest else "the weights of "
    run_logger.info(f"resumed from {of}{found.origin} at step {trainer.step}")
    if trainer.step < trainer.last_step:
        for line in changes(trainer, manifest):
            run_logger.info(line)
        return
    # Right for a run that is started once more, wrong for a new one.
    key = "stop_at" if trainer.config.train.stop_at else "steps"
    problem = f"train.{key}: {trainer.last_step}"
    if is_start:
        raise UserError(
            f"{problem}, need more than {trainer.step}, the step of {found.path}, or "
            "checkpoint.weights_only=true"
        )
    run_logger.info(f"{problem}: reached, no step is left; another run.name begins anew")


def _used(config: Config, manifest: Manifest, is_start: bool) -> Manifest:
    """What a run uses of a checkpoint. With `checkpoint.weights_only`, it begins with no more than
    an imported checkpoint has."""
    if not (is_start and config.checkpoint.weights_only):
        return manifest
    weights = manifest.with_states("weight")
    return replace(weights, step=0, tokens=0, rng={}, extra={"data": (0, 0)})


def _load_shards(trainer: Trainer, checkpoint: Checkpoint, is_start: bool = False) -> None:
    """Load this rank's shards of every state that both sides have, and set the others to zero: a
    checkpoint that turned out to be damaged may have left something in them."""
    for tensors in trainer.unit_states.values():
        for tensor in tensors:
            if tensor is not None:
                tensor.zero_()
    states = states_to_load(trainer, _used(trainer.config, checkpoint.manifest, is_start))
    weights_only = is_start and trainer.config.checkpoint.weights_only
    checkpoint = upcycled(trainer.config, checkpoint, weights_only)
    check_model(trainer.config.model, checkpoint)
    if not weights_only:
        check_optimizer(trainer.config, checkpoint)
    buffers = _buffers_to_load(trainer, checkpoint)
    if not weights_only:
        buffers |= trainer.optimizer.buffers
    fill_shards(checkpoint, trainer.engine, states, buffers)


def _buffers_to_load(trainer: Trainer, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The model's buffers, and room for those that another `model.moe.balance` does not have."""
    buffers = persistent_buffers(trainer.model)
    for name in checkpoint.manifest.buffers:
        if name.endswith(".router.load") and name not in buffers:
            shape = checkpoint.manifest.tensors[name][0].entry.global_shape
            buffers[name] = torch.empty(shape)
    return buffers


def states_to_load(trainer: Trainer, manifest: Manifest) -> States:
    """This rank's shards of the states that the checkpoint has. An imported one has only weights;
    with another placement or wires it may lack others."""
    return {state: found for state, found in shards(trainer).items() if state in manifest.states}


def _restore_progress(trainer: Trainer, manifest: Manifest) -> None:
    trainer.step = manifest.step
    trainer.tokens = manifest.tokens
    steps = int(manifest.extra.get("optimizer_steps", 0))
    trainer.optimizer.restore(steps, has_average=EMA in manifest.states)
    saved_scale = manifest.extra.get("loss_scale", {})
    trainer.loss_scale.load_state_dict(saved_scale)
    # Errors are in units of the loss scale, which another precision changes.
    trainer.engine.scale_errors(trainer.loss_scale.scale / saved_scale.get("scale", 1.0))
    trainer.spikes.load_state_dict(manifest.extra.get("spikes", {}))
    for name, state in manifest.extra.get("callbacks", {}).items():
        if name in trainer.stateful:
            trainer.stateful[name].load_state_dict(state)
    step, sample = manifest.extra["data"] if manifest.step else (0, 0)  # an import has none
    trainer.loader.resume_at(manifest.step, (step, sample))
