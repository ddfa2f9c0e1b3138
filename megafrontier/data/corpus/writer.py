"""Writes a corpus: streaming, in flat memory, whole under its name or not there at all."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from megafrontier.common.errors import UserError
from megafrontier.common.files import sync_file, sync_folder
from megafrontier.data.corpus.indexed import HEADER, MAGIC, VERSION, bin_path, dtype_code, idx_path

_FULL = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "no space left on the disk",
    errno.EFBIG: os.strerror(errno.EFBIG).lower(),  # by ulimit -f, or the file system
}
LONGEST_SEQUENCE = 2**31 - 1
"""Tokens the int32 sizes of the format can tell; a longer document has several sequences."""

_CHUNK = 1 << 20  # entries of the index in memory at a time


def partial_path(path: Path) -> Path:
    """Name under which `path` is written before it is whole. Fixed, so that the next run
    overwrites what a killed one left."""
    return path.with_name(f"{path.name}.partial")


class IndexBuilder:
    """Collects the index in unnamed files, which vanish with the process, and writes it out."""

    def __init__(self, folder: Path) -> None:
        self._sizes: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._documents: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.sequences = 0
        self.documents = 0

    def add(self, sizes: NDArray[np.int32], documents: NDArray[np.int64]) -> None:
        """Append sequences [n], in tokens, and the ends of documents [d]: how many of all the
        sequences so far each document and those before it have."""
        self._sizes.write(sizes.astype("<i4", copy=False).tobytes())
        self._documents.write(documents.astype("<i8", copy=False).tobytes())
        self.sequences += len(sizes)
        self.documents += len(documents)

    def write(self, file: BinaryIO, dtype: np.dtype) -> None:
        """Write the .idx of a .bin that holds the sequences without gaps."""
        code = dtype_code(dtype)
        file.write(HEADER.pack(MAGIC, VERSION, code, self.sequences, self.documents + 1))
        for sizes in _chunks(self._sizes, "<i4"):
            file.write(sizes.tobytes())
        start = 0
        for sizes in _chunks(self._sizes, "<i4"):
            ends = start + np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
            file.write(np.concatenate([[start], ends[:-1]]).astype("<i8").tobytes())
            start = int(ends[-1])
        file.write(np.zeros(1, "<i8").tobytes())
        for documents in _chunks(self._documents, "<i8"):
            file.write(documents.tobytes())

    def close(self) -> None:
        """Give the disk space back."""
        self._sizes.close()
        self._documents.close()


def _chunks(spool: BinaryIO, dtype: str) -> Iterator[NDArray]:
    spool.seek(0)
    while block := spool.read(_CHUNK * np.dtype(dtype).itemsize):
        yield np.frombuffer(block, dtype)


class CorpusWriter:
    """PREFIX.bin and PREFIX.idx under partial names, put in place together by `publish`.

    A context manager: without `publish` nothing is left behind. Raises UserError when the folder
    cannot be made, another process is writing the same prefix, or it is empty.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        if os.path.basename(prefix) in ("", ".", ".."):
            need = os.path.join(prefix, "corpus")
            raise UserError(f"--out {str(prefix)!r}: need a corpus prefix, as {need}")
        self.bin, self.idx, self.dtype = bin_path(prefix), idx_path(prefix), dtype
        self.partial_bin = partial_path(self.bin)
        try:
            self.bin.parent.mkdir(parents=True, exist_ok=True)
            self.data = _lock(self.partial_bin, prefix)
        except OSError as error:
            raise UserError(f"{prefix}: cannot write there: {error.strerror}") from error
        self.data.truncate(0)
        self.index = IndexBuilder(self.bin.parent)
        self._has_names = False

    def __enter__(self) -> Self:
        return self

    def publish(self) -> None:
        """Make it durable and visible. The .idx comes last: without it there is no corpus."""
        with partial_path(self.idx).open("wb") as file:
            self.index.write(file, self.dtype)
            sync_file(file)
        sync_file(self.data)
        self.idx.unlink(missing_ok=True)
        self.partial_bin.rename(self.bin)
        partial_path(self.idx).rename(self.idx)
        self._has_names = True  # what is called partial from here on is another writer's
        sync_folder(self.bin.parent)

    def __exit__(self, _kind: object, error: BaseException | None, *_: object) -> None:
        for path in () if self._has_names else (self.bin, self.idx):
            partial_path(path).unlink(missing_ok=True)
        # A full disk refuses the last buffers again; `error` has already said so.
        with suppress(OSError):
            self.index.close()
            self.data.close()
        if isinstance(error, OSError) and error.errno in _FULL:
            raise UserError(f"{self.bin}: {_FULL[error.errno]}; nothing written") from error


def _lock(path: Path, prefix: str | Path) -> BinaryIO:
    """Open `path` as its only writer. The kernel forgets the lock when the process dies."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(f"{prefix}: another process is writing this corpus") from error
    except OSError:
        # Lustre mounted without flock: two writers of one prefix go unnoticed there.
        return file
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        # The other writer published between our open and our lock: this is its corpus now.
        file.close()
        raise UserError(f"{prefix}: another process has just written this corpus")
    return file


class DocumentWriter:
    """Appends runs of tokens to a corpus; a document may come in several runs."""

    def __init__(self, corpus: CorpusWriter) -> None:
        self._corpus = corpus
        self._open_sizes = [0]
        self._document_start = 0
        self._spoilt = False
        self.tokens = 0
        self.left_out = 0
        """Documents that a run has spoilt."""

    def write_runs(
        self,
        tokens: NDArray,
        sizes: NDArray[np.int32],
        ends: NDArray[np.bool_],
        bad: NDArray[np.bool_],
    ) -> None:
        """Append runs: their tokens [sum of sizes], how many each has, whether a document ends
        with it, and whether it spoils its document [runs]. Empty documents are left out."""
        if ends.all() and not bad.any() and not self._spoilt and self._open_sizes == [0]:
            self._write_documents(tokens, sizes[sizes > 0])
            return
        starts = np.cumsum(sizes) - sizes
        for start, size, end, spoilt in zip(starts, sizes, ends, bad, strict=True):
            self._write_run(tokens[start : start + size])
            self._spoilt |= bool(spoilt)
            if end:
                self._end_document()

    def _write_documents(self, tokens: NDArray, sizes: NDArray[np.int32]) -> None:
        self._corpus.data.write(tokens.tobytes())
        first = self._corpus.index.sequences + 1
        self._corpus.index.add(sizes, np.arange(first, first + len(sizes)))
        self.tokens += len(tokens)
        self._document_start = self.tokens

    def _write_run(self, run: NDArray) -> None:
        self._corpus.data.write(run.tobytes())
        self.tokens += len(run)
        room = LONGEST_SEQUENCE - self._open_sizes[-1]
        self._open_sizes[-1] += min(room, len(run))
        if len(run) > room:
            self._open_sizes.append(len(run) - room)

    def _end_document(self) -> None:
        if self._spoilt:
            self._corpus.data.flush()
            self._corpus.data.truncate(self._document_start * self._corpus.dtype.itemsize)
            self.tokens = self._document_start
            self.left_out += 1
        elif self._open_sizes != [0]:
            sequences = self._corpus.index.sequences + len(self._open_sizes)
            self._corpus.index.add(np.array(self._open_sizes, np.int32), np.array([sequences]))
        self._open_sizes, self._document_start, self._spoilt = [0], self.tokens, False
