"""SentencePiece and bytes: every text is restored, and what is saved can be loaded."""

import os
import shutil
from pathlib import Path
from random import Random

import pytest
from sentencepiece import SentencePieceProcessor

from megafrontier.common.errors import UserError
from megafrontier.data.tokenizers.base import Tokenizer
from megafrontier.data.tokenizers.tokenizer import (
    ByteTokenizer,
    cached_tokenizer,
    load_tokenizer,
    save_cached_tokenizer,
)
from tests.data.tokenizers.models import (
    GENERAL,
    LOSSLESS,
    SOURCES,
    train_model,
    train_tokenizer,
)
from tests.processes import in_child

TEXTS = [
    "",
    " ",
    "\n",
    "Hello  world.\n\n\n   Indented by   three\tand tabbed\t\n",
    "  leading spaces, and trailing ones   ",
    "def f(x):\n        return x\r\n",
    "日本語, emoji 🎉, é and e\u0301, a nul \x00, U+2581 ▁▁ itself, ▁",
    "<|endoftext|> <unk> <0x41> 1234567890",
]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer") / request.param
    train_tokenizer(SOURCES, 600, folder, request.param)
    return folder


def check_round_trip(tokenizer: Tokenizer) -> None:
    """Check that texts are restored, ids are in range, and batches equal single texts."""
    encoded = tokenizer.encode_batch(TEXTS)
    for text, ids in zip(TEXTS, encoded, strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod not in ids
    unknown = [tokenizer.vocab_size, tokenizer.vocab_size + 99, -1]
    assert tokenizer.decode([*unknown, *encoded[3], tokenizer.eod, *unknown]) == TEXTS[3]


def test_a_trained_tokenizer_restores_every_text(trained: Path) -> None:
    tokenizer = load_tokenizer(str(trained))
    assert tokenizer.vocab_size == 600
    check_round_trip(tokenizer)
    check_round_trip(load_tokenizer(str(trained / "tokenizer.model")))


def test_a_tokenizer_trained_on_texts_without_spaces_restores_them(tmp_path: Path) -> None:
    """In Chinese or in DNA, a space is too rare for a piece of its own."""
    draw = Random(3)
    (tmp_path / "dna.txt").write_text("".join(draw.choice("ACGT\n") for _ in range(40_000)))
    train_tokenizer([str(tmp_path / "dna.txt")], 320, tmp_path / "dna")
    check_round_trip(load_tokenizer(str(tmp_path / "dna")))
    assert (tmp_path / "dna" / "tokenizer.json").is_file()


def test_the_ready_made_tokenizer_restores_every_text() -> None:
    tokenizer = load_tokenizer(GENERAL)
    assert tokenizer.vocab_size == 16384
    check_round_trip(tokenizer)
    source = Path(os.__file__).read_text()
    assert len(source.encode()) / len(tokenizer.encode(source)) > 3
    expected = tokenizer.encode(TEXTS[3])
    assert in_child(lambda: tokenizer.encode(TEXTS[3]) == expected) == 0


def test_bytes_restore_every_text(tmp_path: Path) -> None:
    check_round_trip(load_tokenizer("bytes"))
    load_tokenizer("bytes").save(tmp_path / "saved")
    assert isinstance(load_tokenizer(str(tmp_path / "saved")), ByteTokenizer)


def test_a_saved_tokenizer_is_the_same(trained: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(trained))
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert (again.eod, again.vocab_size) == (tokenizer.eod, tokenizer.vocab_size)


def test_transformers_loads_a_trained_tokenizer_with_the_same_ids(trained: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(str(trained)), AutoTokenizer.from_pretrained(str(trained))
    assert (len(theirs), theirs.eos_token_id) == (ours.vocab_size, ours.eod)
    model = SentencePieceProcessor(model_file=str(trained / "tokenizer.model"))
    # The docs say that U+2581 and the text of the eod piece are not distinguished.
    for text in [*TEXTS[:6], Path(SOURCES[0]).read_text()[:20000]]:
        ids, expected = theirs.encode(text, add_special_tokens=False), ours.encode(text)
        assert theirs.decode(expected) == theirs.decode(ids) == text
        if trained.name == "bpe":
            assert ids == expected
        else:  # segmentations may be equally likely
            likelihood, other = (sum(map(model.get_score, i)) for i in (ids, expected))
            assert likelihood == pytest.approx(other)


@pytest.mark.parametrize(
    ("options", "converts"),
    [
        ({"byte_fallback": True, "remove_extra_whitespaces": False}, True),
        ({"normalization_rule_name": "nmt_nfkc"}, False),
        # BPE with symbols of its own, whose scores are not ranks: it looks like unigram.
        ({**LOSSLESS, "user_defined_symbols": ["\n", "<|user|>"]}, False),
    ],
)
def test_another_model_is_saved_for_transformers_only_if_that_is_exact(
    tmp_path: Path, options: dict, converts: bool
) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(str(train_model(tmp_path / "other", **options)))
    tokenizer.save(tmp_path / "saved")
    text = Path(SOURCES[0]).read_text()[:5000]
    assert load_tokenizer(str(tmp_path / "saved")).encode(text) == tokenizer.encode(text)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "saved" / name).exists() == converts
    if converts:
        theirs = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
        assert theirs.encode(text) == tokenizer.encode(text), "nothing is put before a text"
        assert len(theirs) == tokenizer.vocab_size


def test_a_cached_tokenizer_outlives_its_files(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run saves it with each checkpoint, while all ranks wait. Its files are made once."""
    spec = str(tmp_path / "moved")
    shutil.copytree(trained, spec)
    cached = cached_tokenizer(spec)
    shutil.rmtree(spec)
    save_cached_tokenizer(spec, tmp_path / "first")
    monkeypatch.setattr(type(cached), "save", lambda *_: pytest.fail("made again"))
    save_cached_tokenizer(spec, tmp_path / "second")
    for folder in ("first", "second"):
        saved = load_tokenizer(str(tmp_path / folder))
        assert saved.encode(TEXTS[1]) == load_tokenizer(str(trained)).encode(TEXTS[1])


def test_a_model_with_pieces_across_lines_gives_the_ids_of_sentencepiece(tmp_path: Path) -> None:
    symbols = ["\n", "\n\n", "\u2028a"]
    model = train_model(
        tmp_path / "other", **LOSSLESS, vocab_size=400, user_defined_symbols=symbols
    )
    theirs = SentencePieceProcessor(model_file=str(model))
    text = "one\n\ntwo\n\n\nthree\u2028a"
    assert load_tokenizer(str(model)).encode(text) == theirs.encode(text)


@pytest.mark.parametrize("spec", ["missing.model", "./missing", "no-such-tokenizer-anywhere"])
def test_a_tokenizer_that_does_not_exist_is_refused(spec: str) -> None:
    with pytest.raises(UserError, match=f"tokenizer '{spec}'"):
        load_tokenizer(spec)


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(b"nothing of the sort")
    need = "no SentencePiece model; need a SentencePiece .model, or a tokenizer.json by its name"
    with pytest.raises(UserError, match=f"tokenizer '{tmp_path}/x.model': {need}"):
        load_tokenizer(str(tmp_path / "x.model"))
