"""The states of an engine and its optimizer that checkpoints hold, as this rank's shards."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megafrontier.checkpoint.boxes import BoxEntry, with_boxes
from megafrontier.checkpoint.format import BUFFER, OPTIMIZER, Manifest
from megafrontier.checkpoint.load import Checkpoint, global_shapes
from megafrontier.checkpoint.requests import Request, requests_of
from megafrontier.checkpoint.save import Attach, OwnShard, PendingSave
from megafrontier.checkpoint.sets import ShardSet, StoredUnit
from megafrontier.common.errors import UserError
from megafrontier.partition import Engine
from megafrontier.partition.layout import Entry, Layout
from megafrontier.partition.unit import Unit

States = Mapping[str, Sequence[torch.Tensor | None]]
"""By state, this rank's 1-D shard of each of the engine's units; None for a unit without it."""
OptimizerStates = Mapping[str, Sequence[torch.Tensor | None]]
"""The same of the trained units, None for a unit whose optimizer has no such state."""
Buffers = Mapping[str, torch.Tensor]
"""Buffers of a model by name, which are the same on every rank."""
NO_BUFFERS: Buffers = {}


def engine_states(
    engine: Engine, optimizer_states: OptimizerStates
) -> dict[str, list[torch.Tensor | None]]:
    """This rank's shards in every state.

    The weights used in computation are left out, because they follow from the fp32 masters, except
    with delta wires (`published`). So are errors without error feedback.
    """
    units = engine.units
    found: dict[str, list[torch.Tensor | None]] = {"weight": [unit.master for unit in units]}
    for state, tensors in optimizer_states.items():
        trained = iter(tensors)
        found[state] = [None if unit.is_frozen else next(trained) for unit in units]
    if engine.have_deltas and not units[0].computes_with_masters:
        found["published"] = [unit.published for unit in units]
    errors = [unit.feedback.error for unit in units]
    if any(error is not None for error in errors):
        found["error"] = errors
    return found


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to a model's state, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def save_engine(
    root: Path, engine: Engine, optimizer_states: OptimizerStates, *args: Any, **about: Any
) -> Path:
    """Save a checkpoint of an engine and its optimizer, as `start_save` begins it; all ranks call
    it. Returns its folder. Raises CheckpointWriteError on all ranks."""
    return start_save(root, engine, optimizer_states, *args, **about).finish()


def start_save(
    root: Path,
    engine: Engine,
    optimizer_states: OptimizerStates,
    attach: Attach | None = None,
    *,
    buffers: Buffers = NO_BUFFERS,
    **about: Any,
) -> PendingSave:
    """Begin to save a checkpoint of an engine and its optimizer; all ranks call it.

    `about` are the other fields of the manifest. Raises CheckpointWriteError on all ranks.
    """
    engine.finish_publishing()
    with engine.ledger.paused():
        engine.fold_errors()
    own = own_shards(engine, optimizer_states, buffers)
    return PendingSave(root, Manifest(**about), own, engine.hierarchy.world, attach)


def own_shards(
    engine: Engine, optimizer_states: OptimizerStates, buffers: Buffers = NO_BUFFERS
) -> list[OwnShard]:
    """This rank's shard of each set that a checkpoint has: of the engine's states and, as a copy,
    of the buffers."""
    own = _own_shards(engine, engine_states(engine, optimizer_states))
    over = engine.hierarchy
    return own + buffers_shard(buffers, over.outside, over.device, is_writer=over.rank == 0)


def _own_shards(engine: Engine, states: States) -> list[OwnShard]:
    """This rank's shard of each set: the units that lie on the same ranks, cut in the same way."""
    by_set: dict[str, list[int]] = {}
    for number, unit in enumerate(engine.units):
        by_set.setdefault(_set_name(engine, unit), []).append(number)
    found = []
    for name, numbers in by_set.items():
        units = [_stored(engine.units[number], number, states) for number in numbers]
        unit = engine.units[numbers[0]]
        index, num_shards = unit.hierarchy.shard_index(unit.placement.optimizer)
        shards = {state: [tensors[n] for n in numbers] for state, tensors in states.items()}
        found.append(OwnShard(ShardSet(name, num_shards, units), index, unit.counts, shards))
    return found


def _set_name(engine: Engine, unit: Unit) -> str:
    """Where the unit's ranks are in the mesh, and the number of its shards if that is not the
    engine's. The name is the same on all these ranks, and other ranks have other names."""
    hierarchy = unit.hierarchy
    names = [f"{axis}{index}" for axis, index in hierarchy.outside]
    _, num_shards = hierarchy.shard_index(unit.placement.optimizer)
    if num_shards != hierarchy.shard_index(engine.placement.optimizer)[1]:
        names.append(f"of{num_shards}")
    return "-".join(names)


