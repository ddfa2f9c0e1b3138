"""`megafrontier merge`: join corpora. Several threads copy the tokens at once."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import IndexedDataset, bin_path, is_empty
from megafrontier.data.corpus.writer import CorpusWriter, IndexBuilder

_RANGE_BYTES = 256 << 20  # copied by one thread at a time
_COPY_BYTES = 4 << 20  # in memory at a time, per thread
_ENTRIES = 1 << 20  # entries of the index in memory at a time


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
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(partial(_copy_range, merged.partial_bin), _ranges(corpora)))
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


def _ranges(corpora: Sequence[IndexedDataset]) -> Iterator[tuple[Path, int, int, int]]:
    """Yield (path, first byte, end, offset in the merged .bin) of the ranges of every .bin."""
    target = 0
    for corpus in corpora:
        length = corpus.tokens.nbytes
        for start in range(0, length, _RANGE_BYTES):
            end = min(start + _RANGE_BYTES, length)
            yield bin_path(corpus.prefix), start, end, target + start
        target += length


def _copy_range(merged: Path, copied: tuple[Path, int, int, int]) -> None:
    path, start, end, target = copied
    # A new descriptor: the writer's own is in append mode and would ignore offsets.
    with path.open("rb", buffering=0) as source, merged.open("r+b") as file:
        source.seek(start)
        file.seek(target)
        while start < end:
            block = source.read(min(_COPY_BYTES, end - start))
            if not block:
                raise UserError(f"{path}: cut off at byte {start} while it was copied")
            start += len(block)
            file.write(block)


def _copy_index(corpus: IndexedDataset, index: IndexBuilder) -> None:
    sequences = index.sequences
    no_sizes, no_documents = np.zeros(0, np.int32), np.zeros(0, np.int64)
    offset = 0
    for start in range(0, len(corpus.sizes), _ENTRIES):
        sizes = corpus.sizes[start : start + _ENTRIES]
        ends = offset + np.cumsum(sizes, dtype=np.int64) * corpus.dtype.itemsize
        starts = np.concatenate([[offset], ends[:-1]])
        if (sizes < 0).any() or (corpus.pointers[start : start + _ENTRIES] != starts).any():
            raise corpus.damaged(f"sequences from {start} on do not follow each other")
        offset = int(ends[-1])
        index.add(sizes, no_documents)
    for start in range(1, len(corpus.document_index), _ENTRIES):
        if (np.diff(corpus.document_index[start - 1 : start + _ENTRIES]) < 0).any():
            raise corpus.damaged(f"documents from {start - 1} on do not follow each other")
        index.add(no_sizes, corpus.document_index[start : start + _ENTRIES] + sequences)
