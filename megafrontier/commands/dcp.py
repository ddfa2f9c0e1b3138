"""Checkpoints to and from those of torch.distributed.checkpoint (DCP), in one process.

Weights and buffers have the keys `model.NAME`, other states `optimizer.state.NAME.STATE`, as in the
state dicts that torch makes. Reading a DCP checkpoint runs code that its metadata may hold: only
read those that you trust.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from megafrontier.checkpoint.boxes import BoxEntry
from megafrontier.checkpoint.folder import candidates, of_newest
from megafrontier.checkpoint.format import BUFFER, Manifest
from megafrontier.checkpoint.load import Checkpoint, open_checkpoint
from megafrontier.checkpoint.requests import Request
from megafrontier.checkpoint.save import OwnShard, save
from megafrontier.checkpoint.sets import ShardSet, StoredUnit
from megafrontier.common.errors import UserError
from megafrontier.parallel.world import World
from megafrontier.partition.layout import Layout

PROGRESS = "megafrontier.json"
"""Beside an exported checkpoint: step, tokens, config and what else a run goes on from."""
CHUNK_ELEMENTS = 2**24
_MODEL, _OPTIMIZER = "model.", "optimizer.state."


def export_dcp(path: Path, out: Path) -> Path:
    """Write the newest checkpoint at `path` as a DCP checkpoint into the new folder `out`, chunk by
    chunk. Raises UserError."""
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--dcp {out}: not empty, need a new folder")

    def write(source: Path) -> Path:
        checkpoint = open_checkpoint(source)
        writer, planner = FileSystemWriter(out, thread_count=1), _ChunkPlanner(checkpoint)
        with _in_one_process():
            save_dcp({}, storage_writer=writer, planner=planner, no_dist=True)
        (out / PROGRESS).write_text(json.dumps(_progress(checkpoint.manifest)), encoding="utf-8")
        return source

    return of_newest(path, write)


@contextmanager
def _in_one_process() -> Iterator[None]:
    """Without torch's warning about what `no_dist` asks for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _progress(manifest: Manifest) -> dict[str, Any]:
    keys = ("step", "tokens", "config", "rng", "extra")
    return {key: getattr(manifest, key) for key in keys} | {"buffers": manifest.buffers}


def _key(name: str, state: str) -> str:
    is_model = state in ("weight", BUFFER)
    return f"{_MODEL}{name}" if is_model else f"{_OPTIMIZER}{name}.{state}"


class _ChunkPlanner(DefaultSavePlanner):
    """Gives DCP the tensors of a checkpoint as chunks of whole rows, each read when it is due."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._chunks: dict[tuple[str, torch.Size], tuple[str, str, ChunkStorageMetadata]] = {}

    def create_local_plan(self) -> SavePlan:
        """All chunks of all states of all tensors."""
        items = []
        for name, boxes in self._checkpoint.manifest.tensors.items():
            shape = torch.Size(boxes[0].entry.global_shape)
            for state, dtype in boxes[0].unit.states.items():
                for chunk in _chunks(shape):
                    index = MetadataIndex(_key(name, state), chunk.offsets)
                    self._chunks[index.fqn, chunk.offsets] = name, state, chunk
                    data = TensorWriteData(chunk, TensorProperties(dtype), shape)
                    items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Read a chunk."""
        assert write_item.tensor_data is not None
        assert write_item.index.offset is not None
        name, state, chunk = self._chunks[write_item.index.fqn, write_item.index.offset]
        ends = zip(chunk.offsets, chunk.sizes, strict=True)
        box = tuple((start, start + size) for start, size in ends)
        entry = BoxEntry(name, tuple(chunk.sizes), 0, tuple(write_item.tensor_data.size), box)
        out = torch.empty(chunk.sizes, dtype=write_item.tensor_data.properties.dtype)
        self._checkpoint.read([Request(state, entry, 0, out.view(-1))])
        return out


