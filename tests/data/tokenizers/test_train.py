"""Training a tokenizer: the same bytes each time, from a sample of all texts, or one line."""

import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megafrontier.cli import main
from megafrontier.data.tokenizers.tokenizer import load_tokenizer
from megafrontier.data.tokenizers.train import read_sample
from tests.data.tokenizers.models import SOURCES, train_tokenizer


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_twice_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    for name in ("once", "twice"):
        train_tokenizer(SOURCES, 400, tmp_path / name, kind)
    for file in (tmp_path / "once").iterdir():
        assert (tmp_path / "twice" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(("suffix", "pack"), [(".txt", bytes), (".txt.gz", gzip.compress)])
def test_the_sample_is_limited_and_taken_from_all_texts(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    for i in range(200):
        subject = "apples" if i < 180 else "Ω"
        text = f"text number {i} of {subject}\n" * 50
        (tmp_path / f"{i:03}{suffix}").write_bytes(pack(text.encode()))
    texts = [str(tmp_path / "*.txt*")]
    assert len({tuple(read_sample(texts, 0.05)[0]) for _ in range(2)}) == 1
    size, _ = train_tokenizer(texts, 300, tmp_path / "out", max_megabytes=0.05)
    assert 40_000 < size <= 50_000
    # Only the last texts have the letter. If unseen, it would be two bytes.
    assert len(load_tokenizer(str(tmp_path / "out")).encode("Ω")) == 1


def test_a_tokenizer_may_be_written_into_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tok").mkdir()
    monkeypatch.chdir(tmp_path / "tok")
    train_tokenizer(SOURCES, 400, ".")
    assert load_tokenizer(str(tmp_path / "tok")).vocab_size == 400
    assert os.listdir(tmp_path) == ["tok"]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("text", ["abc", "abcdefgh" * 3])
@pytest.mark.parametrize(("asked", "bound"), [("9000", "at most"), ("262", "at least")])
def test_the_vocabulary_size_that_a_refusal_names_is_accepted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    text: str,
    asked: str,
    bound: str,
) -> None:
    (tmp_path / "x.txt").write_text(text)
    words = ["tokenizer", str(tmp_path / "x.txt"), "--out", str(tmp_path / "out"), "--kind", kind]
    assert main([*words, "--vocab-size", asked]) == 2
    refusal = capsys.readouterr().err
    named = re.search(rf"--vocab-size: {asked}, need {bound} (\d+) for this text", refusal)
    assert named, refusal
    assert main([*words, "--vocab-size", named[1]]) == 0
    assert load_tokenizer(str(tmp_path / "out")).vocab_size == int(named[1])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["good.txt", "--vocab-size", "20"], "--vocab-size: 20, need 262 to 16777216"),
        (["good.txt", "--vocab-size", "2147483648"], "2147483648, need 262 to 16777216"),
        (["empty.txt", "--vocab-size", "400"], "hold no text"),
        (["missing.txt", "--vocab-size", "400"], "'missing.txt': no such file"),
        (["good.txt", "bad.txt", "--vocab-size", "400"], "tier: bad.txt: byte 4: invalid UTF-8"),
        (["good.txt", "--vocab-size", "400", "--max-megabytes", "0"], "need more than 0"),
        (["good.txt", "--vocab-size", "400", "--out", "."], "exists and is not an empty folder"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text("some words\n" * 100)
    Path("empty.txt").write_text("")
    Path("bad.txt").write_bytes(b"some\xff words")
    assert main(["tokenizer", "--out", "out", *arguments]) == 2
    refusal = capsys.readouterr().err
    assert says in refusal
    assert refusal.count("\n") == 1
    assert sorted(os.listdir()) == ["bad.txt", "empty.txt", "good.txt"]
