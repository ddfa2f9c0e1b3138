"""Texts in files and tables: all of them are read, and bad ones named by file and place."""

import codecs
import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from megafrontier.cli import main
from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import IndexedDataset
from megafrontier.data.text.prepare import prepare
from megafrontier.data.text.reader import BadText, Reader
from megafrontier.data.text.sources import Source
from tests.data.corpora import document, prepared

TEXTS = ["first text\n", "zweiter Text é", "3"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def zstd_long(data: bytes) -> bytes:
    """Pack as `zstd --long=28` packs its standard input."""
    import zstandard

    chosen = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=chosen).compressobj()
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("x.JSONL", bytes),
        ("x.jsonl.gz", gzip.compress),
        ("x.jsonl.ZST", zstd),
        ("x.jsonl.zst", zstd_long),
        ("x.ndjson", bytes),
        ("x.json.gz", gzip.compress),
    ],
)
def test_json_lines_are_read_packed_or_not(tmp_path: Path, name: str, pack) -> None:
    (tmp_path / name).write_bytes(pack(LINES))
    assert prepared(tmp_path, tmp_path / name) == TEXTS
    # Several members, as `cat` and parallel packers write them.
    (tmp_path / name).write_bytes(pack(LINES) + pack(LINES))
    assert prepared(tmp_path, tmp_path / name) == TEXTS * 2


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.txt"])
def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + (b"text" if name == "x.txt" else LINES))
    assert prepared(tmp_path, tmp_path / name) == (["text"] if name == "x.txt" else TEXTS)


def test_another_key_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('\n{"text": 1, "body": "a"}\n\r\n{"body": "b"}')
    assert prepared(tmp_path, tmp_path / "x.jsonl", key="body") == ["a", "b"]


def test_a_row_that_is_not_utf8_is_named_and_may_be_skipped(tmp_path: Path) -> None:
    """Not every writer checks its strings."""
    import pyarrow
    import pyarrow.parquet

    raw = pyarrow.array([b"good", b"b\xffd", None, b"gut"], pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 4, raw.buffers())
    source = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), source)
    with pytest.raises(UserError, match=r"row 1: column 'text': byte 1: invalid UTF-8 \(0xff"):
        prepared(tmp_path, source)
    assert prepared(tmp_path, source, skip_bad=True) == ["good", "gut"]


def test_parquet_is_read(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": TEXTS, "number": [1, 2, 3]})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    assert prepared(tmp_path, path) == TEXTS
    with pytest.raises(UserError, match=r"x\.parquet: no column 'body'; .* text, number"):
        prepared(tmp_path, path, key="body")


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("x.txt", b"abc\xff", "x.txt: byte 3: invalid UTF-8 (0xff"),
        ("x.txt", b"a line\n" * 300_000 + b"\xc3", "x.txt: byte 2100000: invalid UTF-8"),
        ("x.txt", b"", "no text in it"),
        ("x.jsonl", LINES + b"{nothing}\n", "x.jsonl:4: not valid JSON"),
        ("x.jsonl", LINES + b'{"body": "x"}\n', "x.jsonl:4: no 'text' in it, only: 'body'"),
        ("x.jsonl", b'{"text": 5}\n', "x.jsonl:1: 'text' is int, need a string"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', "x.jsonl:1: 'text' holds half a surrogate pair"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "x.jsonl:2: byte 10: invalid UTF-8"),
        (
            "x.jsonl",
            LINES + b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
            "x.jsonl:4: JSON too deeply nested, need fewer levels; --skip-bad",
        ),
        ("x.jsonl.gz", b"not packed at all", "x.jsonl.gz: corrupt near byte 0"),
        ("x.jsonl.gz", gzip.compress(LINES * 99)[:-20], "cut off at byte "),
        ("x.jsonl.gz", b"", "x.jsonl.gz: cut off at byte 0, "),
        ("x.jsonl.gz", gzip.compress(LINES)[:-6] + b"123456", "x.jsonl.gz: corrupt near byte "),
        ("x.jsonl.zst", b"not packed at all", "x.jsonl.zst: corrupt near byte 0"),
        ("x.jsonl.zst", zstd(LINES * 99)[:-20], "cut off at byte "),
        ("x.jsonl.zst", zstd(LINES)[:-4] + b"1234", "x.jsonl.zst: corrupt near byte "),
        ("x.parquet", b"PAR1 but no more", "x.parquet: cannot read the table"),
    ],
)
def test_bad_input_is_named_by_file_and_place_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(data)
    command = ["prepare", str(tmp_path / name), "--tokenizer", "bytes", "--workers", "1"]
    assert main([*command, "--out", str(tmp_path / "made")]) == 2
    refusal = capsys.readouterr().err
    assert says in refusal
    assert refusal.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.fixture
