"""Corpora in Megatron's format: opened at once whatever their size, refused by name if damaged."""

import os
import re
import resource
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import HEADER, IndexedDataset
from tests.data.corpora import document, write_corpus

DOCUMENTS = [[[5, 6, 7]], [[8], [9, 10]], [[11, 12, 13, 14]]]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_a_corpus_of_megatron_is_read(tmp_path: Path, dtype: str) -> None:
    corpus = IndexedDataset(write_corpus(tmp_path / "c", DOCUMENTS, dtype))
    assert corpus.dtype == np.dtype(dtype)
    assert corpus.tokens.tolist() == list(range(5, 15))
    assert [document(corpus, i).tolist() for i in range(len(corpus))] == [
        [5, 6, 7],
        [8, 9, 10],
        [11, 12, 13, 14],
    ]


def test_a_blend_may_have_more_corpora_than_the_limit_of_open_files(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", DOCUMENTS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = max(int(name) for name in os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 20, hard))
    try:
        corpora = [IndexedDataset(tmp_path / "c") for _ in range(50)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(len(corpus) == 3 for corpus in corpora)


def test_document_starts_are_not_sequence_starts(tmp_path: Path) -> None:
    corpus = IndexedDataset(write_corpus(tmp_path / "c", DOCUMENTS))
    assert corpus.document_starts(0, 10).tolist() == [0, 3, 6]
    assert corpus.document_starts(1, 6).tolist() == [3]
    assert corpus.document_starts(3, 4).tolist() == [3]
    assert corpus.document_starts(7, 10).tolist() == []


def test_empty_documents_are_supported(tmp_path: Path) -> None:
    corpus = IndexedDataset(write_corpus(tmp_path / "c", [[[]], [[1, 2]], [], [[3]], []]))
    assert corpus.document_starts(0, 3).tolist() == [0, 0, 2, 2]
    assert [document(corpus, i).tolist() for i in range(len(corpus))] == [[], [1, 2], [], [3], []]


@pytest.mark.parametrize(
    ("number", "sequence"),
    [(50, -1), (50, 90), (50, 2**40), (37, -(2**63) + 37), (37, 3), (37, 100)],
)
def test_documents_out_of_order_or_range_are_refused_by_file(
    tmp_path: Path, number: int, sequence: int
) -> None:
    """Document 50 is read by the binary search, document 37 is not."""
    prefix = write_corpus(tmp_path / "c", [[[token]] for token in range(100)])
    with Path(f"{prefix}.idx").open("r+b") as file:
        file.seek(-8 * (101 - number), os.SEEK_END)
        file.write(struct.pack("<q", sequence))
    with pytest.raises(UserError, match=r"c\.idx: damaged: document"):
        IndexedDataset(prefix).document_starts(0, 100)


def test_a_corpus_of_a_hundred_million_documents_opens_at_once(tmp_path: Path) -> None:
    documents = 10**8
    sparse_index(tmp_path / "c.idx", documents)
    with (tmp_path / "c.bin").open("wb") as file:
        file.truncate(2 * 10 * documents)
    code = f"""
import time
from megafrontier.data.corpus.indexed import IndexedDataset
start = time.process_time()
corpus = IndexedDataset({str(tmp_path / "c")!r})
assert len(corpus) == {documents} and len(corpus.tokens) == {10 * documents}
corpus.document_starts(10**9 - 5000, 10**9)
seconds = time.process_time() - start
peak_kib = next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM"))
print(seconds, 1024 * int(peak_kib))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, rss_bytes = map(float, done.stdout.split())
    assert seconds < 1
    assert rss_bytes < 100e6


def sparse_index(path: Path, documents: int) -> None:
    """Write an index of holes in the file, except for the few entries that opening reads."""
    with path.open("wb") as file:
        file.write(HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1))
        file.truncate(HEADER.size + 20 * documents + 8)
        for at, form, value in (
            (4 * documents - 4, "<i", 10),
            (12 * documents - 8, "<q", 20 * documents - 20),
            (20 * documents, "<q", documents),
        ):
            file.seek(HEADER.size + at)
            file.write(struct.pack(form, value))


def damaged(folder: Path, suffix: str, damage) -> str:
    """Change one file of a good corpus with `damage`, and return the refusal."""
    prefix = write_corpus(folder / "c", DOCUMENTS)
    path = Path(f"{prefix}{suffix}")
    data = damage(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(UserError) as refusal:
        IndexedDataset(prefix)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("suffix", "damage", "says"),
    [
        (".bin", lambda data: data[:-3], "17 bytes, its .idx describes 20; truncated or"),
        (".bin", lambda data: data + b"xx", "22 bytes, its .idx describes 20"),
        (".bin", lambda data: b"", "empty at byte 0"),
        (".idx", lambda data: None, "No such file"),
        (".idx", lambda data: b"", "empty at byte 0"),
        (".idx", lambda data: data[:20], "truncated at byte 20"),
        (".idx", lambda data: data[:-1], "truncated at byte 113"),
        (".idx", lambda data: b"PARQUET!!" + data[9:], "byte 0: b'PARQUET!!' is not a Megatron"),
        (".idx", lambda data: data[:9] + b"\x02" + data[10:], "byte 9: index version 2"),
        (".idx", lambda data: data[:17] + b"\x07" + data[18:], "byte 17: dtype code 7"),
        (".idx", lambda data: data[:-8] + bytes(8), "document index runs from 0 to 0"),
    ],
)
def test_a_damaged_corpus_is_refused_by_file_and_byte(
    tmp_path: Path, suffix: str, damage, says: str
) -> None:
    assert re.search(re.escape(says), damaged(tmp_path, suffix, damage))
