"""`megafrontier merge`: join corpora. Several threads copy the tokens at once."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import IndexedDataset, bin_path, is_empty
from megafrontier.data.corpus.writer import CorpusWriter, IndexBuilder

_RANGE_BYTES = 256 << 20  # copied by one thread at a time
_COPY_BYTES = 4 << 20  # in memory at a time, per thread
_ENTRIES = 1 << 20  # entries of the index in memory at a time


@dataclass(frozen=True)
class CopyRange:
    """Bytes of one .bin, and their offset in the merged .bin."""

    path: Path
    start: int
    length: int
    target: int


def merge(prefixes: Sequence[str], out: str | Path, workers: int | None = None) -> int:
    """Join corpora in the given order into OUT.bin and OUT.idx. Returns the number of documents.

    The result is what `prepare` makes of all their inputs at once. `workers` is the number of
    threads that copy (default: two per core). Raises UserError for a corpus that cannot be read,
    for token types that differ, and for an `out` that is one of the inputs. The inputs may be
    deleted afterwards, so the whole index of each is checked, and damage refused.
    """
    workers = workers if workers is not None else 2 * len(os.sched_getaffinity(0))
    if workers < 1:
        raise UserError(f"--workers: {workers}, need at least 1")
    corpora = [IndexedDataset(prefix) for prefix in prefixes if not is_empty(prefix)]
    if not corpora:
        raise UserError(f"{', '.join(prefixes)}: no text in them, need a corpus with some")
    _check(corpora, out)
    with CorpusWriter(out, corpora[0].dtype) as merged:
        merged.data.truncate(sum(corpus.tokens.nbytes for corpus in corpora))
        _copy_tokens(_ranges(corpora), merged.partial_bin, workers)
        for corpus in corpora:
            _copy_index(corpus, merged.index)
        merged.publish()
        return merged.index.documents


def _check(corpora: Sequence[IndexedDataset], out: str | Path) -> None:
    first = corpora[0]
    for corpus in corpora:
        if corpus.dtype != first.dtype:
            raise UserError(
                f"{corpus.prefix}: {corpus.dtype} tokens, {first.prefix} has {first.dtype}; need "
                "corpora of one tokenizer"
            )
        if bin_path(corpus.prefix).resolve() == bin_path(out).resolve():
            raise UserError(f"--out {out}: is one of the corpora to merge; give another name")


def _ranges(corpora: Sequence[IndexedDataset]) -> Iterator[CopyRange]:
    target = 0
    for corpus in corpora:
        length = corpus.tokens.nbytes
        for start in range(0, length, _RANGE_BYTES):
            size = min(_RANGE_BYTES, length - start)
            yield CopyRange(bin_path(corpus.prefix), start, size, target + start)
        target += length


def _copy_tokens(ranges: Iterator[CopyRange], path: Path, workers: int) -> None:
    # A new descriptor: the writer's own is in append mode and would ignore offsets.
    target = os.open(path, os.O_WRONLY)
    try:
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(partial(_copy_range, target), ranges):
                continue
    finally:
        os.close(target)


def _copy_range(target: int, copied: CopyRange) -> None:
    with copied.path.open("rb", buffering=0) as file:
        done = 0
        while done < copied.length:
            size = min(_COPY_BYTES, copied.length - done)
            block = os.pread(file.fileno(), size, copied.start + done)
            if not block:
                at = copied.start + done
                raise UserError(f"{copied.path}: cut off at byte {at} while it was copied")
            done += os.pwrite(target, block, copied.target + done)


def _copy_index(corpus: IndexedDataset, index: IndexBuilder) -> None:
    sequences = index.sequences
    no_sizes, no_documents = np.zeros(0, np.int32), np.zeros(0, np.int64)
    offset = 0
    for start in range(0, len(corpus.sizes), _ENTRIES):
        sizes = corpus.sizes[start : start + _ENTRIES]
        ends = offset + np.cumsum(sizes, dtype=np.int64) * corpus.dtype.itemsize
        starts = np.concatenate([[offset], ends[:-1]])
        wrong = np.flatnonzero((sizes < 0) | (corpus.pointers[start : start + _ENTRIES] != starts))
        if len(wrong):
            number = start + wrong[0]
            raise corpus.damaged(f"sequence {number} does not start where the one before ends")
        offset = int(ends[-1])
        index.add(sizes, no_documents)
    for start in range(1, len(corpus.document_index), _ENTRIES):
        steps = np.diff(corpus.document_index[start - 1 : start + _ENTRIES])
        if (steps < 0).any():
            number = start - 1 + int(np.argmax(steps < 0))
            raise corpus.damaged(f"document {number} ends before it starts")
        index.add(no_sizes, corpus.document_index[start : start + _ENTRIES] + sequences)
