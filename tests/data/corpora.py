"""Corpora written from the description of the format alone, and corpora that `prepare` makes."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafrontier.data.corpus.indexed import IndexedDataset
from megafrontier.data.text.prepare import prepare

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_corpus(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16"
) -> Path:
    """Write a corpus of documents of sequences of ids, as Megatron-LM does."""
    sequences = [sequence for document in documents for sequence in document]
    size = np.dtype(dtype).itemsize
    idx = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + bytes([CODES[dtype]])
    idx += struct.pack("<QQ", len(sequences), len(documents) + 1)
    idx += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    starts = [sum(len(s) for s in sequences[:i]) * size for i in range(len(sequences))]
    idx += b"".join(struct.pack("<q", start) for start in starts)
    ends = [sum(len(d) for d in documents[:i]) for i in range(len(documents) + 1)]
    idx += b"".join(struct.pack("<q", end) for end in ends)
    Path(f"{prefix}.idx").write_bytes(idx)
    tokens = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(np.array(tokens, dtype).tobytes())
    return prefix


def write_counting(prefix: Path, tokens: int, document: int = 7, start: int = 0) -> Path:
    """Write a corpus of the ids start, start + 1, … in documents of the given length."""
    ids = list(range(start, start + tokens))
    return write_corpus(prefix, [[ids[i : i + document]] for i in range(0, tokens, document)])


def read_corpus(prefix: Path) -> tuple[bytes, bytes]:
    """Return the bytes of both files."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def document(corpus: IndexedDataset, number: int) -> NDArray:
    """The tokens of one document."""
    return corpus.tokens[corpus.document_start(number) : corpus.document_start(number + 1)]


def prepared(folder: Path, *inputs: str | Path, **options) -> list[str]:
    """Return the documents that `prepare` makes of the inputs."""
    prepare([str(i) for i in inputs], "bytes", folder / "made", 1, **options)
    corpus = IndexedDataset(folder / "made")
    return [bytes(document(corpus, i).tolist()).decode() for i in range(len(corpus))]
