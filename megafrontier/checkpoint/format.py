"""The checkpoint format, version 1: errors, checksums, and checkpoint.json, the manifest.

The manifest lists the tensors and how flat buffers were cut into shards. The content and the length
of every shard file follow from that, so nothing about thousands of files has to be gathered.
docs/checkpoint-format.md describes every byte. The shard files are in `shard_file`.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megafrontier.common.errors import FatalError, StorageFailed, UserError
from megafrontier.partition.layout import Entry, Layout

FILE_NAME = "checkpoint.json"
FORMAT = "megafrontier checkpoint"
VERSION = 1
MANIFEST_PREFIX = b'{\n"crc32": "'
"""The start of the manifest in all versions, which tells damage from a later version."""
BLANK = "0" * 8
"""Stands in for a checksum while it is computed, so that the length stays the same."""

FILES_PER_FOLDER = 256
SLICE_ELEMENTS = 2**22
"""The largest slice, 16 MiB in fp32: what is read to check any part of it."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Types by their safetensors names."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. The caller of `save` fills the first block of fields, `save` the
    second. Raises ValueError for a state or a number of shards that does not fit."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens seen."""
    units: Sequence[Layout]
    """The flat buffers that the shards are cut from. Parameter names are global."""
    num_shards: int
    """Equal shards of every unit's flat buffer. There is one file for each shard index."""
    states: Mapping[str, torch.dtype]
    """Kinds of tensors. Each parameter has one of each: weight, exp_avg, exp_avg_sq, and in some
    runs published and error."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config of the run in plain containers."""
    rng: Mapping[str, Any] = field(default_factory=dict)
    """What random numbers are derived from, such as the seed."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More training state that JSON can hold, such as the loss scale."""

    slice_elements: int = SLICE_ELEMENTS
    """The largest slice of a tensor in the shard files."""
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
    def tensors(self) -> dict[str, tuple[Layout, Entry]]:
        """Each parameter's unit and its entry there, by name."""
        return {entry.name: (unit, entry) for unit in self.units for entry in unit.entries}

    @property
    def payload_bytes(self) -> int:
        """Bytes of the elements of all tensors in all states."""
        elements = sum(entry.numel for _, entry in self.tensors.values())
        return elements * sum(dtype.itemsize for dtype in self.states.values())

    def _problems(self) -> Iterator[str]:
        if self.num_shards < 1 or self.slice_elements < 1 or self.step < 0:
            yield f"shards {self.num_shards}, slices of {self.slice_elements}, step {self.step}"
        for state, dtype in self.states.items():
            if not state or "/" in state:
                yield f"state {state!r}: the name must not be empty or hold a '/'"
            if dtype not in DTYPE_NAMES:
                yield f"state {state}: safetensors has no {dtype}"
        if len(self.tensors) != sum(len(unit.entries) for unit in self.units):
            yield "a parameter name occurs twice in the units"
        for unit in self.units:
            if unit.numel % self.num_shards:
                shards = f"{self.num_shards} shards"
                yield f"unit {unit.name}: {unit.numel} elements do not make {shards}"

    def encode(self) -> bytes:
        """The content of checkpoint.json. Raises TypeError for values that JSON cannot hold."""
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
            "pieces": self.num_shards,
            "piece_files": _shard_path("PIECE // 256", "PIECE"),
            "slice_elements": self.slice_elements,
            "states": {state: DTYPE_NAMES[dtype] for state, dtype in self.states.items()},
            "files": [[file.path, file.size, file.crc32] for file in self.files],
            "units": [_encode_unit(unit) for unit in self.units],
        }
        lines = [f'"{key}": {json.dumps(value)}' for key, value in values.items()]
        return add_checksum(("{\n" + ",\n".join(lines) + "\n}\n").encode(), len(MANIFEST_PREFIX))

    @classmethod
    def decode(cls, text: bytes, path: Path) -> "Manifest":
        """The inverse of `encode`. `path` is the file to name in errors.

        Raises CheckpointCorrupt if `text` is damaged or no manifest, UserError if a later version
        wrote it.
        """
        if not text.startswith(MANIFEST_PREFIX):
            raise CheckpointCorrupt(f"{path}: not a megafrontier manifest, or its start is damaged")
        if not has_checksum(text, len(MANIFEST_PREFIX)):
            raise CheckpointCorrupt(f"{path}: checksum does not match: changed or cut short")
        values: dict[str, Any] = json.loads(text)
        if values.get("format") != FORMAT:
            raise CheckpointCorrupt(f"{path}: format {values.get('format')!r}, need {FORMAT!r}")
        if values.get("version") != VERSION:
            raise UserError(
                f"{path}: checkpoint format version {values.get('version')}, this megafrontier "
                f"reads version {VERSION}; use the one that wrote it or a later one"
            )
        try:
            return cls._from_json(values)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(f"{path}: not a sound manifest: {error!r}") from error

    @classmethod
    def _from_json(cls, values: dict[str, Any]) -> "Manifest":
        same = ("step", "tokens", "config", "rng", "extra", "slice_elements", "id", "saved_at")
        return cls(
            **{key: values[key] for key in same},
            num_shards=values["pieces"],
            states={state: DTYPES[name] for state, name in values["states"].items()},
            files=[AttachedFile(*file) for file in values["files"]],
            units=[_decode_unit(unit) for unit in values["units"]],
        )


def shard_path(index: int) -> str:
    """The path of a shard's file in the checkpoint. A folder holds at most 256 of them, because
    parallel file systems create the files of one folder one after the other."""
    return _shard_path(f"{index // FILES_PER_FOLDER:05d}", f"{index:08d}")


def _shard_path(folder: str, name: str) -> str:
    return f"pieces/{folder}/{name}.safetensors"


def _encode_unit(unit: Layout) -> dict[str, Any]:
    tensors = [[entry.name, list(entry.shape), entry.offset] for entry in unit.entries]
    return {"name": unit.name, "numel": unit.numel, "tensors": tensors}


def _decode_unit(values: dict[str, Any]) -> Layout:
    entries = (Entry(name, tuple(shape), offset) for name, shape, offset in values["tensors"])
    return Layout(values["name"], tuple(entries), values["numel"])
