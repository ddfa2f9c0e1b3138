"""Merged corpora are what one process would make of all the texts."""

import os
from pathlib import Path

import pytest

from megafrontier.cli import main
from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import HEADER
from megafrontier.data.corpus.merge import merge
from tests.data.corpora import read_corpus, write_corpus


def test_parts_merged_in_order_are_what_one_process_writes(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * (number * number + 1))
    common = [str(tmp_path), "--tokenizer", "bytes", "--append-eod", "--workers", "1"]
    assert main(["prepare", *common, "--out", str(tmp_path / "whole")]) == 0
    for part in (1, 2):
        out = ["--out", str(tmp_path / "cut"), "--part", f"{part}/2"]
        assert main(["prepare", *common, *out]) == 0
    prefixes = [str(tmp_path / f"cut.part-{part:05d}-of-00002") for part in (1, 2)]
    assert main(["merge", *prefixes, "--out", str(tmp_path / "cut")]) == 0
    assert read_corpus(tmp_path / "cut") == read_corpus(tmp_path / "whole")


def test_a_part_without_text_is_merged_as_nothing(tmp_path: Path, capsys) -> None:
    """Otherwise a task of a Slurm array would fail."""
    for number, text in enumerate(['{"text": "a"}\n', "", '{"text": "b"}\n']):
        (tmp_path / f"{number}.jsonl").write_text(text)
    common = [str(tmp_path), "--tokenizer", "bytes", "--append-eod", "--workers", "1"]
    assert main(["prepare", *common, "--out", str(tmp_path / "whole")]) == 0
    prefixes = [str(tmp_path / f"cut.part-{part:05d}-of-00003") for part in (1, 2, 3)]
    for part in (1, 2, 3):
        assert main(["prepare", *common, "--out", f"{tmp_path}/cut", "--part", f"{part}/3"]) == 0
    assert main(["merge", *prefixes, "--out", str(tmp_path / "cut")]) == 0
    assert read_corpus(tmp_path / "cut") == read_corpus(tmp_path / "whole")
    capsys.readouterr()
    assert main(["merge", prefixes[1], "--out", str(tmp_path / "none")]) == 2
    assert "no text in them" in capsys.readouterr().err
    Path(f"{prefixes[0]}.bin").write_bytes(b"")  # truncated: its index has tokens
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
def test_an_impossible_part_is_refused_in_one_line(tmp_path: Path, capsys, part, said) -> None:
    (tmp_path / "x.txt").write_text("x")
    words = [str(tmp_path), "--tokenizer", "bytes", "--out", str(tmp_path / "y"), "--part", part]
    assert main(["prepare", *words]) == 2
    assert capsys.readouterr().err == f"megafrontier: {said}\n"


def test_documents_of_several_sequences_are_kept(tmp_path: Path) -> None:
    one = [[[1, 2], [3]], [[4]]]
    other = [[[5]], [[6], [7, 8]]]
    parts = [str(write_corpus(tmp_path / n, d)) for n, d in (("a", one), ("b", other))]
    assert merge(parts, tmp_path / "merged") == 4
    expected = write_corpus(tmp_path / "expected", one + other)
    assert read_corpus(tmp_path / "merged") == read_corpus(expected)


def test_corpora_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    narrow = str(write_corpus(tmp_path / "narrow", [[[1]]]))
    wide = str(write_corpus(tmp_path / "wide", [[[1]]], "int32"))
    with pytest.raises(UserError, match=r"wide: int32 tokens, .*narrow has uint16"):
        merge([narrow, wide], tmp_path / "out")
    with pytest.raises(UserError, match="is one of the corpora to merge"):
        merge([narrow, narrow], narrow)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("byte", "bit"),
    [
        (HEADER.size, 0),  # a size
        (HEADER.size + 4 * 2 + 3, 7),  # its sign
        (HEADER.size + 4 * 5 + 8 * 3, 1),  # a pointer
        (HEADER.size + 12 * 5 + 8 * 1, 4),  # the first sequence of a document
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, byte: int, bit: int) -> None:
    """The inputs may be deleted afterwards."""
    sound = write_corpus(tmp_path / "sound", [[[1]]])
    damaged = write_corpus(tmp_path / "damaged", [[[1, 2], [3]], [[4]], [[5, 6]], [[7]]])
    index = bytearray(Path(f"{damaged}.idx").read_bytes())
    index[byte] ^= 1 << bit
    Path(f"{damaged}.idx").write_bytes(index)
    with pytest.raises(UserError, match=r"^\S+damaged\.idx: damaged: .*; copy or prepare again$"):
        merge([str(sound), str(damaged)], tmp_path / "out" / "c")
    assert os.listdir(tmp_path / "out") == []
