"""Reads a corpus in Megatron's indexed format: PREFIX.bin (tokens) and PREFIX.idx (index).

The .idx holds: b"MMIDIDX\\0\\0", uint64 version, uint8 dtype code, uint64 sequences, uint64 entries
of the document index, int32 tokens of each sequence, int64 byte offset of each sequence in the
.bin, int64 document index (the first sequence of each document, then the number of sequences).
Little endian, no padding. See `docs/data-format.md`.

A corpus may have a PREFIX.mask, which is ours: a byte for each token, 0 if it is no target.
"""

import errno
import mmap
import resource
import struct
from bisect import bisect_right
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafrontier.common.errors import UserError, as_fatal_error
from megafrontier.common.files import search_folder_hint

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    8: np.dtype(np.uint16),
}
"""Dtype codes of token ids. Codes 6 and 7 are floating-point types."""


def bin_path(prefix: str | Path) -> Path:
    """Return PREFIX.bin."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return PREFIX.idx."""
    return Path(f"{prefix}.idx")


def mask_path(prefix: str | Path) -> Path:
    """Return PREFIX.mask."""
    return Path(f"{prefix}.mask")


def growing_path(prefix: str | Path) -> Path:
    """Return PREFIX.growing, the tokens of a corpus behind which others are being written."""
    return Path(f"{prefix}.growing")


def sources_path(prefix: str | Path) -> Path:
    """Return PREFIX.sources, the files that a growing corpus was made of."""
    return Path(f"{prefix}.sources")


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type in which Megatron stores ids: uint16 for less than 65500 ids, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def dtype_code(dtype: np.dtype) -> int:
    """Return Megatron's code of a token type."""
    return next(code for code, known in DTYPES.items() if known == dtype)


