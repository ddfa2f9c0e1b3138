"""Writes a corpus as its tokens come. It appears under its name when it is complete."""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from megafrontier.common.errors import UserError
from megafrontier.common.files import sync_file, sync_folder, write_atomically
from megafrontier.data.corpus.indexed import (
    HEADER,
    MAGIC,
    VERSION,
    bin_path,
    dtype_code,
    idx_path,
    mask_path,
    sources_path,
)

FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST_SEQUENCE = 2**31 - 1
"""Most tokens of a sequence, because sizes are int32. A longer document has several sequences."""


def partial_path(path: Path) -> Path:
    """Return the name of `path` while it is incomplete.

    The name is fixed, so that the next run overwrites what a killed run has left.
    """
    return path.with_name(f"{path.name}.partial")


class IndexBuilder:
    """Collects the index in memory: 12 bytes a document."""

    def __init__(self) -> None:
        self._sizes: list[NDArray[np.int32]] = []
        self._documents: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self.sequences = 0
        self.documents = 0

    def add(self, sizes: NDArray[np.int32], documents: NDArray[np.int64]) -> None:
        """Append the sizes of sequences, in tokens [n], and the ends of documents [d].

        The end of a document is the number of sequences in it and in all documents before it.
        """
        self._sizes.append(sizes)
        self._documents.append(documents)
        self.sequences += len(sizes)
        self.documents += len(documents)

    def write(self, file: BinaryIO, dtype: np.dtype) -> None:
        """Write the .idx of a .bin in which the sequences follow each other without gaps."""
        code = dtype_code(dtype)
        file.write(HEADER.pack(MAGIC, VERSION, code, self.sequences, self.documents + 1))
        sizes = np.concatenate([np.zeros(0, np.int32), *self._sizes])
        lengths = sizes.astype(np.int64) * dtype.itemsize
        file.write(sizes.astype("<i4", copy=False).data)
        file.write((np.cumsum(lengths) - lengths).astype("<i8", copy=False).data)
        file.write(np.concatenate(self._documents).astype("<i8", copy=False).data)


class CorpusWriter:
    """Writes PREFIX.bin and PREFIX.idx under partial names, until `publish` renames them.

    With `has_mask` there is a PREFIX.mask, too; otherwise one that is there is removed.

    tokens_before, documents_before: of the corpus before this writer.

    A context manager: without `publish`, nothing is left behind. Raises UserError if another
    process is writing the same prefix, or the prefix is empty.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype, has_mask: bool = False) -> None:
        if os.path.basename(prefix) in ("", ".", ".."):
            need = os.path.join(prefix, "corpus")
            raise UserError(f"--out {str(prefix)!r}: need a corpus prefix, as {need}")
        self.bin, self.idx, self.dtype = bin_path(prefix), idx_path(prefix), dtype
        self.mask_path, self.sources = mask_path(prefix), sources_path(prefix)
        self.tokens_before = self.documents_before = 0
        self.partial_bin = partial_path(self.bin)
        self.bin.parent.mkdir(parents=True, exist_ok=True)
        self.data = _lock(self.partial_bin, prefix)
        self.data.truncate(0)
        self.mask: BinaryIO | None = None
        if has_mask:
            self.mask = partial_path(self.mask_path).open("wb")
        self.index = IndexBuilder()
        self._is_published = False

    def __enter__(self) -> Self:
        return self

    def publish(self, sources: str | None = None) -> None:
        """Sync and rename the files. The .idx comes last: without it there is no corpus. `sources`:
        the text of PREFIX.sources; None: there is none."""
        self.write_index()
        sync_file(self.data)
        if self.mask is not None:
            sync_file(self.mask)
        self.idx.unlink(missing_ok=True)
        self.mask_path.unlink(missing_ok=True)
        if sources is None:
            self.sources.unlink(missing_ok=True)
        else:
            write_atomically(self.sources, sources)
        self.partial_bin.rename(self.bin)
        if self.mask is not None:
            partial_path(self.mask_path).rename(self.mask_path)
        partial_path(self.idx).rename(self.idx)
        self._is_published = True  # partial files from now on belong to another writer
        sync_folder(self.bin.parent)

    def write_index(self) -> None:
        """Write the .idx under its partial name, to the disk."""
        with partial_path(self.idx).open("wb") as file:
            self.index.write(file, self.dtype)
            sync_file(file)

    def __exit__(self, _kind: object, error: BaseException | None, *_: object) -> None:
        for path in () if self._is_published else (self.bin, self.idx, self.mask_path):
            partial_path(path).unlink(missing_ok=True)
        # If the disk is full, flushing the last buffers fails again; `error` has reported it.
        with suppress(OSError):
            self.data.close()
            if self.mask is not None:
                self.mask.close()
        if isinstance(error, OSError) and error.errno in FULL_ERRORS:
            raise UserError(f"{self.bin}: {error.strerror}; nothing written") from error


def _lock(path: Path, prefix: str | Path) -> BinaryIO:
    """Open `path` as its only writer. The kernel releases the lock if the process dies."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(f"{prefix}: another process is writing this corpus") from error
    except OSError:
        pass  # Lustre may be mounted without flock. Two writers are not noticed there.
    return file


