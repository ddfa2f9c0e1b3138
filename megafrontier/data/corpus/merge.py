"""`megafrontier merge`: several corpora to one, the tokens copied by many threads at once."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import IndexedDataset, bin_path, idx_path, is_empty
from megafrontier.data.corpus.writer import CorpusWriter, IndexBuilder

_RANGE_BYTES = 256 << 20  # copied by one thread at a time
_COPY_BYTES = 4 << 20  # in memory at a time, a thread
_ENTRIES = 1 << 20  # of the index in memory at a time


@dataclass(frozen=True)
class Range:
    """Bytes of one .bin and where they go in the merged one."""

    path: Path
    start: int
    length: int
    target: int


def merge(prefixes: Sequence[str], out: str | Path, workers: int | None = None) -> int:
    """Join corpora in the order given into OUT.bin and OUT.idx; returns the number of documents.

    The result is what `prepare` makes of all their inputs at once. `workers` threads copy (default:
    two a core). Raises UserError for a corpus that cannot be read, token types that differ, and
    an `out` that is one of the inputs. Whoever deletes the inputs has nothing else of them: so also
    for an index that is damaged.
    """
    workers = workers if workers is not None else 2 * len(os.sched_getaffinity(0))
    if workers < 1:
        raise UserError(f"--workers: {workers}, need at least 1")
    parts = [IndexedDataset(prefix) for prefix in prefixes if not is_empty(prefix)]
    if not parts:
        raise UserError(f"{', '.join(prefixes)}: no text in them, need a corpus with some")
    _check(parts, out)
    with CorpusWriter(out, parts[0].dtype) as corpus:
        corpus.data.truncate(sum(part.tokens.nbytes for part in parts))
        _copy_tokens(list(_ranges(parts)), corpus, workers)
        for part in parts:
            _copy_index(part, corpus.index)
        corpus.publish()
        return corpus.index.documents


def _check(parts: Sequence[IndexedDataset], out: str | Path) -> None:
    for part in parts:
        if part.dtype != parts[0].dtype:
            raise UserError(
                f"{part.prefix}: {part.dtype} tokens, {parts[0].prefix} has {parts[0].dtype}; "
                "corpora of one tokenizer fit together"
            )
        if bin_path(part.prefix).resolve() == bin_path(out).resolve():
            raise UserError(f"--out {out}: is one of the corpora to merge; give another name")


def _ranges(parts: Sequence[IndexedDataset]) -> Iterator[Range]:
    target = 0
    for part in parts:
        length = part.tokens.nbytes
        for start in range(0, length, _RANGE_BYTES):
            size = min(_RANGE_BYTES, length - start)
            yield Range(bin_path(part.prefix), start, size, target + start)
        target += length


def _copy_tokens(ranges: Sequence[Range], corpus: CorpusWriter, workers: int) -> None:
    # Written through a descriptor of its own: the corpus' appends whatever the offset.
    target = os.open(corpus.partial_bin, os.O_WRONLY)
    try:
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(lambda piece: _copy_range(piece, target), ranges):
                continue
    finally:
        os.close(target)


def _copy_range(piece: Range, target: int) -> None:
    with piece.path.open("rb", buffering=0) as file:
        done = 0
        while done < piece.length:
            size = min(_COPY_BYTES, piece.length - done)
            block = os.pread(file.fileno(), size, piece.start + done)
            if not block:
                raise UserError(f"{piece.path}: cut off at byte {piece.start + done} meanwhile")
            done += os.pwrite(target, block, piece.target + done)


def _copy_index(part: IndexedDataset, index: IndexBuilder) -> None:
    sequences = index.sequences
    no_sizes, no_documents = np.zeros(0, np.int32), np.zeros(0, np.int64)
    offset = 0
    for start in range(0, len(part.sizes), _ENTRIES):
        sizes = part.sizes[start : start + _ENTRIES]
        ends = offset + np.cumsum(sizes, dtype=np.int64) * part.dtype.itemsize
        begins = np.concatenate([[offset], ends[:-1]])
        wrong = np.flatnonzero((sizes < 0) | (part.pointers[start : start + _ENTRIES] != begins))
        if len(wrong):
            raise _damaged(part, f"sequence {start + wrong[0]} is not where the one before ends")
        offset = int(ends[-1])
        index.add(sizes, no_documents)
    for start in range(1, len(part.document_index), _ENTRIES):
        steps = np.diff(part.document_index[start - 1 : start + _ENTRIES])
        if (steps < 0).any():
            number = start - 1 + int(np.argmax(steps < 0))
            raise _damaged(part, f"document {number} ends before it begins")
        index.add(no_sizes, part.document_index[start : start + _ENTRIES] + sequences)


def _damaged(part: IndexedDataset, what: str) -> UserError:
    return UserError(f"{idx_path(part.prefix)}: damaged: {what}; copy or prepare again")
