"""Checkpoints of a sharded model and its optimizer."""

from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megafrontier.api.model import sharded
from megafrontier.api.optimizer import Optimizer
from megafrontier.checkpoint.folder import delete_old
from megafrontier.checkpoint.load import Checkpoint, open_newest
from megafrontier.checkpoint.states import (
    OptimizerStates,
    States,
    engine_states,
    fill_shards,
    persistent_buffers,
    restore_engine,
    save_engine,
)
from megafrontier.common.checkpoints import checkpoints_of
from megafrontier.common.errors import need, print_error
from megafrontier.parallel.world import World

_OF_ENGINE = ("weight", "published", "error")
"""States that are not the optimizer's."""


def save(
    model: nn.Module, optimizer: Optimizer | None, folder: str | Path, step: int, keep: int = 0
) -> Path:
    """Save a checkpoint of a sharded model into `folder`/checkpoints; all ranks call it. Returns
    its path.

    It holds the parameters, the optimizer's states and options, and rank 0's buffers, and loads on
    any number of ranks with any placement and splits. After the save the newest `keep` checkpoints
    stay (0: all).

    Raises CheckpointWriteError on all ranks, after which training may go on.
    """
    engine, root = sharded(model).engine, checkpoints_of(folder)
    need(step >= 0, "step", step, "need the number of steps done")
    extra = {} if optimizer is None else {"optimizer": _describe(optimizer, engine.hierarchy.world)}
    states = {} if optimizer is None else optimizer.inner.flat_states()
    buffers = persistent_buffers(model)
    path = save_engine(root, engine, states, buffers=buffers, step=step, tokens=0, extra=extra)
    if optimizer is not None:
        optimizer.inner.compact()
    if engine.hierarchy.world.rank == 0:
        delete_old(root, keep, keep_every=0, warn=print_error)
    return path


def load(model: nn.Module, optimizer: Optimizer | None, folder: str | Path) -> int:
    """Load the newest whole checkpoint in `folder`/checkpoints into a sharded model and its
    optimizer; all ranks call it. Returns its step, 0 if there is no checkpoint.

    The optimizer also gets the options of its param groups, as from torch's `load_state_dict`.
    Without `optimizer`, or if the checkpoint has no states of one, only the model is loaded.

    Raises UserError for a checkpoint of another model, another kind of optimizer or another number
    of param groups, and if no checkpoint is whole; StorageFailed.
    """
    engine, buffers = sharded(model).engine, persistent_buffers(model)
    engine.finish_publishing()
    states: States = {}

    def read(checkpoint: Checkpoint) -> None:
        nonlocal states
        held = {} if optimizer is None else _prepare(optimizer, checkpoint)
        known = checkpoint.manifest.states
        states = {s: found for s, found in engine_states(engine, held).items() if s in known}
        fill_shards(checkpoint, engine, states, buffers)

    root = checkpoints_of(folder)
    found = open_newest(root, read, engine.hierarchy.world, print_error)
    if found is None:
        return 0
    restore_engine(engine, states, buffers)
    if optimizer is not None:
        optimizer.inner.compact()
    return found.manifest.step


def _describe(optimizer: Optimizer, world: World) -> dict[str, Any]:
    """An optimizer's class, the options of its groups, and their states that are one number."""
    names, groups = optimizer.scalar_states, optimizer.param_groups
    numbers = torch.full((len(groups), len(names)), -inf, dtype=torch.float64, device=world.device)
    for row, group in zip(numbers, groups, strict=True):
        for part in group["params"][:1]:
            for column, name in enumerate(names):
                row[column] = optimizer.state[part].get(name, -inf)
    if names:  # a rank may have no element of a group
        numbers = world.maximum(numbers.view(-1)).view_as(numbers)
    return {
        "name": type(optimizer.inner.torch).__name__,
        "groups": [
            {key: value for key, value in group.items() if _is_option(key, value)}
            for group in groups
        ],
        "scalars": [
            {name: value for name, value in zip(names, row, strict=True) if value > -inf}
            for row in numbers.tolist()
        ],
    }


def _is_option(key: str, value: object) -> bool:
    """Whether a value of a param group belongs to a checkpoint: not if it chooses a kernel."""
    is_plain = isinstance(value, bool | int | float | str | tuple | None)
    return is_plain and key not in ("fused", "foreach", "capturable", "differentiable")


def _prepare(optimizer: Optimizer, checkpoint: Checkpoint) -> OptimizerStates:
    """Set an optimizer's options and numbers to those of a checkpoint, and make its states flat,
    to be filled. Returns these. Raises UserError if the checkpoint is of another optimizer."""
    saved = checkpoint.manifest.extra.get("optimizer")
    if saved is None:
        return {}
    kind, groups = type(optimizer.inner.torch).__name__, optimizer.param_groups
    for what, own, other in (
        ("optimizer", kind, saved["name"]),
        ("param groups", len(groups), len(saved["groups"])),
    ):
        need(own == other, what, own, f"need {other} as in {checkpoint.path}, or none")
    optimizer.inner.flatten(*(s for s in checkpoint.manifest.states if s not in _OF_ENGINE))
    for group, options, scalars in zip(groups, saved["groups"], saved["scalars"], strict=True):
        group.update(options)
        on_device = group.get("fused") or group.get("capturable")
        for part in group["params"]:
            for name, value in scalars.items():
                device = part.device if on_device else "cpu"
                optimizer.state[part][name] = torch.tensor(value, device=device).float()
    return optimizer.inner.states
