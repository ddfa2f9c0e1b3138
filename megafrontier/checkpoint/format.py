"""The checkpoint format, version 2: errors, checksums, and checkpoint.json, the manifest.

The manifest lists the tensors and how flat buffers were cut into shards. The content and the length
of every shard file follow from that, so nothing about thousands of files has to be gathered.
docs/checkpoint-format.md describes every byte. Sets of tensors are in `sets`, shard files in
`shard_file`.
"""

import json
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megafrontier.checkpoint.boxes import BoxEntry, intersection, numel
from megafrontier.checkpoint.sets import (
    DTYPE_NAMES,
    PATH_PATTERN,
    ShardSet,
    StoredUnit,
    decode_set,
    distinct_states,
    encode_set,
)
from megafrontier.common.errors import FatalError, StorageFailed, UserError

FORMAT = "megafrontier checkpoint"
VERSION = 2
"""What is written. Version 1 is read too."""
MANIFEST_PREFIX = b'{\n"crc32": "'
"""The start of the manifest in all versions, which tells damage from a later version."""
BLANK = "0" * 8
"""Stands in for a checksum while it is computed, so that the length stays the same."""

SLICE_ELEMENTS = 2**22
"""The largest slice, 16 MiB in fp32: what is read to check any part of it."""

FILE_SLICES_LIMIT = 2**20
"""Slices in a shard file."""
SHARDS_LIMIT = 2**20
"""Shard files of a checkpoint."""
BOXES_LIMIT = 2**12
"""Boxes of a tensor, which are compared with each other."""

BUFFER = "buffer"
"""The state of a module's buffers, which have no other."""
OPTIMIZER = "optimizer."
"""The names of buffers that belong to an optimizer begin with this."""


class CheckpointCorrupt(UserError):
    """A checkpoint is not whole: a file is missing, cut short, changed, or of another one."""


class CheckpointUnreadable(StorageFailed):
    """The storage does not let a checkpoint be read. The checkpoint may be whole."""


class CheckpointWriteError(UserError):
    """A checkpoint could not be written. All ranks raise it and may go on training: nothing was
    published, and the older checkpoints are untouched.

    `by_storage`: the storage itself failed and may recover. If False, somebody has to act, for
    instance free space on a full disk.
    """

    def __init__(self, message: str, by_storage: bool) -> None:
        super().__init__(message)
        self.by_storage = by_storage


def as_read_error(path: Path, error: OSError) -> FatalError:
    """The error for a file of a checkpoint that cannot be read: CheckpointCorrupt if it is missing,
    UserError without permission, else CheckpointUnreadable."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return CheckpointCorrupt(f"{path}: missing: {error.strerror}")
    line = f"{path}: cannot read: {error.strerror}"
    # A restart would have no permission either.
    return UserError(line) if isinstance(error, PermissionError) else CheckpointUnreadable(line)


def check_file(root: Path, name: str) -> int:
    """The size in bytes of a file of the checkpoint at `root`, before it is opened.

    Raises CheckpointCorrupt unless it is a regular file inside the checkpoint (a pipe would block,
    a device has no end, and a path or a link may lead anywhere), and as `as_read_error`.
    """
    path = root / name
    try:
        mode = path.stat()
        is_inside = path.resolve().is_relative_to(root.resolve())
    except OSError as error:
        raise as_read_error(path, error) from error
    except (ValueError, RuntimeError) as error:  # a zero byte in the name, a loop of links
        raise CheckpointCorrupt(f"{root}: {name!r}: not the name of a file") from error
    if not is_inside or ".." in Path(name).parts or not stat.S_ISREG(mode.st_mode):
        raise CheckpointCorrupt(f"{path}: need a regular file inside the checkpoint")
    return mode.st_size


def crc32_hex(data: Any) -> str:
    """CRC-32 of bytes, or of an object with a buffer, as 8 hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


def add_checksum(text: bytes, offset: int) -> bytes:
    """Replace the 8 bytes at `offset` by the checksum of the text, in which they count as BLANK."""
    head, tail = text[:offset], text[offset + len(BLANK) :]
    return head + crc32_hex(head + BLANK.encode() + tail).encode() + tail


def has_checksum(text: bytes, offset: int) -> bool:
    """Whether the checksum at `offset` is right."""
    return add_checksum(text, offset) == text


@dataclass(frozen=True)
class AttachedFile:
    """A file beside the shard files, for instance of the tokenizer. `path` is relative to the
    checkpoint, `size` in bytes."""

    path: str
    size: int
    crc32: str


