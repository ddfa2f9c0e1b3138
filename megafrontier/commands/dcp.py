"""Checkpoints to and from those of torch.distributed.checkpoint (DCP), in one process.

Weights and buffers have the keys `model.NAME`, other states `optimizer.state.NAME.STATE`, as in the
state dicts that torch makes, and AdamW's number of updates is `optimizer.state.NAME.step`.
`dcp_folder.py` reads DCP's files.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from megafrontier.checkpoint.boxes import BoxEntry
from megafrontier.checkpoint.format import BUFFER, Manifest
from megafrontier.checkpoint.load import Checkpoint, open_checkpoint
from megafrontier.checkpoint.requests import Request
from megafrontier.checkpoint.sets import StoredUnit
from megafrontier.checkpoint.streamed import save_streamed, unit_of
from megafrontier.commands.dcp_folder import DCPFolder, DCPTensor
from megafrontier.common.checkpoints import candidates, of_newest
from megafrontier.common.errors import UserError, need, print_error

PROGRESS = "megafrontier.json"
"""Beside an exported checkpoint: step, tokens, config and what else a run goes on from."""
OPTIMIZER_STEPS = "optimizer_steps"
"""The key of a manifest's `extra` that has AdamW's number of updates."""
_PROGRESS_TYPES = {
    "step": int, "tokens": int, "config": dict, "rng": dict, "extra": dict, "buffers": list
}  # fmt: skip
CHUNK_ELEMENTS = 2**24
_MODEL, _STEP = "model.", "step"
_OPTIMIZER_KEY = re.compile(r"optim(?:izer)?\.state\.(.+)\.([^.]+)", re.DOTALL)
_MOMENT = "exp_avg_sq"
"""A state that AdamW alone has."""


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


def _path(name: str, state: str) -> tuple[str, ...]:
    """The keys of a tensor in the nested state dict that DCP flattens."""
    is_model = state in ("weight", BUFFER)
    return ("model", name) if is_model else ("optimizer", "state", name, state)


class _ChunkPlanner(DefaultSavePlanner):
    """Gives DCP the tensors of a checkpoint as chunks of whole rows, each read when it is due."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._steps = checkpoint.manifest.extra.get(OPTIMIZER_STEPS)
        self._paths: dict[str, tuple[str, ...]] = {}
        self._chunks: dict[tuple[str, torch.Size], tuple[str, str, ChunkStorageMetadata]] = {}

    def create_local_plan(self) -> SavePlan:
        """All chunks of all states of all tensors, and AdamW's number of updates."""
        items: list[WriteItem] = []
        for name, boxes in self._checkpoint.manifest.tensors.items():
            shape = torch.Size(boxes[0].entry.global_shape)
            states = dict(boxes[0].unit.states)
            for state, dtype in states.items():
                items += self._items(name, state, dtype, shape)
            if _MOMENT in states and self._steps is not None:
                items += self._items(name, _STEP, torch.float32, torch.Size(()))
        self.plan = SavePlan(items, planner_data=self._paths)
        return self.plan

    def _items(
        self, name: str, state: str, dtype: torch.dtype, shape: torch.Size
    ) -> Iterator[WriteItem]:
        key = ".".join(path := _path(name, state))
        self._paths[key] = path
        for chunk in _chunks(shape):
            index = MetadataIndex(key, chunk.offsets)
            self._chunks[index.fqn, chunk.offsets] = name, state, chunk
            data = TensorWriteData(chunk, TensorProperties(dtype), shape)
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Read a chunk."""
        assert write_item.tensor_data is not None
        assert write_item.index.offset is not None
        name, state, chunk = self._chunks[write_item.index.fqn, write_item.index.offset]
        if state == _STEP:
            return torch.tensor(float(self._steps or 0))
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
class _Source:
    """A tensor of a DCP checkpoint that is state `state` of parameter or buffer `name`."""

    name: str
    state: str
    key: str
    tensor: DCPTensor


def import_dcp(folder: Path, out: Path) -> Path:
    """Make a checkpoint in `out` of a DCP checkpoint, which need not be trusted. Returns its path.

    One that `export_dcp` wrote is restored with step and config. Of others all tensors below
    `model`, or without that key all that belong to no optimizer, are weights of step 0, in fp32.

    Raises UserError for a folder that is no sound DCP checkpoint or has no weights, and for an
    `out` that holds checkpoints; StorageFailed.
    """
    if any(candidates(out)):
        raise UserError(f"{out}: holds checkpoints, need another folder")
    dcp = DCPFolder(folder)
    progress = _read_progress(folder)
    sources = list(_sources(folder, dcp, set(progress.pop("buffers"))))
    if not any(source.state == "weight" for source in sources):
        raise UserError(f"--dcp {folder}: no weights, need keys such as model.NAME")
    if OPTIMIZER_STEPS not in progress["extra"]:
        moments = [source.key for source in sources if source.state == _MOMENT]
        progress["extra"] = progress["extra"] | _optimizer_steps(folder, dcp, moments)
    by_key = {(source.state, source.name): source for source in sources}

    def load(state: str, name: str) -> torch.Tensor:
        source = by_key[state, name]
        values = torch.empty(source.tensor.shape, dtype=_dtype(source))
        dcp.read(source.key, values)
        return values

    return save_streamed(out, Manifest(**progress), _units(sources), load)


def _read_progress(folder: Path) -> dict[str, Any]:
    """What `export_dcp` wrote beside the checkpoint, or that of a new training."""
    path = folder / PROGRESS
    if not path.is_file():
        return {key: kind() for key, kind in _PROGRESS_TYPES.items()}
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"--dcp {path}: {error}, need it as export wrote it") from error
    is_sound = isinstance(values, dict) and values.keys() == _PROGRESS_TYPES.keys()
    is_sound = is_sound and all(type(values[k]) is kind for k, kind in _PROGRESS_TYPES.items())
    is_sound = is_sound and min(values["step"], values["tokens"]) >= 0
    is_sound = is_sound and all(type(name) is str for name in values["buffers"])
    types = ", ".join(f"{key} ({kind.__name__})" for key, kind in _PROGRESS_TYPES.items())
    need(is_sound, f"--dcp {path}", "other keys or types", f"need {types}")
    return dict(values)


def _optimizer_steps(folder: Path, dcp: DCPFolder, moments: Sequence[str]) -> dict[str, int]:
    """AdamW's number of updates, as in `extra` of a manifest; none without moments.

    Raises UserError unless all moments have the same one: a run counts the updates once.
    """
    steps: dict[float, str] = {}
    for moment in moments:
        key = f"{moment.removesuffix(_MOMENT)}{_STEP}"
        step = dcp.number(key)
        fits = "need AdamW's number of updates, on which its bias correction depends"
        is_count = step is not None and step >= 0 and step % 1 == 0
        need(is_count, f"--dcp {folder}: {key}", "missing" if step is None else step, fits)
        steps.setdefault(step or 0.0, key)
    if len(steps) > 1:
        (step, key), (other, other_key), *_ = steps.items()
        raise UserError(
            f"--dcp {folder}: {other_key}: {other:g}, but {key} is {step:g}; need as many updates "
            "of all parameters, or a checkpoint without an optimizer"
        )
    return {OPTIMIZER_STEPS: int(max(steps))} if steps else {}


def _sources(folder: Path, dcp: DCPFolder, buffers: set[str]) -> Iterator[_Source]:
    """The tensors that are imported. Warns of states whose parameter is not there."""
    has_model, homeless = any(key.startswith(_MODEL) for key in dcp.tensors), list[str]()
    for key, tensor in dcp.tensors.items():
        if state_key := _OPTIMIZER_KEY.fullmatch(key):
            name, state = state_key.groups()
            parameter = dcp.tensors.get(f"{_MODEL}{name}" if has_model else name)
            if parameter is None:
                homeless.append(key)
            elif parameter.shape == tensor.shape and state != _STEP:
                fits = "need the name of an optimizer's state"
                is_name = state not in ("weight", BUFFER) and "/" not in state
                need(is_name, f"--dcp {folder}: {key}", state, fits)
                yield _Source(name, state, key, tensor)
        elif key.startswith(_MODEL) or not (has_model or key.startswith("optim")):
            name = key.removeprefix(_MODEL)
            is_buffer = name in buffers or not tensor.dtype.is_floating_point
            yield _Source(name, BUFFER if is_buffer else "weight", key, tensor)
    if homeless:
        more = f" and {len(homeless) - 1} more" if len(homeless) > 1 else ""
        print_error(
            f"warning: {homeless[0]}{more}: not imported, because no parameter has the name"
        )


def _units(sources: Sequence[_Source]) -> list[StoredUnit]:
    """All tensors, in a unit for each list of states."""
    by_name: dict[str, dict[str, _Source]] = {}
    for source in sources:
        by_name.setdefault(source.name, {})[source.state] = source
    shapes: dict[tuple[tuple[str, torch.dtype], ...], dict[str, tuple[int, ...]]] = {}
    for name, states in by_name.items():
        types = tuple((state, _dtype(source)) for state, source in states.items())
        shapes.setdefault(types, {})[name] = _shape(states)
    return [
        unit_of(f"imported {number}", found, dict(types))
        for number, (types, found) in enumerate(shapes.items())
    ]


def _dtype(source: _Source) -> torch.dtype:
    return torch.float32 if source.state == "weight" else source.tensor.dtype


def _shape(states: Mapping[str, _Source]) -> tuple[int, ...]:
    return next(iter(states.values())).tensor.shape
