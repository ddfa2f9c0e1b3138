"""One piece's file: which slices it holds, writing it as a stream, reading slices of it checked.

A piece file is a safetensors file. Its tensors are 1-D slices, contiguous in row-major order, of
one parameter in one state, under the key `STATE/PARAMETER/START`; START counts elements of the
global tensor. `__metadata__` holds the CRC-32 of every slice and one of the header itself.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.checksum import BLANK, crc32_hex, is_sealed, seal
from megafrontier.checkpoint.errors import CheckpointCorrupt, not_read
from megafrontier.checkpoint.manifest import DTYPE_NAMES, DTYPES, Manifest

LENGTH_BYTES = 8
"""safetensors: a file starts with the header's length, little-endian."""
SEAL_PREFIX = b'{"__metadata__":{"header_crc32":"'
SEAL_AT = LENGTH_BYTES + len(SEAL_PREFIX)


@dataclass(frozen=True)
class Slice:
    """Elements [start, start + count) of a parameter in one state, from element `at` of the
    piece's shard of the unit with index `unit`."""

    state: str
    parameter: str
    start: int
    count: int
    dtype: torch.dtype
    unit: int
    at: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


def plan(manifest: Manifest, piece: int) -> list[Slice]:
    """The slices of a piece's file in order. Padding is left out."""
    parts = list(_parts(manifest, piece))
    slices = []
    # Wide types first: then every slice starts at a multiple of its type's size.
    for state, dtype in sorted(manifest.states.items(), key=lambda item: -item[1].itemsize):
        for unit, name, first, last, at in parts:
            for start in range(first, last, manifest.slice_elements):
                count = min(manifest.slice_elements, last - start)
                slices.append(Slice(state, name, start, count, dtype, unit, at + start - first))
    return slices


def _parts(manifest: Manifest, piece: int) -> Iterator[tuple[int, str, int, int, int]]:
    """Unit's index, parameter, its elements [first, last) and their place in the shard."""
    for index, unit in enumerate(manifest.units):
        for entry, first, last, at in unit.in_shard(piece, manifest.pieces):
            yield index, entry.name, first, last, at