class DocumentWriter:
    """Appends chunks of tokens to a corpus. A chunk is a document, or one part of a long one."""

    def __init__(self, corpus: CorpusWriter) -> None:
        self._corpus = corpus
        self._open_sizes = [0]  # sequences so far of the document that has not ended
        self._document_start = self.tokens = corpus.tokens_before
        """Tokens of the corpus so far."""
        self._is_bad = False
        self.left_out = 0
        """Documents that were left out because of a bad chunk."""

    def write_chunks(
        self,
        tokens: NDArray,
        sizes: NDArray[np.int32],
        ends: NDArray[np.bool_],
        bad: NDArray[np.bool_],
        mask: NDArray[np.uint8] | None = None,
    ) -> None:
        """Append chunks: their `tokens` [sum of sizes], and the `sizes` of each [chunks]. A corpus
        with a mask needs that of the tokens [sum of sizes].

        `ends` [chunks] is whether the document ends with the chunk. Documents with a chunk marked
        in `bad` [chunks], and empty documents, are left out.
        """
        if ends.all() and not bad.any() and not self._is_bad and self._open_sizes == [0]:
            self._write(tokens, mask)
            self._end_documents(sizes[sizes > 0])
            return
        for start, size, is_end, is_bad in zip(
            np.cumsum(sizes) - sizes, sizes, ends, bad, strict=True
        ):
            part = slice(start, start + size)
            self._write(tokens[part], None if mask is None else mask[part])
            self._continue_document(size)
            self._is_bad |= bool(is_bad)
            if is_end:
                self._end_document()

    def _write(self, tokens: NDArray, mask: NDArray[np.uint8] | None) -> None:
        self._corpus.data.write(tokens.tobytes())
        if self._corpus.mask is not None:
            assert mask is not None
            self._corpus.mask.write(mask.tobytes())
        self.tokens += len(tokens)

    def _end_documents(self, sizes: NDArray[np.int32]) -> None:
        first = self._corpus.index.sequences + 1
        self._corpus.index.add(sizes, np.arange(first, first + len(sizes)))
        self._document_start = self.tokens

    def _continue_document(self, size: int) -> None:
        room = LONGEST_SEQUENCE - self._open_sizes[-1]
        self._open_sizes[-1] += min(room, size)
        if size > room:
            self._open_sizes.append(size - room)

    def _end_document(self) -> None:
        if self._is_bad:
            self._corpus.data.flush()
            self._corpus.data.truncate(self._document_start * self._corpus.dtype.itemsize)
            if self._corpus.mask is not None:
                self._corpus.mask.seek(self._document_start)
                self._corpus.mask.truncate()
            self.tokens = self._document_start
            self.left_out += 1
        elif self._open_sizes != [0]:
            sequences = self._corpus.index.sequences + len(self._open_sizes)
            self._corpus.index.add(np.array(self._open_sizes, np.int32), np.array([sequences]))
        self._open_sizes, self._document_start, self._is_bad = [0], self.tokens, False
