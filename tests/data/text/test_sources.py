"""What prepare reads: every kind of input, and a line that names file and place for bad ones."""

import codecs
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megafrontier.cli import main
from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import IndexedDataset
from megafrontier.data.text import sources
from megafrontier.data.text.prepare import Summary, prepare
from megafrontier.data.text.reader import Reader
from megafrontier.data.text.sources import find_sources
from tests.data.preparing import prepared

TEXTS = ["first text\n", "zweiter Text é", "3"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def zstd_long(data: bytes) -> bytes:
    """As `zstd --long=28` packs what it reads from a pipe."""
    import zstandard

    chosen = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=chosen).compressobj()
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("x.jsonl", bytes),
        ("x.jsonl.gz", gzip.compress),
        ("x.jsonl.zst", zstd),
        ("x.jsonl.zst", zstd_long),
        ("x.ndjson", bytes),
        ("x.json", bytes),
        ("x.json.gz", gzip.compress),
    ],
)
def test_json_lines_are_read_packed_or_not(tmp_path: Path, name: str, pack) -> None:
    (tmp_path / name).write_bytes(pack(LINES))
    assert prepared(tmp_path, tmp_path / name) == TEXTS
    # Several members one after the other, as `cat` and parallel packers make them.
    (tmp_path / name).write_bytes(pack(LINES) + pack(LINES))
    assert prepared(tmp_path, tmp_path / name) == TEXTS * 2


@pytest.mark.parametrize("zeros", [1, 300_000])  # within a read of the file, and over several
def test_the_zeros_a_tape_pads_a_gzip_file_with_are_no_part_of_it(
    tmp_path: Path, zeros: int
) -> None:
    padded = gzip.compress(LINES) + bytes(zeros)
    (tmp_path / "x.jsonl.gz").write_bytes(padded)
    assert prepared(tmp_path, tmp_path / "x.jsonl.gz") == TEXTS
    (tmp_path / "x.jsonl.gz").write_bytes(padded + padded)
    assert prepared(tmp_path, tmp_path / "x.jsonl.gz") == TEXTS * 2


@pytest.mark.parametrize("text", ["", "[1]", '["text"]\n' * 2, '{\n "text": "x"\n}\n', '{"text"'])
def test_json_that_is_no_json_lines_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    for name in ("x.json", "*.json"):
        with pytest.raises(UserError, match=r"x\.json': no JSON lines, need one object a line"):
            prepared(tmp_path, tmp_path / name)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_byte_order_mark_is_no_part_of_the_first_json_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + LINES)
    assert prepared(tmp_path, tmp_path / name) == TEXTS


def test_a_line_of_json_that_never_ends_is_looked_at_once(tmp_path: Path, monkeypatch) -> None:
    """Joined anew with each chunk a gigabyte would take half an hour."""
    looked = []

    class Chunks:
        def __init__(self, _path: Path) -> None:
            pass

        def chunks(self) -> Iterator[bytes]:
            for part in (b" \n", b"{", *[b'"x": 1, '] * 3, b'"y": 2}', b"\n{}"):
                looked.append(part)
                yield part

    monkeypatch.setattr(sources, "Stream", Chunks)
    assert sources._is_json_lines(tmp_path)
    assert looked[-1] == b"\n{}"


def test_json_is_left_out_of_a_folder_but_read_when_it_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "x.txt").write_text("a text")
    (folder / "lines.json").write_text(f"\n{LINES.decode()}")
    assert prepared(tmp_path, folder) == ["a text"]
    assert prepared(tmp_path, folder / "lines.json") == TEXTS
    assert prepared(tmp_path, folder / "*.json") == TEXTS


def test_suffixes_in_capitals_are_those_in_small_letters(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "BOOK.TXT").write_text("a book")
    (folder / "X.JSONL").write_bytes(LINES)
    (folder / "Y.TXT.GZ").write_bytes(gzip.compress(b"packed"))
    (folder / "x.JSONL.GZ").write_bytes(gzip.compress(LINES))
    (folder / "x.jsonl.ZST").write_bytes(zstd(LINES))
    found = ["a book", *TEXTS, "packed", *TEXTS, *TEXTS]
    assert prepared(tmp_path, folder) == found
    assert prepared(tmp_path, *sorted(folder.iterdir())) == found


