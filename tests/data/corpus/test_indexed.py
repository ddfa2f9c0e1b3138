"""Corpora: Megatron's bytes, opened at once whatever their size, refused by name when broken."""

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
from megafrontier.data.corpus.indexed import HEADER, IndexedDataset, token_dtype
from megafrontier.data.corpus.writer import IndexBuilder
from tests.data.corpora import write_corpus

DOCUMENTS = [[[5, 6, 7]], [[8], [9, 10]], [[11, 12, 13, 14]]]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_a_corpus_written_elsewhere_is_read_as_it_is(tmp_path: Path, dtype: str) -> None:
    corpus = IndexedDataset(write_corpus(tmp_path / "c", DOCUMENTS, dtype))
    assert corpus.dtype == np.dtype(dtype)
    assert corpus.tokens.tolist() == list(range(5, 15))
    assert [corpus.document(i).tolist() for i in range(len(corpus))] == [
        [5, 6, 7],
        [8, 9, 10],
        [11, 12, 13, 14],
    ]


def test_a_blend_may_have_more_corpora_than_files_are_allowed_at_first(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", DOCUMENTS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = max(int(name) for name in os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 20, hard))
    try:
        corpora = [IndexedDataset(tmp_path / "c") for _ in range(50)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(len(corpus) == 3 for corpus in corpora)


def test_document_starts_are_those_of_documents_and_not_of_sequences(tmp_path: Path) -> None:
    corpus = IndexedDataset(write_corpus(tmp_path / "c", DOCUMENTS))
    assert corpus.document_starts(0, 10).tolist() == [0, 3, 6]
    assert corpus.document_starts(1, 6).tolist() == [3]
    assert corpus.document_starts(3, 4).tolist() == [3]
    assert corpus.document_starts(7, 10).tolist() == []


def test_empty_documents_of_others_do_no_harm(tmp_path: Path) -> None:
    corpus = IndexedDataset(write_corpus(tmp_path / "c", [[[]], [[1, 2]], [], [[3]], []]))
    assert corpus.document_starts(0, 3).tolist() == [0, 0, 2, 2]
    assert [corpus.document(i).tolist() for i in range(len(corpus))] == [[], [1, 2], [], [3], []]


@pytest.mark.parametrize(
    ("number", "sequence"),
    [(50, -1), (50, 3), (50, 90), (50, 2**40), (37, -(2**63) + 37), (37, 3), (37, 90), (37, 100)],
)
def test_documents_out_of_order_or_range_are_refused_by_file(
    tmp_path: Path, number: int, sequence: int
) -> None:
    """One that the binary search comes across, and one that it does not."""
    prefix = write_corpus(tmp_path / "c", [[[token]] for token in range(100)])
    with Path(f"{prefix}.idx").open("r+b") as file:
        file.seek(-8 * (101 - number), os.SEEK_END)
        file.write(struct.pack("<q", sequence))
    with pytest.raises(UserError, match=r"c\.idx: damaged: document"):
        IndexedDataset(prefix).document_starts(0, 100)


def test_vocabularies_below_65500_take_two_bytes_as_in_megatron() -> None:
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


# getrusage would tell the peak of the process that forked this one.
PEAK_BYTES = """
def peak_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
"""


def test_a_corpus_of_a_hundred_million_documents_opens_at_once(tmp_path: Path) -> None:
    documents = 10**8
    sparse_index(tmp_path / "c.idx", documents)
    with (tmp_path / "c.bin").open("wb") as file:
        file.truncate(2 * 10 * documents)
    code = f"""
import time
{PEAK_BYTES}
from megafrontier.data.corpus.indexed import IndexedDataset
start = time.perf_counter()
corpus = IndexedDataset({str(tmp_path / "c")!r})
assert len(corpus) == {documents} and len(corpus.tokens) == {10 * documents}
corpus.document_starts(10**9 - 5000, 10**9)
seconds = time.perf_counter() - start
print(seconds, peak_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, rss_bytes = map(float, done.stdout.split())
    assert seconds < 1
    assert rss_bytes < 100e6


def sparse_index(path: Path, documents: int) -> None:
    """An index whose entries are holes in the file, but for the few that opening looks at."""
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


def test_the_index_is_written_in_flat_memory(tmp_path: Path) -> None:
    code = f"""
{PEAK_BYTES}
from pathlib import Path
import numpy as np
from megafrontier.data.corpus.writer import IndexBuilder
spool = IndexBuilder(Path({str(tmp_path)!r}))
before = peak_bytes()
for part in range(100):
    ends = np.arange(part * 10**5, (part + 1) * 10**5) + 1
    spool.add(np.full(10**5, 3, np.int32), ends)
with open({str(tmp_path / "c.idx")!r}, "wb") as file:
    spool.write(file, np.dtype(np.uint16))
print(peak_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (tmp_path / "c.idx").stat().st_size == HEADER.size + 20 * 10**7 + 8
    assert float(done.stdout) < 60e6  # the index has 200 MB


def test_pointers_go_on_from_chunk_to_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megafrontier.data.corpus.writer._ENTRIES", 2)
    expected = write_corpus(tmp_path / "c", DOCUMENTS)
    spool = IndexBuilder(tmp_path)
    spool.add(np.array([3, 1, 2, 4], np.int32), np.array([1, 3, 4]))
    with (tmp_path / "made.idx").open("wb") as file:
        spool.write(file, np.dtype(np.uint16))
    assert (tmp_path / "made.idx").read_bytes() == Path(f"{expected}.idx").read_bytes()


def damaged(folder: Path, suffix: str, damage) -> str:
    """A good corpus, one file of which `damage` has changed; returns the refusal."""
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
        (".bin", lambda data: data[:-3], "truncated at byte 17, its .idx needs 20"),
        (".bin", lambda data: data + b"xx", "22 bytes, its .idx describes 20"),
        (".bin", lambda data: b"", "empty at byte 0"),
        (".bin", lambda data: None, "No such file"),
        (".idx", lambda data: None, "No such file"),
        (".idx", lambda data: b"", "empty at byte 0"),
        (".idx", lambda data: data[:20], "truncated at byte 20"),
        (".idx", lambda data: data[:-1], "truncated at byte 113"),
        (".idx", lambda data: data + b"x", "115 bytes"),
        (".idx", lambda data: b"PARQUET!!" + data[9:], "byte 0: b'PARQUET!!' is not a Megatron"),
        (".idx", lambda data: data[:9] + b"\x02" + data[10:], "byte 9: index version 2"),
        (".idx", lambda data: data[:17] + b"\x07" + data[18:], "byte 17: dtype code 7"),
        (".idx", lambda data: data[:-8] + bytes(8), "document index runs from 0 to 0"),
    ],
)
def test_a_broken_corpus_is_refused_by_file_and_byte(
    tmp_path: Path, suffix: str, damage, says: str
) -> None:
    assert re.search(re.escape(says), damaged(tmp_path, suffix, damage))


def test_an_index_without_sequences_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [])
    with pytest.raises(UserError, match="byte 18: 0 sequences"):
        IndexedDataset(tmp_path / "c")
