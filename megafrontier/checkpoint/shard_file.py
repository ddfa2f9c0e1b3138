"""One shard's file: which slices it holds, how it is written, and reads that are checked.

A shard file is a safetensors file. Its tensors are 1-D slices, contiguous in row-major order, of
the box of one parameter in one state. Their keys are `STATE/PARAMETER/START`, where PARAMETER names
the box too unless it is the whole tensor, and START counts elements of the box. `__metadata__`
holds the CRC-32 of every slice and one of the header itself.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.boxes import BoxEntry
from megafrontier.checkpoint.format import (
    BLANK,
    CheckpointCorrupt,
    Manifest,
    add_checksum,
    as_read_error,
    check_file,
    crc32_hex,
    has_checksum,
)
from megafrontier.checkpoint.sets import DTYPE_NAMES, DTYPES, ShardSet
from megafrontier.common.files import sync_file

LENGTH_BYTES = 8
"""safetensors: a file starts with the length of its header, little-endian."""
HEADER_PREFIX = b'{"__metadata__":{"header_crc32":"'
HEADER_LIMIT = 2**28
"""Bytes of a header, which is read before its slices are checked."""
CHECKSUM_OFFSET = LENGTH_BYTES + len(HEADER_PREFIX)


@dataclass(frozen=True)
class Slice:
    """Elements [start, start + count) of a parameter's box in one state. They are in the shard of
    unit number `unit`, from its element `offset`. `parameter` is the box's key."""

    state: str
    parameter: str
    start: int
    count: int
    dtype: torch.dtype
    unit: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


Shards = Mapping[str, Sequence[torch.Tensor | None]]
"""By state, the 1-D shard of each unit of a set, on any device; None for a unit without the
state."""
ReadSlice = Callable[[Slice], torch.Tensor]
"""The values of a slice [count], on any device."""


def slice_of(shards: Shards, part: Slice) -> torch.Tensor:
    """The values of a slice, as a view of its shard."""
    shard = shards[part.state][part.unit]
    assert shard is not None
    return shard[part.offset : part.offset + part.count]


def slices_of(shard_set: ShardSet, index: int, slice_elements: int) -> list[Slice]:
    """The slices in the file of shard `index`, in order. Padding is left out."""
    parts = [
        (number, unit.states, BoxEntry.of(entry).key, first, last, offset)
        for number, unit in enumerate(shard_set.units)
        for entry, first, last, offset in unit.layout.in_shard(index, shard_set.num_shards)
    ]
    every = dict.fromkeys(item for unit in shard_set.units for item in unit.states.items())
    slices = []
    # Wide types first: each slice then starts at a multiple of the size of its type.
    for state, dtype in sorted(every, key=lambda item: -item[1].itemsize):
        for number, states, name, first, last, offset in parts:
            if states.get(state) != dtype:
                continue
            for start in range(first, last, slice_elements):
                count = min(slice_elements, last - start)
                slices.append(
                    Slice(state, name, start, count, dtype, number, offset + start - first)
                )
    return slices


def shard_label(shard_set: ShardSet, index: int) -> str:
    """The text by which a shard file says which shard it is."""
    of_set = f" of {shard_set.name}" if shard_set.name else ""
    return f"{index} of {shard_set.num_shards}{of_set}"


