"""Inputs: what names a text, and what is refused before anything is read."""

import gzip
import json
from pathlib import Path

import pytest

from megafrontier.common.errors import UserError
from megafrontier.data.text.sources import Source, find_sources, select_part
from tests.data.corpora import prepared

TEXTS = ["first text\n", "zweiter Text é", "3"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "b" / ".git").mkdir(parents=True)
    names = ["b/z.md", "b/a.txt", "c.py", "a.rst", "b/.git/x.txt", "b/image.png", ".hidden.txt"]
    for name in names:
        (folder / name).write_text(name)
    (folder / "b.jsonl").write_bytes(LINES)
    (folder / "D.TXT.GZ").write_bytes(gzip.compress(b"packed"))
    (folder / "image.png.gz").write_bytes(gzip.compress(b"packed"))
    found = ["packed", "a.rst", *TEXTS, "c.py", "b/a.txt", "b/z.md"]
    assert prepared(tmp_path, folder) == found


def test_a_json_file_is_read_if_it_is_named_but_not_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "x.txt").write_text("a text")
    (folder / "lines.json").write_text(f"\n{LINES.decode()}")
    assert prepared(tmp_path, folder) == ["a text"]
    assert prepared(tmp_path, folder / "lines.json") == TEXTS
    assert prepared(tmp_path, folder / "*.json") == TEXTS


@pytest.mark.parametrize("name", ["x.md", "x.txt.gz", "part-00000"])
def test_json_lines_with_the_name_of_a_text_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(LINES) if name.endswith(".gz") else LINES)
    with pytest.raises(UserError, match=rf"{name}': looks like JSON lines, .*; need the suffix"):
        find_sources([str(tmp_path / name)])


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


def test_a_dataset_folder_is_read_as_its_card_says(
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


def test_a_split_of_files_is_refused(tmp_path: Path) -> None:
    """They would be read whole, validation with training."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with pytest.raises(UserError, match=r"^--split: test, need a dataset"):
        find_sources([str(tmp_path / "a.jsonl")], split="test")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing.txt", "no such file or folder"),
        ("./missing", "no such file or folder"),
        ("deep/missing/x", "no such file or folder"),
        ("none-*.txt", "no file matches"),
        ("no-such/dataset", "no file or folder of that name here, and no dataset either"),
    ],
)
def test_an_input_that_does_not_exist_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"input '{name.replace('*', '[*]')}': {why}"):
        find_sources([name])


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("x.csv", r"\.csv, need one text a line in \.jsonl"),
        ("x.TSV.gz", r"\.tsv, need"),
        ("x.txt.xz", r"need it unpacked, or packed as \.gz or \.zst"),
    ],
)
def test_a_table_or_packing_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, need: str
) -> None:
    (tmp_path / name).write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=f"{name}': {need}"):
        find_sources([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((5, 5, 5, 5), [[5, 5], [5, 5]]),
        ((9, 1, 1, 1), [[9], [1, 1, 1]]),
        ((1, 1, 1, 9), [[1, 1, 1], [9]]),
        ((90, 1, 1), [[], [90], [1, 1]]),
        ((0, 0, 0), [[0], [0], [0]]),
    ],
)
def test_parts_are_consecutive_and_of_about_equal_size(sizes, expected) -> None:
    found = [Source(str(number), "text", size) for number, size in enumerate(sizes)]
    parts = [select_part(found, i + 1, len(expected)) for i in range(len(expected))]
    assert [[source.file_bytes for source in part] for part in parts] == expected