@pytest.mark.parametrize("name", ["x.txt", "x.md", "x.txt.gz"])
def test_json_lines_that_are_called_a_text_are_refused_where_they_are_named(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(gzip.compress(LINES) if name.endswith(".gz") else LINES)
    with pytest.raises(UserError, match=rf"{name}': looks like JSON lines, .*; need the suffix"):
        prepared(tmp_path, tmp_path / name)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_number_longer_than_python_reads_does_no_harm_beside_a_text(
    tmp_path: Path, name: str
) -> None:
    long = "9" * 5000
    (tmp_path / name).write_text(f'{{"id": {long}, "text": "a"}}\n{{"text": "b", "id": -{long}}}\n')
    assert prepared(tmp_path, tmp_path / name) == ["a", "b"]


@pytest.mark.parametrize("pattern", ["part**", "a**/**/c.txt", "**/c.txt", "a/**", "**/b/**/*.txt"])
def test_two_stars_are_any_depth_as_a_name_and_one_star_in_another(
    tmp_path: Path, pattern: str
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "self").symlink_to("self")  # which is no folder, and no error
    for name in ("part-1.txt", "part-2.txt", "a/b/c.txt"):
        (tmp_path / name).write_text(name)
    found = ["part-1.txt", "part-2.txt"] if pattern == "part**" else ["a/b/c.txt"]
    assert prepared(tmp_path, tmp_path / pattern) == found


def test_another_key_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('\n{"text": 1, "body": "a"}\n\r\n{"body": "b"}')
    assert prepared(tmp_path, tmp_path / "x.jsonl", key="body") == ["a", "b"]


def test_a_packed_text_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(b"some text"))
    assert prepared(tmp_path, tmp_path / "x.txt.gz") == ["some text"]


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_a_row_that_is_no_utf8_is_named_and_may_be_left_out(tmp_path: Path, kind: str) -> None:
    """Not every writer looks at what it calls a string."""
    import pyarrow
    import pyarrow.parquet

    raw = pyarrow.array([b"good", b"b\xffd", None, b"gut"], pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 4, raw.buffers())
    table = pyarrow.table({"text": texts})
    if kind == "parquet":
        source = tmp_path / "x.parquet"
        pyarrow.parquet.write_table(table, source)
    else:
        import datasets

        source = tmp_path / "x"
        datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(source)
    with pytest.raises(UserError, match=r"row 1: column 'text': byte 1: invalid UTF-8 \(0xff"):
        prepared(tmp_path, source)
    assert prepared(tmp_path, source, skip_bad=True) == ["good", "gut"]


def test_parquet_is_read(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": TEXTS, "id": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    assert prepared(tmp_path, tmp_path / "x.parquet") == TEXTS
    with pytest.raises(UserError, match=r"x\.parquet: no column 'body'; .* text, id"):
        prepared(tmp_path, tmp_path / "x.parquet", key="body")


def test_a_damaged_name_of_a_column_is_refused_by_file(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "number": [1, 2, 3]}), path)
    path.write_bytes(path.read_bytes().replace(b"number", b"numb\xffr"))
    with pytest.raises(UserError, match=r"x\.parquet: cannot read the parquet file: 'utf-8' codec"):
        prepared(tmp_path, path)


def test_long_rows_are_handed_out_a_megabyte_at_a_time(tmp_path: Path) -> None:
    """Books: 512 of them would be hundreds of megabytes for each worker."""
    import pyarrow
    import pyarrow.parquet

    texts = [f"{i}" * 300_000 for i in range(9)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "x.parquet")
    reader = Reader(find_sources([str(tmp_path / "x.parquet")]), "text")
    pieces = [piece for batch in reader.batches() for piece in batch]
    assert [piece.start for piece in pieces] == [0, 4, 8]
    assert [row for piece in pieces for row in piece.payload] == texts


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "b" / ".git").mkdir(parents=True)
    names = ["b/z.md", "b/a.txt", "c.py", "a.rst", "b/.git/x.txt", "b/image.png", ".hidden.txt"]
    for name in names:
        (folder / name).write_text(name)
    (folder / "b.jsonl").write_bytes(LINES)
    (folder / "d.txt.gz").write_bytes(gzip.compress(b"packed"))
    (folder / "e.md.zst").write_bytes(zstd(b"too"))
    (folder / "image.png.gz").write_bytes(gzip.compress(b"packed"))
    found = ["a.rst", *TEXTS, "c.py", "packed", "too", "b/a.txt", "b/z.md"]
    assert prepared(tmp_path, folder) == found


