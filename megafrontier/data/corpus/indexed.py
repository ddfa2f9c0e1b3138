"""A corpus on disk in Megatron's indexed format: PREFIX.bin (tokens) and PREFIX.idx (where).

The .idx is: b"MMIDIDX\\0\\0", uint64 version, uint8 dtype code, uint64 sequences, uint64 entries of
the document index, int32 tokens of each sequence, int64 byte offset of each sequence in the .bin,
int64 document index (the first sequence of each document, and the number of sequences at the end).
Little endian, no padding. `docs/data-format.md` tells the rest.
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
from megafrontier.common.files import looked_in

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
"""Dtype codes of token ids; 6 and 7 are the floating-point types, which no token has."""


def bin_path(prefix: str | Path) -> Path:
    """PREFIX.bin."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """PREFIX.idx."""
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> np.dtype:
    """The type Megatron stores ids of such a vocabulary in: uint16 below 65500, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def dtype_code(dtype: np.dtype) -> int:
    """Megatron's code of a token type."""
    return next(code for code, known in DTYPES.items() if known == dtype)


class IndexedDataset:
    """A memory-mapped corpus. Opening reads a few bytes only, whatever its size.

    `tokens` are all tokens in the order of the .bin, `sizes` the tokens of each sequence [n],
    `pointers` their byte offsets [n], `document_index` the first sequence of each document [d+1].

    Raises UserError when a file is missing, foreign, truncated, or holds no token.
    """

    def __init__(self, prefix: str | Path) -> None:
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
        self._check_bin(len(data))
        self.tokens: NDArray = np.frombuffer(data, self.dtype)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.document_index) - 1

    def document(self, number: int) -> NDArray:
        """Tokens of one document [tokens], its sequences joined."""
        return self.tokens[self.document_start(number) : self.document_start(number + 1)]

    def document_start(self, number: int) -> int:
        """Token at which document `number` starts; that of `len(self)` is the end of the .bin."""
        sequence = int(self.document_index[number])
        if sequence == len(self.pointers):
            return len(self.tokens)
        if not 0 <= sequence < len(self.pointers):
            raise self._damaged(f"document {number} begins with sequence {sequence}")
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def document_starts(self, first: int, stop: int) -> NDArray[np.int64]:
        """Tokens in [first, stop) at which a document starts, ascending [starts].

        A binary search on the mapped index: no array of the corpus' length is ever made. Raises
        UserError where what it comes across is not in order.
        """
        begin = bisect_right(range(len(self)), first - 1, key=self.document_start)
        end = bisect_right(range(len(self)), stop - 1, lo=begin, key=self.document_start)
        sequences = self.document_index[begin:end]
        # Documents without a sequence at the very end of the corpus point behind the last one.
        steps = np.diff(np.concatenate([[0], sequences, [len(self.pointers)]]))
        if (steps < 0).any():
            raise self._damaged(f"documents {begin} to {end} do not follow each other")
        starts = self.pointers[sequences[sequences < len(self.pointers)]] // self.dtype.itemsize
        ordered = np.concatenate([[first], starts, [max(first, stop - 1)]])
        if (np.diff(ordered) < 0).any():
            raise self._damaged(f"documents {begin} to {end} do not follow each other")
        return starts

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{idx_path(self.prefix)}: damaged: {what}; copy or prepare again")

    def _check_index(self) -> None:
        ends = int(self.document_index[0]), int(self.document_index[-1])
        if ends != (0, len(self.sizes)):
            raise UserError(
                f"{idx_path(self.prefix)}: byte {HEADER.size + 12 * len(self.sizes)}: the document "
                f"index runs from {ends[0]} to {ends[1]}, need 0 to {len(self.sizes)} sequences"
            )

    def _check_bin(self, length: int) -> None:
        need = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize
        if length == need:
            return
        path = bin_path(self.prefix)
        if length < need:
            raise UserError(
                f"{path}: truncated at byte {length}, its .idx needs {need}; copy or prepare again"
            )
        raise UserError(f"{path}: {length} bytes, its .idx knows {need}; it is another corpus'")


def is_empty(prefix: str | Path) -> bool:
    """Whether it is the corpus of nothing that `prepare` makes of a share without text: by its
    index, for a .bin without tokens may have been cut off. Raises UserError for an index that
    cannot be read or is foreign."""
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
        if error.errno == errno.EMFILE and _allow_files():
            return _map(path)
        line = f"{path}: cannot read the corpus: {error.strerror}"
        if error.errno == errno.ENOENT:
            need = "need the PREFIX of a PREFIX.bin and .idx, as `prepare` writes them"
            line += f"{looked_in(path)}; {need}"
        raise as_fatal_error(error, line) from error
    except ValueError as error:  # mmap refuses to map nothing
        raise UserError(f"{path}: empty at byte 0, need a corpus with tokens") from error


def _allow_files() -> bool:
    """Raise the limit of open files as far as it goes, whether it could be: a mapping keeps its
    file open, and a blend of hundreds of corpora more of them than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft != hard


def _read_header(path: Path, idx: mmap.mmap) -> tuple[np.dtype, int, int]:
    """(token type, sequences, entries of the document index)."""
    if len(idx) < HEADER.size:
        raise UserError(f"{path}: truncated at byte {len(idx)}, need a header of {HEADER.size}")
    magic, version, code, sequences, entries = HEADER.unpack_from(idx)
    if magic != MAGIC:
        raise UserError(
            f"{path}: byte 0: {magic!r} is no Megatron index, need {MAGIC!r}; "
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
    # A multimodal corpus ends with one int8 mode for each sequence; text has no use for them.
    if length not in (need, need + sequences):
        raise UserError(f"{path}: {length} bytes, its header announces {need}; not this format")
