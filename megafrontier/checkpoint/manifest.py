"""checkpoint.json: everything about a checkpoint but the tensors' elements.

It says which tensors there are and how flat buffers were cut into pieces, from which follows what
each piece file holds and how long it is, to the byte. So nothing about 75,264 files needs to be
gathered or listed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.checksum import BLANK, is_sealed, seal
from megafrontier.checkpoint.errors import CheckpointCorrupt
from megafrontier.common.errors import UserError
from megafrontier.partition.layout import Entry, Layout

FILE_NAME = "checkpoint.json"
FORMAT = "megafrontier checkpoint"
VERSION = 1
SEAL_PREFIX = b'{\n"crc32": "'
"""How the file starts, in this and in all later versions: damage is told from a later version."""

PIECES_PER_FOLDER = 256
SLICE_ELEMENTS = 2**22
"""Largest slice: what a reader must read to check the part that it wants, 16 MiB in fp32."""

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
"""safetensors' names of types."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Attached:
    """A file beside the pieces, for instance of the tokenizer: path in the checkpoint, bytes."""

    path: str
    size: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. The caller of `save` fills the first block, `save` the second."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens seen."""
    units: Sequence[Layout]
    """The flat buffers that the shards are cut from; parameter names are global."""
    pieces: int
    """Equal parts that every unit's flat buffer is cut into; one file each."""
    states: Mapping[str, torch.dtype]
    """Kinds of tensors, one of each per parameter: weight, exp_avg, exp_avg_sq and, where a run has
    them, published and error."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run's resolved config in plain containers."""
    rng: Mapping[str, Any] = field(default_factory=dict)
    """All that random numbers follow from, such as the seed."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further training state that JSON can hold, such as the loss scale."""

    slice_elements: int = SLICE_ELEMENTS
    """Largest slice of a tensor in the piece files."""
    id: str = ""
    """16 random hexadecimal digits that every piece file repeats."""
    saved_at: str = ""
    """UTC, ISO 8601."""
    files: Sequence[Attached] = ()
    """Files beside the pieces."""

    def __post_init__(self) -> None:
        problem = next(self._problems(), None)
        if problem is not None:
            raise ValueError(problem)

    @cached_property
    def tensors(self) -> dict[str, tuple[Layout, Entry]]:
        """Each parameter's unit and place, by name."""
        return {entry.name: (unit, entry) for unit in self.units for entry in unit.entries}

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors' elements in all states."""
        elements = sum(entry.numel for _, entry in self.tensors.values())
        return elements * sum(dtype.itemsize for dtype in self.states.values())

    def _problems(self) -> Iterator[str]:
        """Why tensors could not be stored once and exactly once."""
        if self.pieces < 1 or self.slice_elements < 1 or self.step < 0:
            yield f"pieces {self.pieces}, slice_elements {self.slice_elements}, step {self.step}"
        for state, dtype in self.states.items():
            if not state or "/" in state:
                yield f"state {state!r}: the name must not be empty or hold a '/'"
            if dtype not in DTYPE_NAMES:
                yield f"state {state}: safetensors has no {dtype}"
        if len(self.tensors) != sum(len(unit.entries) for unit in self.units):
            yield "a parameter name stands in the units twice"
        for unit in self.units:
            yield from self._unit_problems(unit)

    def _unit_problems(self, unit: Layout) -> Iterator[str]:
        if unit.numel % self.pieces:
            yield f"unit {unit.name}: {unit.numel} elements do not make {self.pieces} pieces"
        end = 0
        for entry in sorted(unit.entries, key=lambda entry: (entry.offset, entry.numel)):
            if entry.offset < end:
                yield f"unit {unit.name}: {entry.name} overlaps the parameter before it"
            end = entry.offset + entry.numel
        if end > unit.numel:
            yield f"unit {unit.name}: parameters end at {end}, the buffer at {unit.numel}"

    def encode(self) -> bytes:
        """The text of checkpoint.json, checksummed. Raises TypeError for what JSON cannot hold."""
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
            "pieces": self.pieces,
            "piece_files": piece_path("PIECE // 256", "PIECE"),
            "slice_elements": self.slice_elements,
            "states": {state: DTYPE_NAMES[dtype] for state, dtype in self.states.items()},
            "files": [[file.path, file.size, file.crc32] for file in self.files],
            "units": [_unit_to_json(unit) for unit in self.units],
        }
        lines = [f'"{key}": {json.dumps(value)}' for key, value in values.items()]
        return seal(("{\n" + ",\n".join(lines) + "\n}\n").encode(), len(SEAL_PREFIX))

    @classmethod
    def decode(cls, text: bytes, path: Path) -> "Manifest":
        """The manifest that `encode` made; `path` names its file in errors.

        Raises CheckpointCorrupt when it is damaged or something else, UserError when it was
        written by a later version.
        """
        if not text.startswith(SEAL_PREFIX):
            raise CheckpointCorrupt(f"{path}: not a megafrontier manifest, or its start is damaged")
        if not is_sealed(text, len(SEAL_PREFIX)):
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
        plain = ("step", "tokens", "config", "rng", "extra", "pieces", "slice_elements", "id")
        return cls(
            **{key: values[key] for key in plain},
            saved_at=values["saved_at"],
            states={state: DTYPES[name] for state, name in values["states"].items()},
            files=[Attached(*file) for file in values["files"]],
            units=[_unit_from_json(unit) for unit in values["units"]],
        )


def piece_path(folder: str, piece: str) -> str:
    """Where a piece's file lies in the checkpoint: the rule, for folder and piece as text."""
    return f"pieces/{folder}/{piece}.safetensors"


def piece_file(piece: int) -> str:
    """Path of a piece's file in the checkpoint. No folder holds more than 256 of them: parallel
    file systems create files in one folder one after the other."""
    return piece_path(f"{piece // PIECES_PER_FOLDER:05d}", f"{piece:08d}")


def _unit_to_json(unit: Layout) -> dict[str, Any]:
    tensors = [[entry.name, list(entry.shape), entry.offset] for entry in unit.entries]
    return {"name": unit.name, "numel": unit.numel, "tensors": tensors}


def _unit_from_json(values: dict[str, Any]) -> Layout:
    entries = (Entry(name, tuple(shape), offset) for name, shape, offset in values["tensors"])
    return Layout(values["name"], tuple(entries), values["numel"])