def encode_header(
    manifest: Manifest, piece: str, slices: Sequence[Slice], checksums: Sequence[str]
) -> bytes:
    """The bytes before the payload. Their number does not depend on the checksums."""
    metadata = {
        "header_crc32": BLANK,
        "format": "megafrontier piece",
        "checkpoint": manifest.id,
        "step": str(manifest.step),
        "piece": piece,
        "slices_crc32": "".join(checksums),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for part in slices:
        begin, end = end, end + part.nbytes
        header[f"{part.state}/{part.parameter}/{part.start}"] = {
            "dtype": DTYPE_NAMES[part.dtype],
            "shape": [part.count],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return add_checksum(len(text).to_bytes(LENGTH_BYTES, "little") + text, CHECKSUM_OFFSET)


def file_size(manifest: Manifest, shard_set: ShardSet, index: int) -> int:
    """The length in bytes of the file of shard `index`, known without looking at it."""
    slices = slices_of(shard_set, index, manifest.slice_elements)
    header = encode_header(manifest, shard_label(shard_set, index), slices, [BLANK] * len(slices))
    return len(header) + sum(part.nbytes for part in slices)


def write_shard(
    path: Path, manifest: Manifest, shard_set: ShardSet, index: int, read: ReadSlice
) -> None:
    """Write the file of shard `index` and bring it to the disk, slice by slice in the order of
    `slices_of`. Raises OSError, also if the file exists, because then two ranks write the same
    shard."""
    slices = slices_of(shard_set, index, manifest.slice_elements)
    piece = shard_label(shard_set, index)
    with open(path, "xb") as file:
        # The checksums precede the payload, but are known only after it.
        file.write(encode_header(manifest, piece, slices, [BLANK] * len(slices)))
        checksums = []
        for part in slices:
            data = _buffer(read(part))
            checksums.append(crc32_hex(data))
            file.write(data)
        file.seek(0)
        file.write(encode_header(manifest, piece, slices, checksums))
        sync_file(file)


def _buffer(tensor: torch.Tensor) -> memoryview:
    """The memory of a 1-D tensor, or of a copy unless it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data


@dataclass(frozen=True)
class StoredSlice:
    """A slice in a file: elements [start, stop) of the parameter's box, from byte `offset`."""

    start: int
    stop: int
    dtype: torch.dtype
    offset: int
    crc32: str


class ShardFile:
    """An open shard file whose header has been checked. Slices are checked as they are read."""

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        shard_set: ShardSet,
        index: int,
        name: str | None = None,
    ) -> None:
        """Open the file of shard `index` in the checkpoint at `root`. `name`: its path there, if
        not the usual one. Raises CheckpointCorrupt if it is missing, damaged, or of another
        checkpoint or shard, CheckpointUnreadable if the storage fails."""
        name = name or shard_set.file(index)
        self.path = root / name
        check_file(root, name)
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed by close)
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise as_read_error(self.path, error) from error
        header, payload_offset = self._read_header()
        try:
            metadata = header.pop("__metadata__")
            self._check_owner(metadata, manifest, shard_label(shard_set, index))
            self.slices = self._index(header, metadata["slices_crc32"], payload_offset)
            """By state and parameter, in the order of their start."""
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._corrupt(f"not the header of a shard: {error!r}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read_into(self, stored: StoredSlice, out: torch.Tensor) -> None:
        """Read a whole slice into `out` [stop - start], contiguous, on the CPU, of the same type.

        Raises CheckpointCorrupt if the bytes are not those that were written, and
        CheckpointUnreadable.
        """
        data = _buffer(out)
        self._read_at(stored.offset, data)
        if crc32_hex(data) != stored.crc32:
            where = f"bytes {stored.offset} to {stored.offset + len(data)}"
            raise self._corrupt(f"checksum does not match in {where}: changed since it was written")

    def _corrupt(self, problem: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self.path}: {problem}")

    def _read_at(self, offset: int, buffer: memoryview) -> None:
        # preadv instead of seek and read, because `verify` reads from several threads.
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
            except OSError as error:
                raise as_read_error(self.path, error) from error
            if got == 0:
                raise self._corrupt(f"ends at byte {offset + done}: cut short")
            done += got

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """The header, after its checksum was found right, and the offset of the payload."""
        prefix = bytearray(LENGTH_BYTES)
        self._read_at(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        # The length is not covered by a checksum yet, so it may be anything.
        if LENGTH_BYTES + length > min(self._size, HEADER_LIMIT):
            raise self._corrupt("its header is damaged or cut short")
        text = bytearray(LENGTH_BYTES + length)
        self._read_at(0, memoryview(text))
        is_right = text.startswith(HEADER_PREFIX, LENGTH_BYTES)
        if not is_right or not has_checksum(bytes(text), CHECKSUM_OFFSET):
            raise self._corrupt("its header is damaged, or it is not a shard of a checkpoint")
        try:
            return json.loads(text[LENGTH_BYTES:]), len(text)
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"its header is not JSON: {error}") from error

    def _check_owner(self, metadata: dict[str, str], manifest: Manifest, piece: str) -> None:
        found = (metadata["checkpoint"], metadata["piece"])
        if found != (manifest.id, piece):
            raise self._corrupt(
                f"is shard {metadata['piece']} of another checkpoint (step {metadata['step']}, "
                f"id {found[0]}); need shard {piece}, id {manifest.id}"
            )

    def _index(
        self, header: dict[str, Any], checksums: str, payload_offset: int
    ) -> dict[tuple[str, str], list[StoredSlice]]:
        index: dict[tuple[str, str], list[StoredSlice]] = {}
        end = payload_offset
        for i, (key, value) in enumerate(header.items()):
            state, _, rest = key.partition("/")
            parameter, _, start = rest.rpartition("/")
            before, stop = end, int(start) + value["shape"][0]
            begin, end = (payload_offset + offset for offset in value["data_offsets"])
            if (
                begin != before
                or end - begin != value["shape"][0] * DTYPES[value["dtype"]].itemsize
            ):
                raise ValueError(f"{key}: bytes {begin} to {end}")
            crc32 = checksums[8 * i : 8 * i + 8]
            stored = StoredSlice(int(start), stop, DTYPES[value["dtype"]], begin, crc32)
            index.setdefault((state, parameter), []).append(stored)
        if end != self._size:
            raise self._corrupt(f"{self._size} bytes, need {end}: cut short or grown")
        return index