def encode_header(
    manifest: Manifest, piece: int, slices: Sequence[Slice], checksums: Sequence[str]
) -> bytes:
    """The bytes before the payload. Their number does not depend on the checksums."""
    metadata = {
        "header_crc32": BLANK,
        "format": "megafrontier piece",
        "checkpoint": manifest.id,
        "step": str(manifest.step),
        "piece": f"{piece} of {manifest.pieces}",
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
    return seal(len(text).to_bytes(LENGTH_BYTES, "little") + text, SEAL_AT)


def file_size(manifest: Manifest, piece: int) -> int:
    """Bytes of a piece's file, known without looking at it."""
    slices = plan(manifest, piece)
    header = encode_header(manifest, piece, slices, [BLANK] * len(slices))
    return len(header) + sum(part.nbytes for part in slices)


def write_piece(
    path: Path, manifest: Manifest, piece: int, shards: Mapping[str, Sequence[torch.Tensor]]
) -> None:
    """Write a piece's file and bring it to the disk, with one slice in host memory at a time.

    `shards[state][u]` is the piece's 1-D shard of unit u, on any device. Raises OSError, also
    when the file exists: then two ranks write the same piece.
    """
    slices = plan(manifest, piece)
    with open(path, "xb") as file:
        # The checksums stand before the payload but are known after it.
        file.write(encode_header(manifest, piece, slices, [BLANK] * len(slices)))
        checksums = []
        for part in slices:
            data = _bytes_of(shards[part.state][part.unit][part.at : part.at + part.count])
            checksums.append(crc32_hex(data))
            file.write(data)
        file.seek(0)
        file.write(encode_header(manifest, piece, slices, checksums))
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a 1-D tensor, or of a copy where it is not contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Stored:
    """A slice as it lies in a file: elements [start, stop) of the parameter, from byte `at`."""

    start: int
    stop: int
    dtype: torch.dtype
    at: int
    crc32: str


class PieceFile:
    """One open piece file whose header has been checked; slices are checked as they are read."""

    def __init__(self, root: Path, name: str, manifest: Manifest, piece: int) -> None:
        """Open file `name` of the checkpoint at `root`. Raises CheckpointCorrupt naming the file
        when it is missing, damaged, or belongs to another checkpoint or piece; CheckpointUnreadable
        when the storage fails."""
        self.path = root / name
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed by close)
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise not_read(self.path, error) from error
        header, payload_at = self._read_header()
        try:
            metadata = header.pop("__metadata__")
            self._check_owner(metadata, manifest, piece)
            self.slices = self._index(header, metadata["slices_crc32"], payload_at)
        except (KeyError, TypeError, ValueError) as error:
            raise self._corrupt(f"not the header of a piece: {error!r}") from error

    def close(self) -> None:
        """Close the file; slices can no longer be read."""
        self._file.close()

    def read_into(self, stored: Stored, out: torch.Tensor) -> None:
        """Read one whole slice into `out`, 1-D, contiguous, on the CPU, of the slice's type.

        Raises CheckpointCorrupt when the bytes are not those that were written, and
        CheckpointUnreadable.
        """
        data = _bytes_of(out)
        self._read_at(stored.at, data)
        if crc32_hex(data) != stored.crc32:
            where = f"bytes {stored.at} to {stored.at + len(data)}"
            raise self._corrupt(f"checksum does not match in {where}: changed since it was written")

    def _corrupt(self, problem: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self.path}: {problem}")

    def _read_at(self, offset: int, buffer: memoryview) -> None:
        # preadv, not seek and read: `verify` reads from several threads.
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
            except OSError as error:
                raise not_read(self.path, error) from error
            if got == 0:
                raise self._corrupt(f"ends at byte {offset + done}: cut short")
            done += got

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """The header once its checksum is found right, and where the payload starts."""
        prefix = bytearray(LENGTH_BYTES)
        self._read_at(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        # Before the checksum is known to be right, the length may be anything.
        if LENGTH_BYTES + length > self._size:
            raise self._corrupt("its header is damaged or cut short")
        text = bytearray(LENGTH_BYTES + length)
        self._read_at(0, memoryview(text))
        if not text.startswith(SEAL_PREFIX, LENGTH_BYTES) or not is_sealed(bytes(text), SEAL_AT):
            raise self._corrupt("its header is damaged, or it is not a piece of a checkpoint")
        return json.loads(text[LENGTH_BYTES:]), len(text)

    def _check_owner(self, metadata: dict[str, str], manifest: Manifest, piece: int) -> None:
        found = (metadata["checkpoint"], metadata["piece"])
        if found != (manifest.id, f"{piece} of {manifest.pieces}"):
            raise self._corrupt(
                f"is piece {metadata['piece']} of another checkpoint (step {metadata['step']}, "
                f"id {found[0]}); need piece {piece} of {manifest.pieces}, id {manifest.id}"
            )

    def _index(
        self, header: dict[str, Any], checksums: str, payload_at: int
    ) -> dict[tuple[str, str], list[Stored]]:
        """The slices by state and parameter, in order of their start."""
        index: dict[tuple[str, str], list[Stored]] = {}
        end = payload_at
        for i, (key, value) in enumerate(header.items()):
            state, _, rest = key.partition("/")
            parameter, _, start = rest.rpartition("/")
            begin, end = (payload_at + offset for offset in value["data_offsets"])
            stop = int(start) + value["shape"][0]
            crc32 = checksums[8 * i : 8 * i + 8]
            stored = Stored(int(start), stop, DTYPES[value["dtype"]], begin, crc32)
            index.setdefault((state, parameter), []).append(stored)
        if end != self._size:
            raise self._corrupt(f"{self._size} bytes, need {end}: cut short or grown")
        return index