def _stored(unit: Unit, number: int, states: States) -> StoredUnit:
    held = ((state, tensors[number]) for state, tensors in states.items())
    types = {state: tensor.dtype for state, tensor in held if tensor is not None}
    return StoredUnit(with_boxes(unit.layout, unit.specs), types)


def buffers_shard(
    buffers: Buffers,
    outside: Iterable[tuple[str, int]] = (),
    device: torch.device | str = "cpu",
    *,
    is_writer: bool = True,
) -> list[OwnShard]:
    """The set of all buffers, with one unit for each type; none without buffers. `outside`: names
    of axes and this rank's indices, if other ranks have other buffers."""
    by_type: dict[torch.dtype, list[str]] = {}
    for name, buffer in buffers.items():
        by_type.setdefault(buffer.dtype, []).append(name)
    units, flat = [], []
    for dtype, names in by_type.items():
        shapes = [(name, tuple(buffers[name].shape)) for name in names]
        layout = Layout.build(f"buffers {dtype}".replace("torch.", ""), shapes, 1)
        values = torch.zeros(layout.numel, dtype=dtype, device=device)
        for name, view in zip(names, layout.views(values), strict=True):
            view.copy_(buffers[name])
        units.append(StoredUnit.of(layout, {BUFFER: dtype}))
        flat.append(values)
    if not units:
        return []
    name = "-".join(["buffers", *(f"{axis}{i}" for axis, i in outside)])
    return [OwnShard(ShardSet(name, 1, units), 0, is_writer, {BUFFER: flat})]


def fill_shards(
    checkpoint: Checkpoint, engine: Engine, states: States, buffers: Buffers = NO_BUFFERS
) -> None:
    """Load this rank's shard of each unit in these states, and the buffers that the checkpoint has.
    Replicas get theirs by `restore_engine`; otherwise hundreds of them would read the same files.
    Raises UserError for another model."""
    for unit in engine.units:
        unit.feedback.clear()  # a checkpoint that turned out to be damaged may have left something
    layouts = [with_boxes(unit.layout, unit.specs) for unit in engine.units]
    saved = checkpoint.shapes
    # Frozen parameters come with the model: a checkpoint may lack them, but for all of a unit.
    is_there = [
        not unit.is_frozen or layout.entries[0].name in saved
        for unit, layout in zip(engine.units, layouts, strict=True)
    ]
    # The stages of a pipeline have a part of the model each.
    is_all = not engine.hierarchy.outside
    checkpoint.check_shapes(global_shapes(compress(layouts, is_there)), is_all)
    requests = [
        request
        for state, shards in states.items()
        for unit, layout, shard, known in zip(engine.units, layouts, shards, is_there, strict=True)
        if unit.counts and shard is not None and known
        for request in requests_of(state, layout, *unit.range, shard)
    ]
    loaded: dict[str, torch.Tensor] = {}
    if engine.hierarchy.rank == 0:
        loaded = _known_buffers(checkpoint, buffers, is_all)
    requests += [
        Request(BUFFER, BoxEntry.of(Entry(name, tuple(value.shape), 0)), 0, value.view(-1))
        for name, value in loaded.items()
    ]
    checkpoint.read(requests)
    for name, value in loaded.items():
        buffers[name].copy_(value)


def _known_buffers(
    checkpoint: Checkpoint, buffers: Buffers, is_all_of_them: bool
) -> dict[str, torch.Tensor]:
    """Memory for the buffers that a checkpoint has. Raises UserError for one of another shape, and
    for one that the model lacks if `is_all_of_them`, unless it is of an optimizer."""
    found = {}
    for name in checkpoint.manifest.buffers:
        shape = tuple(checkpoint.manifest.tensors[name][0].entry.global_shape)
        own = tuple(buffers[name].shape) if name in buffers else None
        if own is None and (not is_all_of_them or name.startswith(OPTIMIZER)):
            continue
        if own != shape:
            has = "missing" if own is None else f"shape {list(own)}"
            raise UserError(
                f"{checkpoint.path}: buffer {name}: shape {list(shape)} in the checkpoint, "
                f"{has} in the model"
            )
        found[name] = torch.empty(shape, dtype=buffers[name].dtype)
    return found


def restore_engine(engine: Engine, states: States, buffers: Buffers = NO_BUFFERS) -> None:
    """Bring what `fill_shards` has loaded to all ranks: shards to the replicas, and the weights to
    every rank. All ranks call it."""
    for state, tensors in states.items():
        for unit, tensor in zip(engine.units, tensors, strict=True):
            if tensor is not None and state != "error":  # only the first replica sends it
                unit.hierarchy.broadcast_to_replicas([tensor], unit.placement.optimizer)
    for buffer in buffers.values():
        raw = buffer.contiguous()
        is_bool = raw.dtype is torch.bool
        engine.hierarchy.broadcast_to_replicas([raw.view(torch.uint8) if is_bool else raw], 0)
        buffer.copy_(raw)
    engine.restore("published" in states)