def _chunks(shape: torch.Size) -> Iterator[ChunkStorageMetadata]:
    """A tensor as chunks of whole rows."""
    rows = max(1, CHUNK_ELEMENTS // max(1, prod(shape[1:]))) if shape else 1
    for first in range(0, shape[0], rows) if shape else ():
        sizes = torch.Size((min(rows, shape[0] - first), *shape[1:]))
        yield ChunkStorageMetadata(torch.Size((first, *(0 for _ in shape[1:]))), sizes)
    if not shape:
        yield ChunkStorageMetadata(torch.Size(()), torch.Size(()))


@dataclass(frozen=True)
class _Found:
    """A tensor of a DCP checkpoint that belongs to parameter or buffer `name`."""

    name: str
    state: str
    key: str
    meta: TensorStorageMetadata


def import_dcp(folder: Path, out: Path) -> Path:
    """Make a checkpoint in `out` of a DCP checkpoint. Returns its path.

    One that `export_dcp` wrote is restored with step and config. Of others all tensors below
    `model`, or without that key all that belong to no optimizer, are weights of step 0, in fp32.

    Raises UserError for a folder that is no DCP checkpoint or has no weights, and for an `out` that
    holds checkpoints.
    """
    if any(candidates(out)):
        raise UserError(f"{out}: holds checkpoints, need another folder")
    reader = FileSystemReader(folder)
    try:
        metadata = reader.read_metadata()
    except OSError as error:
        raise UserError(f"--dcp {folder}: {error.strerror}, need a DCP checkpoint") from error
    progress: dict[str, Any] = {"step": 0, "tokens": 0}
    if (folder / PROGRESS).exists():
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    buffers = set(progress.pop("buffers", ()))
    found = list(_find(metadata, buffers))
    if not any(tensor.state == "weight" for tensor in found):
        raise UserError(f"--dcp {folder}: no weights, need keys such as model.NAME")
    own = _read(reader, found)
    return save(out, Manifest(**progress), [own], World.single())


def _find(metadata: Metadata, buffers: set[str]) -> Iterator[_Found]:
    tensors = {
        key: meta
        for key, meta in metadata.state_dict_metadata.items()
        if isinstance(meta, TensorStorageMetadata)
    }
    has_model = any(key.startswith(_MODEL) for key in tensors)
    for key, meta in tensors.items():
        if key.startswith(_OPTIMIZER):
            name, _, state = key.removeprefix(_OPTIMIZER).rpartition(".")
            parameter = tensors.get(f"{_MODEL}{name}")
            if parameter is not None and parameter.size == meta.size and meta.size:
                yield _Found(name, state, key, meta)
        elif key.startswith(_MODEL) or not (has_model or key.startswith("optim")):
            name = key.removeprefix(_MODEL)
            is_buffer = name in buffers or not meta.properties.dtype.is_floating_point
            yield _Found(name, BUFFER if is_buffer else "weight", key, meta)


def _read(reader: FileSystemReader, found: list[_Found]) -> OwnShard:
    """All tensors, as the only shard of a set that has a unit for each list of states."""
    by_name: dict[str, dict[str, _Found]] = {}
    for tensor in found:
        by_name.setdefault(tensor.name, {})[tensor.state] = tensor
    units: dict[tuple[tuple[str, torch.dtype], ...], list[str]] = {}
    for name, states in by_name.items():
        units.setdefault(tuple((s, _dtype(t)) for s, t in states.items()), []).append(name)
    stored: list[StoredUnit] = []
    shards: dict[str, list[torch.Tensor | None]] = {tensor.state: [] for tensor in found}
    wanted: dict[str, torch.Tensor] = {}
    for number, (types, names) in enumerate(units.items()):
        shapes = [(name, _shape(by_name[name])) for name in names]
        layout = Layout.build(f"imported {number}", shapes, 1)
        stored.append(StoredUnit.of(layout, dict(types)))
        for state, tensors in shards.items():
            dtype = dict(types).get(state)
            flat = None if dtype is None else torch.zeros(layout.numel, dtype=dtype)
            tensors.append(flat)
            for name, view in (
                zip(names, layout.views(flat), strict=True) if flat is not None else ()
            ):
                wanted[by_name[name][state].key] = view
    with _in_one_process():
        load_dcp(wanted, storage_reader=reader, no_dist=True)
    return OwnShard(ShardSet("", 1, stored), 0, True, shards)


def _dtype(tensor: _Found) -> torch.dtype:
    return torch.float32 if tensor.state == "weight" else tensor.meta.properties.dtype


def _shape(states: Mapping[str, _Found]) -> tuple[int, ...]:
    return tuple(next(iter(states.values())).meta.size)
