"""The states of an engine and its optimizer that checkpoints hold, as this rank's shards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.load import Checkpoint
from megafrontier.checkpoint.save import Attach, save
from megafrontier.partition import Engine

States = Mapping[str, Sequence[torch.Tensor]]
"""By state, this rank's 1-D shard of each unit."""
OptimizerStates = Mapping[str, Sequence[torch.Tensor | None]]
"""The same of the trained units, None for a unit whose optimizer has no such state."""


def engine_states(engine: Engine, optimizer_states: OptimizerStates) -> States:
    """This rank's shards in every state.

    The weights used in computation are left out, because they follow from the fp32 masters, except
    with delta wires (`published`). So are errors without error feedback.
    """
    masters = [unit.master for unit in engine.trained_units]
    found = {"weight": masters}
    for state, shards in optimizer_states.items():
        # In format version 1 all units have the same states.
        pairs = zip(masters, shards, strict=True)
        found[state] = [torch.zeros_like(master) if s is None else s for master, s in pairs]
    if engine.wires.have_deltas and not engine.trained_units[0].computes_with_masters:
        found["published"] = [unit.published for unit in engine.trained_units]
    errors = [
        unit.feedback.error for unit in engine.trained_units if unit.feedback.error is not None
    ]
    if errors:
        found["error"] = errors
    return found


def save_engine(
    root: Path,
    engine: Engine,
    optimizer_states: OptimizerStates,
    attach: Attach | None = None,
    **about: Any,
) -> Path:
    """Save a checkpoint of an engine and its optimizer; all ranks call it. Returns its folder.

    `about` are the other fields of the manifest. Raises CheckpointWriteError on all ranks.
    """
    hierarchy, depth = engine.hierarchy, engine.placement.optimizer
    engine.finish_publishing()
    with engine.ledger.paused():
        engine.fold_errors()
    states = engine_states(engine, optimizer_states)
    index, num_shards = hierarchy.shard_index(depth)
    manifest = Manifest(
        units=[unit.layout for unit in engine.trained_units],
        num_shards=num_shards,
        states={state: tensors[0].dtype for state, tensors in states.items()},
        **about,
    )
    is_writer = hierarchy.is_first_replica(depth)
    return save(root, manifest, states, index, is_writer, hierarchy.world, attach)


def fill_shards(checkpoint: Checkpoint, engine: Engine, states: States) -> None:
    """Load this rank's shard of each unit in these states. Replicas get theirs by `share_shards`;
    otherwise hundreds of them would read the same files. Raises UserError for another model."""
    depth = engine.placement.optimizer
    if engine.hierarchy.is_first_replica(depth):
        layouts = [unit.layout for unit in engine.trained_units]
        checkpoint.fill(layouts, states, *engine.hierarchy.shard_index(depth))


def share_shards(engine: Engine, states: States) -> None:
    """Broadcast what the first replica has loaded to the others. All ranks call it."""
    for state, tensors in states.items():
        if state != "error":  # only the first replica sends it with its gradients
            engine.hierarchy.broadcast_to_replicas(tensors, engine.placement.optimizer)
