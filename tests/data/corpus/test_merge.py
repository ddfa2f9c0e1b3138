"""A corpus tokenised in parts, each by another job, is the corpus that one process makes."""

from pathlib import Path

import pytest

from megafrontier.cli import main
from megafrontier.data.text.sources import Source, select_part
from tests.data.corpora import read_corpus


def make_sources(*sizes: int) -> list[Source]:
    return [Source(str(number), "text", size) for number, size in enumerate(sizes)]


def shares(sources: list[Source], parts: int) -> list[list[int]]:
    """File sizes of each share."""
    return [[s.file_bytes for s in select_part(sources, i + 1, parts)] for i in range(parts)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((5, 5, 5, 5), [[5, 5], [5, 5]]),
        ((9, 1, 1, 1), [[9], [1, 1, 1]]),
        ((1, 1, 1, 9), [[1, 1, 1], [9]]),
        ((90, 1, 1), [[90], [1], [1]]),
        ((1, 1, 90), [[1], [1], [90]]),
        ((0, 0, 0), [[0], [0], [0]]),
    ],
)
def test_shares_are_consecutive_about_equal_and_never_empty(sizes, expected):
    assert shares(make_sources(*sizes), len(expected)) == expected


def test_parts_merged_in_order_are_what_one_process_writes(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * (number * number + 1))
    common = [str(tmp_path), "--tokenizer", "bytes", "--append-eod", "--workers", "1"]
    assert main(["prepare", *common, "--out", str(tmp_path / "whole")]) == 0
    for part in (1, 2, 3):
        out = ["--out", str(tmp_path / "cut"), "--part", f"{part}/3"]
        assert main(["prepare", *common, *out]) == 0
    prefixes = [str(tmp_path / f"cut.part-{part:05d}-of-00003") for part in (1, 2, 3)]
    assert main(["merge", *prefixes, "--out", str(tmp_path / "cut")]) == 0
    assert read_corpus(tmp_path / "cut") == read_corpus(tmp_path / "whole")


def test_a_part_without_text_is_joined_as_nothing(tmp_path: Path, capsys) -> None:
    """Or the array job that it is a task of would never end well."""
    for number, text in enumerate(["a", "", "\n", "b"]):
        (tmp_path / f"{number}.jsonl").write_text(
            f'{{"text": "{text}"}}\n' if text.strip() else text
        )
    common = [str(tmp_path), "--tokenizer", "bytes", "--append-eod", "--workers", "1"]
    assert main(["prepare", *common, "--out", str(tmp_path / "whole")]) == 0
    prefixes = [str(tmp_path / f"cut.part-{part:05d}-of-00004") for part in (1, 2, 3, 4)]
    for part in (1, 2, 3, 4):
        assert main(["prepare", *common, "--out", f"{tmp_path}/cut", "--part", f"{part}/4"]) == 0
    assert main(["merge", *prefixes, "--out", str(tmp_path / "cut")]) == 0
    assert read_corpus(tmp_path / "cut") == read_corpus(tmp_path / "whole")
    capsys.readouterr()
    assert main(["merge", *prefixes[1:3], "--out", str(tmp_path / "none")]) == 2
    assert "no text in them" in capsys.readouterr().err
    Path(f"{prefixes[0]}.bin").write_bytes(b"")  # cut off: its index has tokens
    assert main(["merge", *prefixes, "--out", str(tmp_path / "none")]) == 2
    assert f"{prefixes[0]}.bin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("3", "--part: '3', need a part and the number of parts, as in 3/16"),
        ("0/2", "--part 0/2: need 1/2 to 2/2"),
        ("1/2", "--part 1/2: the inputs hold 1 files, none of which is cut; need at most 1 parts"),
    ],
)
def test_a_part_that_cannot_be_is_refused_in_one_line(tmp_path: Path, capsys, part, said):
    (tmp_path / "x.txt").write_text("x")
    words = [str(tmp_path), "--tokenizer", "bytes", "--out", str(tmp_path / "y"), "--part", part]
    assert main(["prepare", *words]) == 2
    assert capsys.readouterr().err == f"megafrontier: {said}\n"