class IndexedDataset:
    """A memory-mapped corpus. Opening it reads only a few bytes, whatever its size.

    `tokens` are all tokens of the .bin, `sizes` the number of tokens of each sequence [n],
    `pointers` their byte offsets [n], `document_index` the first sequence of each document [d+1].
    `mask` is whether each token is a target, as the bytes 0 and 1, or None: then all are. Raises
    UserError if a file is missing, of another format, truncated, or without tokens.
    """

    def __init__(self, prefix: str | Path) -> None:
        # Every mapping keeps its file open. The usual limit of 1,024 is too low for many corpora.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        self.prefix = str(prefix)
        idx = _map(idx_path(prefix))
        self.dtype, sequences, entries = _read_header(idx_path(prefix), idx)
        _check_length(idx_path(prefix), len(idx), sequences, entries)
        at = HEADER.size
        self.sizes: NDArray[np.int32] = np.frombuffer(idx, "<i4", sequences, at)
        at += 4 * sequences
        self.pointers: NDArray[np.int64] = np.frombuffer(idx, "<i8", sequences, at)
        at += 8 * sequences
        self.document_index: NDArray[np.int64] = np.frombuffer(idx, "<i8", entries, at)
        self._check_index()
        data = _map(bin_path(prefix))
        count = self._check_bin(len(data)) // self.dtype.itemsize
        self.tokens: NDArray = np.frombuffer(data, self.dtype, count)
        self.mask = self._open_mask()

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.document_index) - 1

    def document_start(self, number: int) -> int:
        """Return the token at which document `number` starts. That of `len(self)` is the end."""
        sequence = int(self.document_index[number])
        if sequence == len(self.pointers):
            return len(self.tokens)
        if not 0 <= sequence < len(self.pointers):
            raise self.damaged(f"document {number} starts with sequence {sequence}")
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def document_bounds(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens at which documents first … stop - 1 start, and at which the last one
        ends [stop - first + 1]. Raises UserError if the index is damaged there."""
        sequences = self.document_index[first : stop + 1]
        count = len(self.pointers)
        if sequences.min() < 0 or sequences.max() > count:
            raise self.damaged(f"documents {first} to {stop} have sequences that are not there")
        pointers = self.pointers[np.minimum(sequences, count - 1)] // self.dtype.itemsize
        bounds = np.where(sequences < count, pointers, len(self.tokens))
        if (np.diff(bounds) < 0).any():
            raise self.damaged(f"documents {first} to {stop} do not follow each other")
        return bounds

    def document_starts(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens in [first, stop) at which a document starts, ascending [starts].

        This is a binary search in the mapped index, and needs no array of the corpus' length.
        Raises UserError if the entries that it reads are not in order.
        """
        begin = bisect_right(range(len(self)), first - 1, key=self.document_start)
        end = bisect_right(range(len(self)), stop - 1, lo=begin, key=self.document_start)
        sequences = self.document_index[begin:end]
        # Empty documents at the end of the corpus point behind the last sequence.
        steps = np.diff(np.concatenate([[0], sequences, [len(self.pointers)]]))
        if (steps < 0).any():
            raise self.damaged(f"documents {begin} to {end} do not follow each other")
        starts = self.pointers[sequences[sequences < len(self.pointers)]] // self.dtype.itemsize
        ordered = np.concatenate([[first], starts, [max(first, stop - 1)]])
        if (np.diff(ordered) < 0).any():
            raise self.damaged(f"documents {begin} to {end} do not follow each other")
        return starts

    def damaged(self, what: str) -> UserError:
        """Return the error for a damaged index."""
        return UserError(f"{idx_path(self.prefix)}: damaged: {what}; copy or prepare again")

    def _check_index(self) -> None:
        ends = int(self.document_index[0]), int(self.document_index[-1])
        if ends != (0, len(self.sizes)):
            raise UserError(
                f"{idx_path(self.prefix)}: byte {HEADER.size + 12 * len(self.sizes)}: the document "
                f"index runs from {ends[0]} to {ends[1]}, need 0 to {len(self.sizes)} sequences"
            )

    def _open_mask(self) -> NDArray[np.uint8] | None:
        path = mask_path(self.prefix)
        if not path.exists():
            return None
        mask = np.frombuffer(_map(path), np.uint8)
        if len(mask) > len(self.tokens) and self._is_growing():
            mask = mask[: len(self.tokens)]
        if len(mask) != len(self.tokens):
            raise UserError(
                f"{path}: {len(mask)} bytes, need one for each of {len(self.tokens)} tokens; of "
                "another corpus; copy or prepare again"
            )
        return mask

    def _check_bin(self, length: int) -> int:
        """The bytes of the .bin that are of this corpus."""
        need = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize
        if length != need and not (length > need and self._is_growing()):
            raise UserError(
                f"{bin_path(self.prefix)}: {length} bytes, its .idx describes {need}; truncated "
                "or of another corpus; copy or prepare again"
            )
        return need

    def _is_growing(self) -> bool:
        """Whether documents are being written behind those of this index."""
        path, last = growing_path(self.prefix), int(self.pointers[-1]) // self.dtype.itemsize
        try:
            return int(path.read_text()) == last + int(self.sizes[-1])
        except (OSError, ValueError):
            return False


def is_empty(prefix: str | Path) -> bool:
    """Return whether this is the empty corpus that `prepare` makes of a part without text.

    The index decides, because an empty .bin may have been truncated. Raises UserError for an index
    that cannot be read or is of another format.
    """
    if not bin_path(prefix).is_file() or bin_path(prefix).stat().st_size > 0:
        return False
    idx = _map(idx_path(prefix))
    _, sequences, entries = _read_header(idx_path(prefix), idx)
    return (sequences, entries, len(idx)) == (0, 1, HEADER.size + 8)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        line = f"{path}: cannot read the corpus: {error.strerror}"
        if error.errno == errno.ENOENT:
            need = "need the PREFIX of a PREFIX.bin and .idx, as `prepare` writes them"
            line += f"{search_folder_hint(path)}; {need}"
        raise as_fatal_error(error, line) from error
    except ValueError as error:  # mmap refuses to map nothing
        raise UserError(f"{path}: empty at byte 0, need a corpus with tokens") from error


def _read_header(path: Path, idx: mmap.mmap) -> tuple[np.dtype, int, int]:
    """Return (token type, number of sequences, entries of the document index)."""
    if len(idx) < HEADER.size:
        raise UserError(f"{path}: truncated at byte {len(idx)}, need a header of {HEADER.size}")
    magic, version, code, sequences, entries = HEADER.unpack_from(idx)
    if magic != MAGIC:
        raise UserError(
            f"{path}: byte 0: {magic!r} is not a Megatron index, need {MAGIC!r}; "
            "make one with `megafrontier prepare`"
        )
    if version != VERSION:
        raise UserError(f"{path}: byte 9: index version {version}, need {VERSION}")
    if code not in DTYPES:
        raise UserError(f"{path}: byte 17: dtype code {code}, need an integer type {set(DTYPES)}")
    return DTYPES[code], sequences, entries


def _check_length(path: Path, length: int, sequences: int, entries: int) -> None:
    need = HEADER.size + 12 * sequences + 8 * entries
    if sequences == 0 or entries < 2:
        raise UserError(f"{path}: byte 18: {sequences} sequences, need a corpus with at least one")
    if length < need:
        raise UserError(f"{path}: truncated at byte {length}, its header needs {need}")
    # A multimodal corpus ends with an int8 mode for each sequence, which is of no use for text.
    if length not in (need, need + sequences):
        raise UserError(f"{path}: {length} bytes, its header needs {need}; need a text corpus")