def short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read lines of at most 100,000 bytes, in small blocks."""
    monkeypatch.setattr("megafrontier.data.text.files.BLOCK_BYTES", 3_000)
    monkeypatch.setattr("megafrontier.data.text.files._READ_BYTES", 1_000)
    monkeypatch.setattr("megafrontier.data.text.files.LINE_BYTES", 100_000)


@pytest.mark.parametrize("size", [100_001, 102_999, 103_000, 1_000_000])
@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zstd)])
def test_a_line_that_is_too_long_is_named_and_may_be_skipped(
    tmp_path: Path, short_lines: None, size: int, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"x.jsonl{suffix}"
    long = json.dumps({"text": "x" * (size - 12)}).encode()
    assert len(long) == size
    path.write_bytes(pack(LINES + long + b"\n" + LINES + long))
    with pytest.raises(UserError, match=r"x\.jsonl.*:4: a line of more than 100000 bytes, need"):
        prepared(tmp_path, path)
    assert prepared(tmp_path, path, skip_bad=True) == TEXTS * 2


def test_a_line_of_the_longest_size_is_read(tmp_path: Path, short_lines: None) -> None:
    text = "x" * (100_000 - 12)
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert prepared(tmp_path, tmp_path / "x.jsonl") == [text]


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zstd)])
def test_a_line_that_is_too_long_is_never_held_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    pack: Callable[[bytes], bytes],
) -> None:
    monkeypatch.setattr("megafrontier.data.text.files.LINE_BYTES", 1 << 20)
    monkeypatch.setattr("megafrontier.data.text.files._PACKED_BYTES", 64)
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(pack(b"x" * 40_000_000))
    source = Source(str(path), "lines", path.stat().st_size)
    tracemalloc.start()
    try:
        (bad,) = Reader([source], "text").texts()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(bad, BadText)
    assert peak < 10e6


def test_bad_texts_are_skipped_counted_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{bad}\n{"text": "b"}\n{"text": null}\n')
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    # The first ranges are written before the last one turns out to be bad.
    (tmp_path / "c.txt").write_bytes(b"a line\n" * 500_000 + b"\xc3")
    # One document, although all of its ranges are bad.
    (tmp_path / "d.txt").write_bytes(b"\xe9 bad " * 500_000)
    (tmp_path / "e.txt").write_bytes(b"the end")
    made = prepare([str(tmp_path)], "bytes", tmp_path / "made", 2, skip_bad=True)
    corpus = IndexedDataset(tmp_path / "made")
    documents = [bytes(document(corpus, i).tolist()) for i in range(len(corpus))]
    assert documents == [b"a", b"b", b"the end"]
    assert (made.bad, made.documents, made.tokens) == (5, 3, 9)
    shown = capsys.readouterr().err
    assert all(
        place in shown for place in ("a.jsonl:2", "a.jsonl:4", "b.txt: byte 0", "c.txt: byte")
    )


def test_many_bad_texts_are_shown_in_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"bad\n" * 1000 + LINES)
    command = ["prepare", str(tmp_path / "x.jsonl"), "--tokenizer", "bytes", "--workers", "1"]
    assert main([*command, "--skip-bad", "--out", str(tmp_path / "made")]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 11
    assert "990 more skipped" in shown.err
    assert "1000 bad texts skipped" in shown.out
