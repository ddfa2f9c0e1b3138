"""`megafrontier merge`: join corpora. Several are copied at once."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO

import numpy as np

from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import IndexedDataset, bin_path, is_empty
from megafrontier.data.corpus.writer import CorpusWriter, IndexBuilder

_COPY_BYTES = 4 << 20  # in memory at a time, per thread


def merge(prefixes: Sequence[str], out: str | Path, workers: int | None = None) -> int:
    """Join corpora in the given order into OUT.bin and OUT.idx. Returns the number of documents.

    The result is what `prepare` makes of all their inputs at once, with a mask if one of them has
    one. `workers` is the number of threads that copy (default: two per core). Raises UserError for
    a corpus that cannot be read, for token types that differ, and for an `out` that is one of the
    inputs. The inputs may be deleted afterwards, so the whole index of each is checked, and damage
    refused.
    """
    workers = workers if workers is not None else 2 * len(os.sched_getaffinity(0))
    if workers < 1:
        raise UserError(f"--workers: {workers}, need at least 1")
    corpora = [IndexedDataset(prefix) for prefix in prefixes if not is_empty(prefix)]
    if not corpora:
        raise UserError(f"{', '.join(prefixes)}: no text in them, need a corpus with some")
    _check(corpora, out)
    has_mask = any(corpus.mask is not None for corpus in corpora)
    with CorpusWriter(out, corpora[0].dtype, has_mask) as merged:
        *offsets, size = accumulate((corpus.tokens.nbytes for corpus in corpora), initial=0)
        merged.data.truncate(size)
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(partial(_copy, merged.partial_bin), corpora, offsets))
        for corpus in corpora:
            copy_index(corpus, merged.index)
            if merged.mask is not None:
                _copy_mask(corpus, merged.mask)
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


def _copy(merged: Path, corpus: IndexedDataset, offset: int) -> None:
    """Copy the tokens of a corpus to byte `offset` of the merged .bin."""
    # A new descriptor: the writer's own is in append mode and would ignore the offset.
    with bin_path(corpus.prefix).open("rb") as source, merged.open("r+b") as file:
        file.seek(offset)
        copyfileobj(source, file, _COPY_BYTES)


def _copy_mask(corpus: IndexedDataset, file: BinaryIO) -> None:
    """Append the mask of a corpus. Without one, all its tokens are targets."""
    for start in range(0, len(corpus.tokens), _COPY_BYTES):
        stop = min(start + _COPY_BYTES, len(corpus.tokens))
        ones = np.ones(stop - start, np.uint8)
        file.write((ones if corpus.mask is None else corpus.mask[start:stop]).data)


def copy_index(corpus: IndexedDataset, index: IndexBuilder) -> None:
    """Append the index of a corpus. Raises UserError if it is damaged."""
    lengths = corpus.sizes.astype(np.int64) * corpus.dtype.itemsize
    if (lengths < 0).any() or (corpus.pointers != np.cumsum(lengths) - lengths).any():
        raise corpus.damaged("sequences do not follow each other")
    if (np.diff(corpus.document_index) < 0).any():
        raise corpus.damaged("documents do not follow each other")
    index.add(corpus.sizes, corpus.document_index[1:] + index.sequences)