class StoredBox(NamedTuple):
    """A box of a tensor, in the set `number` of the manifest."""

    number: int
    unit: StoredUnit
    entry: BoxEntry


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. The caller of `save` fills the first block of fields, `save` the
    second. Raises ValueError for sets that do not make whole tensors."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens seen."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config of the run in plain containers."""
    rng: Mapping[str, Any] = field(default_factory=dict)
    """What random numbers are derived from, such as the seed."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More training state that JSON can hold, such as the loss scale."""

    slice_elements: int = SLICE_ELEMENTS
    """The largest slice of a tensor in the shard files."""
    sets: Sequence[ShardSet] = ()
    """In which files which boxes of which tensors are."""
    id: str = ""
    """16 random hexadecimal digits, repeated in every shard file."""
    saved_at: str = ""
    """UTC, ISO 8601."""
    files: Sequence[AttachedFile] = ()

    def __post_init__(self) -> None:
        problem = next(self._problems(), None)
        if problem is not None:
            raise ValueError(problem)

    @cached_property
    def tensors(self) -> dict[str, list[StoredBox]]:
        """The different boxes of each tensor, by name. The same box may be in several sets, if
        ranks that differ in a model-parallel axis hold it; the first set's counts."""
        found: dict[str, dict[Any, StoredBox]] = {}
        for number, shard_set in enumerate(self.sets):
            for unit in shard_set.units:
                for entry in unit.entries:
                    boxes = found.setdefault(entry.name, {})
                    boxes.setdefault(entry.box, StoredBox(number, unit, entry))
        return {name: list(boxes.values()) for name, boxes in found.items()}

    @cached_property
    def states(self) -> dict[str, torch.dtype]:
        """The states of parameters, with their types. A parameter may lack some."""
        found: dict[str, torch.dtype] = {}
        for unit in (unit for shard_set in self.sets for unit in shard_set.units):
            found |= {s: dtype for s, dtype in unit.states.items() if s != BUFFER}
        return found

    @property
    def buffers(self) -> list[str]:
        """The names of the tensors that are buffers, not parameters."""
        return [name for name, boxes in self.tensors.items() if BUFFER in boxes[0].unit.states]

    @property
    def num_shards(self) -> int:
        """The number of shard files."""
        return sum(shard_set.num_shards for shard_set in self.sets)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the elements of all tensors in all states."""
        return sum(
            box.entry.numel * sum(dtype.itemsize for dtype in box.unit.states.values())
            for boxes in self.tensors.values()
            for box in boxes
        )

    def with_states(self, *names: str) -> "Manifest":
        """The manifest without the other states."""

        def without(unit: StoredUnit) -> StoredUnit:
            kept = {state: dtype for state, dtype in unit.states.items() if state in names}
            return replace(unit, states=kept)

        return replace(
            self, sets=[replace(s, units=[without(unit) for unit in s.units]) for s in self.sets]
        )

    def _problems(self) -> Iterator[str]:
        for key in ("config", "rng", "extra"):
            if not isinstance(getattr(self, key), Mapping):
                yield f"{key}: {getattr(self, key)!r}, need a mapping"
        if not (_are_sizes(self.slice_elements, self.step, self.tokens) and self.slice_elements):
            yield f"slices of {self.slice_elements!r}, step {self.step!r}, tokens {self.tokens!r}"
        if not all(_is_attached(file) for file in self.files):
            yield "files: need path, size and checksum of each"
        if len({shard_set.name for shard_set in self.sets}) < len(self.sets):
            yield "two sets have the same name"
        for shard_set in self.sets:
            yield from _set_problems(shard_set, self.slice_elements)
        if self.num_shards > SHARDS_LIMIT:
            yield f"{self.num_shards} shard files, need at most {SHARDS_LIMIT}"
        for name, boxes in self.tensors.items():
            yield from _tensor_problems(name, [box.entry for box in boxes])

    def encode(self) -> bytes:
        """The content of checkpoint.json. Raises TypeError for values that JSON cannot hold."""
        types = distinct_states(self.sets)
        values = {
            "crc32": BLANK,
            "format": FORMAT,
            "version": VERSION,
            "id": self.id,
            "saved_at": self.saved_at,
            "step": self.step,
            "tokens": self.tokens,
            "config": dict(self.config),
            "rng": dict(self.rng),
            "extra": dict(self.extra),
            "piece_files": PATH_PATTERN,
            "slice_elements": self.slice_elements,
            "states": [{s: DTYPE_NAMES[dtype] for s, dtype in states} for states in types],
            "files": [[file.path, file.size, file.crc32] for file in self.files],
            "sets": [encode_set(shard_set, types) for shard_set in self.sets],
        }
        lines = [f'"{key}": {json.dumps(value)}' for key, value in values.items()]
        return add_checksum(("{\n" + ",\n".join(lines) + "\n}\n").encode(), len(MANIFEST_PREFIX))

    @classmethod
    def decode(cls, text: bytes, path: Path) -> "Manifest":
        """The inverse of `encode`; also of manifests of version 1. `path` is the file to name in
        errors.

        Raises CheckpointCorrupt if `text` is damaged or no manifest, UserError if a later version
        wrote it.
        """
        if not text.startswith(MANIFEST_PREFIX):
            raise CheckpointCorrupt(f"{path}: not a megafrontier manifest, or its start is damaged")
        if not has_checksum(text, len(MANIFEST_PREFIX)):
            raise CheckpointCorrupt(f"{path}: checksum does not match: changed or cut short")
        try:
            values: dict[str, Any] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointCorrupt(f"{path}: not JSON: {error}") from error
        if values.get("format") != FORMAT:
            raise CheckpointCorrupt(f"{path}: format {values.get('format')!r}, need {FORMAT!r}")
        if values.get("version") not in (1, VERSION):
            raise UserError(
                f"{path}: checkpoint format version {values.get('version')}, this megafrontier "
                f"reads versions 1 to {VERSION}; use the one that wrote it or a later one"
            )
        try:
            return cls._from_json(values)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise CheckpointCorrupt(f"{path}: not a sound manifest: {error!r}") from error

    @classmethod
    def _from_json(cls, values: dict[str, Any]) -> "Manifest":
        same = ("step", "tokens", "config", "rng", "extra", "slice_elements", "id", "saved_at")
        if values["version"] == 1:
            values = _as_version_2(values)
        return cls(
            **{key: values[key] for key in same},
            files=[AttachedFile(*file) for file in values["files"]],
            sets=[decode_set(found, values["states"]) for found in values["sets"]],
        )


def _as_version_2(values: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a manifest of version 1, which had one set without a name and the same states for
    all units, as that of version 2."""
    units = [unit | {"states": 0} for unit in values["units"]]
    only = {"name": "", "pieces": values["pieces"], "units": units}
    return values | {"states": [values["states"]], "sets": [only]}