def test_a_dataset_saved_to_disk_is_read(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"text": TEXTS, "id": [1, 2, 3]})
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "two")
    assert prepared(tmp_path, tmp_path / "one") == TEXTS
    assert prepared(tmp_path, tmp_path / "two") == TEXTS
    assert prepared(tmp_path, tmp_path / "two", split="test") == TEXTS[:1]
    with pytest.raises(UserError, match=r"no split 'dev'; it has train, test"):
        prepared(tmp_path, tmp_path / "two", split="dev")
    with pytest.raises(UserError, match=r"no split 'train'; it is one table"):
        prepared(tmp_path, tmp_path / "one", split="train")


def test_a_split_of_files_is_refused(tmp_path: Path) -> None:
    """They would be taken whole, validation with training."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with pytest.raises(UserError, match=r"^--split: test, need a dataset"):
        prepared(tmp_path, tmp_path / "a.jsonl", split="test")


def test_texts_beside_somebodys_state_are_a_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    assert prepared(tmp_path, tmp_path) == ["text"]


def test_a_pipe_is_refused_before_anything_is_taken_out_of_it(tmp_path: Path) -> None:
    """What it holds is looked at first, and a pipe gives nothing twice."""
    read, write = os.pipe()
    with open(read, "rb") as left, open(write, "wb") as filled:
        filled.write(LINES)
        filled.close()
        with pytest.raises(UserError, match=f"input '/dev/fd/{read}': a pipe or device, need a"):
            prepared(tmp_path, f"/dev/fd/{read}")
        assert left.read() == LINES


def test_a_script_free_dataset_folder_is_read_as_its_card_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    card = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: d.csv\n"
    (folder / "README.md").write_text(f"---\n{card}---\n# A card, and no text to train on\n")
    (folder / "d.csv").write_text("text\nfrom a table\nand another\n")
    assert prepared(tmp_path, folder) == ["from a table", "and another"]


def test_a_dataset_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="input 'no-such/dataset': no file or folder of that"):
        prepared(tmp_path, "no-such/dataset")


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("x.txt", b"abc\xff", "x.txt: byte 3: invalid UTF-8 (0xff"),
        ("x.txt", b"a line\n" * 300_000 + b"\xc3", "x.txt: byte 2100000: invalid UTF-8"),
        ("x.txt", b"", "no text in it"),
        ("x.jsonl", b"\n\n", "no text in it"),
        ("x.jsonl", LINES + b"{nothing}\n", "x.jsonl:4: not valid JSON"),
        ("x.jsonl", LINES + b'{"body": "x"}\n', "x.jsonl:4: no 'text' in it, only: 'body'"),
        ("x.jsonl", LINES + b'["text"]\n', "x.jsonl:4: no 'text' in it, only: list"),
        ("x.jsonl", b'{"text": 5}\n', "x.jsonl:1: 'text' is int, need a string"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', "x.jsonl:1: 'text' holds half a surrogate pair"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "x.jsonl:2: byte 10: invalid UTF-8"),
        ("x.jsonl.gz", b"not packed at all", "x.jsonl.gz: corrupt near byte 0"),
        ("x.jsonl.gz", gzip.compress(LINES * 99)[:-20], "cut off at byte "),
        ("x.jsonl.gz", b"", "x.jsonl.gz: cut off at byte 0, "),
        ("x.txt.zst", b"", "x.txt.zst: cut off at byte 0, "),
        ("x.jsonl.gz", gzip.compress(LINES)[:-6] + b"123456", "x.jsonl.gz: corrupt near byte "),
        ("x.jsonl.gz", bytes(512), "x.jsonl.gz: corrupt near byte 0"),
        ("x.jsonl.gz", b"\0" + gzip.compress(LINES), "x.jsonl.gz: corrupt near byte 0"),
        ("x.jsonl.zst", b"not packed at all", "x.jsonl.zst: corrupt near byte 0"),
        ("x.jsonl.zst", zstd(LINES * 99)[:-20], "cut off at byte "),
        ("x.jsonl.zst", zstd(LINES)[:-4] + b"1234", "x.jsonl.zst: corrupt near byte "),
        ("x.jsonl.zst", zstd(LINES) + bytes(512), "x.jsonl.zst: corrupt near byte "),
        ("part-00000", LINES, "looks like JSON lines, but would be read as one text"),
        ("x.parquet", b"PAR1 but no more", "x.parquet: cannot read the parquet file"),
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


@pytest.mark.parametrize(
    "name",
    [
        "missing.txt",
        "missing.txt.gz",
        "missing.json.gz",
        "./missing",
        "deep/missing/x",
        "none-*.txt",
    ],
)
def test_missing_input_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"no such file or folder|no file matches"):
        prepared(tmp_path, name)


@pytest.mark.parametrize("name", ["text", "json", "csv:default"])
def test_a_slip_is_not_taken_for_all_that_the_current_folder_has_of_a_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("two lines\nof one document")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"input '{name}': no such file or folder"):
        find_sources([name])


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("x.csv", r"\.csv, need one text a line in \.jsonl"),
        ("x.TSV.gz", r"\.tsv, need"),
        ("x.arrow", r"\.arrow, need"),
        ("x.txt.xz", r"need it unpacked, or packed as \.gz or \.zst"),
    ],
)
def test_a_table_or_packing_that_is_not_read_is_not_taken_for_a_text(
    tmp_path: Path, name: str, need: str
) -> None:
    (tmp_path / name).write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=f"{name}': {need}"):
        find_sources([str(tmp_path / name)])


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(codecs.BOM_UTF8 + b"text")
    assert prepared(tmp_path, tmp_path / "x.txt") == ["text"]


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"no \.txt, \.md, \.rst, \.py, \.jsonl"):
        prepared(tmp_path, tmp_path)


def test_no_worker_and_a_million_are_refused(tmp_path: Path) -> None:
    for workers in (0, 10**6):
        with pytest.raises(UserError, match=f"--workers: {workers}, need 1 to "):
            prepare(["x.txt"], "bytes", tmp_path / "made", workers)


def test_bad_texts_are_skipped_counted_and_told_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{bad}\n{"text": "b"}\n{"text": null}\n')
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    # Its first pieces are written by the time the last one turns out to be bad.
    (tmp_path / "c.txt").write_bytes(b"a line\n" * 500_000 + b"\xc3")
    # One document, however many of its pieces are bad.
    (tmp_path / "d.txt").write_bytes(b"\xe9 bad " * 500_000)
    (tmp_path / "e.txt").write_bytes(b"the end")
    made = prepare([str(tmp_path)], "bytes", tmp_path / "made", 2, skip_bad=True)
    corpus = IndexedDataset(tmp_path / "made")
    documents = [bytes(corpus.document(i).tolist()) for i in range(len(corpus))]
    assert documents == [b"a", b"b", b"the end"]
    assert isinstance(made, Summary)
    assert (made.bad, made.documents, made.tokens) == (5, 3, 9)
    told = capsys.readouterr().err
    assert all(
        place in told for place in ("a.jsonl:2", "a.jsonl:4", "b.txt: byte 0", "c.txt: byte")
    )


def test_many_bad_texts_are_told_in_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"bad\n" * 1000 + LINES)
    command = ["prepare", str(tmp_path / "x.jsonl"), "--tokenizer", "bytes", "--workers", "1"]
    assert main([*command, "--skip-bad", "--out", str(tmp_path / "made")]) == 0
    told = capsys.readouterr()
    assert told.err.count("\n") == 11
    assert "990 more skipped" in told.err
    assert "1000 bad texts skipped" in told.out