def _are_sizes(*values: Any) -> bool:
    """Whether the values are whole numbers from 0 on. JSON may hold anything."""
    return all(type(value) is int and value >= 0 for value in values)


def _is_attached(file: AttachedFile) -> bool:
    are_texts = isinstance(file.path, str) and isinstance(file.crc32, str)
    return are_texts and _are_sizes(file.size)


def _set_problems(shard_set: ShardSet, slice_elements: int) -> Iterator[str]:
    if not _are_sizes(shard_set.num_shards) or not shard_set.num_shards:
        yield f"{shard_set.num_shards!r} shards"
    for unit in shard_set.units:
        yield from _layout_problems(unit)
    slices = sum(
        len(unit.states)
        * (len(unit.entries) + unit.layout.numel // shard_set.num_shards // slice_elements)
        for unit in shard_set.units
    )
    if slices > FILE_SLICES_LIMIT:
        yield f"up to {slices} slices in a shard file, need at most {FILE_SLICES_LIMIT}"
    keys = [entry.key for unit in shard_set.units for entry in unit.entries]
    if len(set(keys)) < len(keys):
        yield "a box of a parameter occurs twice in the units"
    for unit in shard_set.units:
        for state, dtype in unit.states.items():
            if not state or "/" in state:
                yield f"state {state!r}: the name must not be empty or hold a '/'"
            if dtype not in DTYPE_NAMES:
                yield f"state {state}: safetensors has no {dtype}"
        if unit.layout.numel % shard_set.num_shards:
            shards = f"{shard_set.num_shards} shards"
            yield f"unit {unit.layout.name}: {unit.layout.numel} elements do not make {shards}"


def _layout_problems(unit: StoredUnit) -> Iterator[str]:
    """Whether the boxes of a unit lie one after the other in its buffer, and in their tensors."""
    end = 0
    for entry in unit.entries:
        bounds = [bound for part in entry.box for bound in part]
        if not _are_sizes(entry.offset, *entry.global_shape, *bounds, unit.layout.numel):
            yield f"{entry.name}: {entry.global_shape}, {entry.box} at {entry.offset}: no sizes"
        parts = zip(entry.box, entry.global_shape, strict=True)
        if any(not start <= stop <= size for (start, stop), size in parts):
            yield f"{entry.name}: box {entry.box} is not in {list(entry.global_shape)}"
        if entry.offset < end:
            yield f"{entry.name}: from element {entry.offset}, need at least {end}"
        end = entry.offset + entry.numel
    if end > unit.layout.numel:
        yield f"unit {unit.layout.name}: {end} elements in {unit.layout.numel}"


def _tensor_problems(name: str, entries: Sequence[BoxEntry]) -> Iterator[str]:
    """Whether the boxes of a tensor make all of it, without two that overlap."""
    shape = entries[0].global_shape
    if any(entry.global_shape != shape for entry in entries):
        yield f"{name}: different shapes in the sets"
    elif sum(entry.numel for entry in entries) != numel(tuple((0, size) for size in shape)):
        yield f"{name}: boxes {[entry.box for entry in entries]}, need all of {list(shape)}"
    if len(entries) > BOXES_LIMIT:
        yield f"{name}: {len(entries)} boxes, need at most {BOXES_LIMIT}"
    for number, entry in enumerate(entries):
        for other in entries[:number]:
            if entry.numel and intersection(entry.extent, other.extent) is not None:
                yield f"{name}: boxes {other.box} and {entry.box} overlap"
