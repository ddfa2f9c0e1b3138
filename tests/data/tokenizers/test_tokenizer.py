"""Tokenizers: every text comes back, whatever the kind, and what is saved loads again."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest

from megafrontier.cli import main
from megafrontier.common.errors import UserError
from megafrontier.data.tokenizers.tokenizer import (
    MARKER,
    ByteTokenizer,
    Tokenizer,
    cached_tokenizer,
    load_tokenizer,
    save_cached_tokenizer,
)
from megafrontier.data.tokenizers.train import Sample
from tests.data.training import train_tokenizer
from tests.processes import in_child

GENERAL = str(Path(__file__).parents[3] / "tokenizers" / "general-16k.model")
SOURCES = [os.__file__, os.path.join(os.path.dirname(os.__file__), "argparse.py")]
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
    """Every text back unchanged, ids in range, batches as single texts."""
    encoded = tokenizer.encode_batch(TEXTS)
    for text, ids in zip(TEXTS, encoded, strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod not in ids
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.decode([*encoded[3], tokenizer.eod]) == TEXTS[3]


def test_a_trained_tokenizer_gives_every_text_back(trained: Path) -> None:
    tokenizer = load_tokenizer(str(trained))
    assert tokenizer.vocab_size == 600
    check_round_trip(tokenizer)
    check_round_trip(load_tokenizer(str(trained / "tokenizer.model")))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_tokenizer_trained_on_texts_without_spaces_gives_them_back(
    tmp_path: Path, kind: Literal["bpe", "unigram"]
) -> None:
    """As of Chinese or of DNA, where a space is among the characters too rare for a piece."""
    draw = Random(3)
    (tmp_path / "dna.txt").write_text("".join(draw.choice("ACGT\n") for _ in range(40_000)))
    train_tokenizer([str(tmp_path / "dna.txt")], 320, tmp_path / "dna", kind)
    check_round_trip(load_tokenizer(str(tmp_path / "dna")))
    assert (tmp_path / "dna" / "tokenizer.json").is_file()


def test_the_ready_made_tokenizer_gives_every_text_back() -> None:
    tokenizer = load_tokenizer(GENERAL)
    assert tokenizer.vocab_size == 16384
    check_round_trip(tokenizer)
    source = Path(os.__file__).read_text()
    assert len(source.encode()) / len(tokenizer.encode(source)) > 3


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    tokenizer = load_tokenizer(GENERAL)
    ids = tokenizer.encode(TEXTS[3])
    unknown = [tokenizer.vocab_size, tokenizer.vocab_size + 99, -1]
    assert tokenizer.decode([*unknown, *ids, *unknown]) == TEXTS[3]


def test_bytes_give_every_text_back(tmp_path: Path) -> None:
    check_round_trip(load_tokenizer("bytes"))
    load_tokenizer("bytes").save(tmp_path / "saved")
    assert isinstance(load_tokenizer(str(tmp_path / "saved")), ByteTokenizer)


def test_a_saved_tokenizer_is_the_same(trained: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(trained))
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert (again.eod, again.vocab_size) == (tokenizer.eod, tokenizer.vocab_size)


def test_a_tokenizer_that_transformers_has_saved_over_ours_is_the_one_that_counts(
    trained: Path, tmp_path: Path
) -> None:
    """With tokens added, as for a chat: the old one would cut them into pieces."""
    from transformers import AutoTokenizer

    ours = load_tokenizer(str(trained))
    ours.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    theirs.add_tokens(["<|user|>"])
    theirs.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.vocab_size == ours.vocab_size + 1
    assert again.encode("<|user|>") == [ours.vocab_size]
    assert again.eod == again.bos == ours.eod
    theirs.add_special_tokens({"bos_token": "<s>", "pad_token": theirs.eos_token})
    theirs.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert (again.bos, again.eod) == (ours.vocab_size + 1, ours.eod)
    assert ours.pad is again.pad is None  # the end of a document is no token of its own for that
    theirs.add_special_tokens({"pad_token": "<pad>"})
    theirs.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).pad == ours.vocab_size + 2


def test_transformers_loads_a_trained_tokenizer_with_the_same_ids(trained: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(str(trained)), AutoTokenizer.from_pretrained(str(trained))
    assert (len(theirs), theirs.eos_token_id) == (ours.vocab_size, ours.eod)
    # U+2581 and the text of the eod piece are documented not to be told from what they stand for.
    for text in [*TEXTS[:6], Path(SOURCES[0]).read_text()[:20000]]:
        ids, expected = theirs.encode(text, add_special_tokens=False), ours.encode(text)
        assert theirs.decode(expected) == theirs.decode(ids) == text
        if trained.name == "bpe":
            assert ids == expected
        else:
            assert likelihood(trained, ids) == pytest.approx(likelihood(trained, expected))


def likelihood(folder: Path, ids: list[int]) -> float:
    """Logarithm of what a unigram model thinks of a text cut like this; cuts may tie."""
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return sum(model.get_score(i) for i in ids)


@pytest.mark.parametrize(
    ("options", "converts"),
    [
        ({"byte_fallback": True, "remove_extra_whitespaces": False}, True),
        ({"normalization_rule_name": "nmt_nfkc"}, False),
    ],
)
def test_another_sentencepiece_model_is_saved_for_transformers_only_if_that_is_exact(
    tmp_path: Path, options: dict, converts: bool
) -> None:
    from sentencepiece import SentencePieceTrainer
    from transformers import AutoTokenizer

    SentencePieceTrainer.train(
        input=SOURCES,
        model_prefix=str(tmp_path / "other"),
        model_type="bpe",
        vocab_size=600,
        minloglevel=2,
        **{"normalization_rule_name": "identity", **options},
    )
    tokenizer = load_tokenizer(str(tmp_path / "other.model"))
    tokenizer.save(tmp_path / "saved")
    text = Path(SOURCES[0]).read_text()[:5000]
    assert load_tokenizer(str(tmp_path / "saved")).encode(text) == tokenizer.encode(text)
    assert (tmp_path / "saved" / "tokenizer_config.json").exists() == converts
    if converts:
        theirs = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
        assert theirs.encode(text) == tokenizer.encode(text), "nothing is put before a text"
        assert len(theirs) == tokenizer.vocab_size


def test_a_model_that_only_looks_like_ours_is_not_saved_as_another(tmp_path: Path) -> None:
    """A BPE with symbols of its own, whose scores are not ranks: it would be taken for unigram."""
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.train(
        input=SOURCES,
        model_prefix=str(tmp_path / "other"),
        model_type="bpe",
        vocab_size=600,
        user_defined_symbols=["\n", "<|user|>"],
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    load_tokenizer(str(tmp_path / "other.model")).save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "tokenizer.json").exists()
    assert not (tmp_path / "saved" / "tokenizer_config.json").exists()


def test_a_model_that_transformers_cannot_read_is_saved_alone(tmp_path: Path, monkeypatch) -> None:
    """For want of a package, say: a run is not to lose its checkpoints for it."""
    import transformers
    from sentencepiece import SentencePieceTrainer

    def fail(folder: str) -> None:
        raise ValueError("`tiktoken` is required")

    SentencePieceTrainer.train(
        input=SOURCES, model_prefix=str(tmp_path / "other"), vocab_size=600, minloglevel=2
    )
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    load_tokenizer(str(tmp_path / "other.model")).save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "tokenizer_config.json").exists()
    assert load_tokenizer(str(tmp_path / "saved")).vocab_size == 600


def test_a_kept_tokenizer_outlives_its_files(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run saves it with each checkpoint, hours after it has read it, and while all ranks wait: so
    its files are made once."""
    spec = str(tmp_path / "moved")
    shutil.copytree(trained, spec)
    kept = cached_tokenizer(spec)
    shutil.rmtree(spec)
    save_cached_tokenizer(spec, tmp_path / "first")
    monkeypatch.setattr(type(kept), "save", lambda *_: pytest.fail("made again"))
    save_cached_tokenizer(spec, tmp_path / "second")
    for folder in ("first", "second"):
        saved = load_tokenizer(str(tmp_path / folder))
        assert saved.encode(TEXTS[1]) == load_tokenizer(str(trained)).encode(TEXTS[1])


def test_a_tokenizer_whose_ids_have_holes_has_room_for_the_last(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    holed = Tokenizer(models.WordLevel({"a": 0, "<eos>": 9}, "a"))
    PreTrainedTokenizerFast(tokenizer_object=holed, eos_token="<eos>").save_pretrained(tmp_path)
    found = load_tokenizer(str(tmp_path))
    assert (found.eod, found.vocab_size) == (9, 10)


@pytest.mark.parametrize("symbols", [["\n", "\n\n"], ["\n", "\u2028a"]])
def test_a_model_with_pieces_across_lines_gives_the_ids_of_sentencepiece(
    tmp_path: Path, symbols: list[str]
) -> None:
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    SentencePieceTrainer.train(
        input=SOURCES,
        model_prefix=str(tmp_path / "other"),
        model_type="bpe",
        vocab_size=400,
        user_defined_symbols=symbols,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    theirs = SentencePieceProcessor(model_file=str(tmp_path / "other.model"))
    text = "one\n\ntwo\n\n\nthree\u2028a"
    assert load_tokenizer(str(tmp_path / "other.model")).encode(text) == theirs.encode(text)


def save_fast_bpe(folder: Path, eos: str = "<eos>", **baked: Any) -> None:
    """A byte-level BPE tokenizer of Hugging Face's; `baked`: a truncation its file asks for."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[eos], initial_alphabet=alphabet, show_progress=False
    )
    fast.train(SOURCES, trainer)
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=eos).save_pretrained(folder)
    if baked:
        fast.enable_truncation(**baked)
        fast.save(str(folder / "tokenizer.json"))


def test_a_hugging_face_folder_is_a_tokenizer(tmp_path: Path) -> None:
    save_fast_bpe(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eod) == (400, 0)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids) == text
    tokenizer.save(tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again")).encode(TEXTS[3]) == tokenizer.encode(TEXTS[3])


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "no tokenizer in this folder"),
        (["tokenizer_config.json"], "no piece of text in its vocabulary"),
    ],
)
def test_the_folder_of_a_model_without_a_tokenizer_says_what_to_add(
    tmp_path: Path, family: str, files: list[str], said: str
) -> None:
    """transformers makes one of nothing but special tokens of it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(UserError, match=rf"': {said}, need tokenizer\.json, or vocab\.json and "):
        load_tokenizer(str(tmp_path))


def test_the_files_of_gpt_neox_and_megatron_lm_are_tokenizers(tmp_path: Path) -> None:
    """Neither says what ends a document; both vocabularies have it."""
    save_fast_bpe(tmp_path / "saved", eos="<|endoftext|>")
    theirs = load_tokenizer(str(tmp_path / "saved"))
    (tmp_path / "gpt2").mkdir()
    lone = tmp_path / "20B_tokenizer.json"
    shutil.copy(tmp_path / "saved" / "tokenizer.json", lone)
    model = json.loads(lone.read_text())["model"]
    (tmp_path / "gpt2" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "gpt2" / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (tmp_path / "only").mkdir()
    shutil.copy(lone, tmp_path / "only" / "tokenizer.json")
    for spec in (lone, tmp_path / "only", tmp_path / "gpt2"):
        found = load_tokenizer(str(spec))
        assert (found.vocab_size, found.eod) == (400, theirs.eod)
        assert found.encode_batch(TEXTS[:7]) == theirs.encode_batch(TEXTS[:7])


@pytest.mark.parametrize("baked", [{}, {"max_length": 3}])
def test_a_hugging_face_tokenizer_gives_the_ids_of_transformers(
    tmp_path: Path, baked: dict[str, int]
) -> None:
    from transformers import AutoTokenizer

    save_fast_bpe(tmp_path, **baked)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))(TEXTS, add_special_tokens=False)
    assert load_tokenizer(str(tmp_path)).encode_batch(TEXTS) == theirs["input_ids"]


def test_training_twice_gives_the_same_bytes(trained: Path, tmp_path: Path) -> None:
    train_tokenizer(SOURCES, 600, tmp_path / "again", trained.name)  # type: ignore[arg-type]
    for file in trained.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(("suffix", "pack"), [(".txt", bytes), (".txt.gz", gzip.compress)])
def test_training_uses_no_more_text_than_it_may_and_takes_it_from_everywhere(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    for i in range(200):
        subject = "apples" if i < 180 else "Ω"
        text = f"text number {i} of {subject}\n" * 50
        (tmp_path / f"{i:03}{suffix}").write_bytes(pack(text.encode()))
    texts = [str(tmp_path / "*.txt*")]
    assert len({tuple(Sample(texts, 0.05).lines()) for _ in range(2)}) == 1
    sample = train_tokenizer(texts, 300, tmp_path / "out", max_megabytes=0.05)
    assert 40_000 < sample.text_bytes <= 50_000
    # Only the last texts have the letter; unseen it would be its two bytes.
    assert len(load_tokenizer(str(tmp_path / "out")).encode("Ω")) == 1


def test_the_command_trains_and_replaces_an_older_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "tok")
    for size in ("400", "500"):
        assert main(["tokenizer", *SOURCES, "--vocab-size", size, "--out", out]) == 0
    assert "500 ids" in capsys.readouterr().out
    assert load_tokenizer(out).vocab_size == 500
    assert os.listdir(tmp_path) == ["tok"]
    (tmp_path / "tok" / "model.safetensors").touch()  # an exported model's folder
    assert main(["tokenizer", *SOURCES, "--vocab-size", "400", "--out", out]) == 2
    assert "exists and is no tokenizer folder" in capsys.readouterr().err
    assert load_tokenizer(out).vocab_size == 500


def test_a_tokenizer_may_be_written_into_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [str(Path(source).resolve()) for source in SOURCES]
    (tmp_path / "tok").mkdir()
    monkeypatch.chdir(tmp_path / "tok")
    train_tokenizer(sources, 400, ".")
    assert load_tokenizer(str(tmp_path / "tok")).vocab_size == 400
    assert os.listdir(tmp_path) == ["tok"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["good.txt", "--vocab-size", "20"], "--vocab-size: 20, need 300 to 2147483647"),
        (["good.txt", "--vocab-size", "2147483648"], "2147483648, need 300 to 2147483647"),
        (["good.txt", "--vocab-size", "9000"], "9000, but the inputs have text for 283 ids only; "),
        (["abc.txt", "--vocab-size", "300"], "have text for 267 ids only; need more text\n"),
        (["empty.txt", "--vocab-size", "400"], "hold no text"),
        (["missing.txt", "--vocab-size", "400"], "'missing.txt': no such file"),
        (["good.txt", "bad.txt", "--vocab-size", "400"], "tier: bad.txt: byte 4: invalid UTF-8"),
        (["good.txt", "--vocab-size", "400", "--max-megabytes", "0"], "need more than 0"),
        (["good.txt", "--vocab-size", "400", "--out", "."], "is no tokenizer folder"),
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
    Path("abc.txt").write_text("abc")
    Path("bad.txt").write_bytes(b"some\xff words")
    assert main(["tokenizer", "--out", "out", *arguments]) == 2
    refusal = capsys.readouterr().err
    assert says in refusal
    assert refusal.count("\n") == 1
    assert sorted(os.listdir()) == ["abc.txt", "bad.txt", "empty.txt", "good.txt"]


def test_the_most_ids_that_a_refusal_names_can_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(size: str) -> int:
        return main(["tokenizer", SOURCES[0], "--vocab-size", size, "--out", str(tmp_path / "x")])

    assert command("99999") == 2
    most = capsys.readouterr().err.rpartition("; need more text, or at most ")[2].strip()
    assert command(most) == 0
    assert load_tokenizer(str(tmp_path / "x")).vocab_size == int(most)


@pytest.mark.parametrize("spec", ["missing.model", "./missing", "no-such-tokenizer-anywhere"])
def test_no_such_tokenizer_is_refused(spec: str) -> None:
    with pytest.raises(UserError, match=f"tokenizer '{spec}'"):
        load_tokenizer(spec)


def test_a_name_that_is_nowhere_is_one_line_without_each_attempt_to_reach_the_hub(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import transformers
    from huggingface_hub.utils import logging

    def fetch(*_: Any, **__: Any) -> None:
        logging.get_logger("huggingface_hub.utils").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", staticmethod(fetch))
    with pytest.raises(UserError) as error:
        load_tokenizer("my-tokenizr")
    assert str(error.value) == (
        f"tokenizer 'my-tokenizr': no file or folder of that name in {os.getcwd()}, and none "
        "in the hub: We couldn't connect to the hub"
    )
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"nothing of the sort", ""),
        (b"GGUF\x03\x00\x00\x00\x01", " but a GGUF file"),
        (b"IQ== 0\nIg== 1\nIw== 2\n", " but tiktoken's ranks"),
        (b'{"version": "1.0"}', " but JSON"),
        (b"PK\x03\x04\x00", " but a zip archive, as PyTorch writes it"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:12",
            " but a pointer of Git LFS, without the file that it stands for",
        ),
    ],
)
def test_a_file_that_is_no_model_is_refused_by_what_it_is(
    tmp_path: Path, content: bytes, named: str
) -> None:
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(UserError) as error:
        load_tokenizer(str(tmp_path / "x.model"))
    assert str(error.value) == (
        f"tokenizer '{tmp_path}/x.model': no SentencePiece model{named}; need a SentencePiece "
        ".model, or a tokenizer.json by its name or its folder"
    )


@pytest.mark.parametrize("piece", ["ation", "\n", "<0x41>"])
def test_a_model_with_a_piece_that_is_no_utf8_is_refused(tmp_path: Path, piece: str) -> None:
    """Python would tell which byte, and not of what."""
    proto = bytearray(Path(GENERAL).read_bytes())
    field = bytes([0x0A, len(piece)]) + piece.encode()
    assert proto.count(field) == 1
    proto[proto.index(field) + 2] ^= 0x80
    (tmp_path / "x.model").write_bytes(proto)
    with pytest.raises(UserError, match=r"tokenizer '.*x\.model': "):
        load_tokenizer(str(tmp_path / "x.model"))


@pytest.mark.parametrize("content", ["[]", '"bytes"', '{"kind": "by'])
def test_a_marker_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MARKER).write_text(content)
    with pytest.raises(UserError, match=rf"{MARKER}: cut short or changed, need the folder"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_works_in_a_forked_process() -> None:
    tokenizer = load_tokenizer(GENERAL)
    expected = tokenizer.encode(TEXTS[3])
    assert in_child(lambda: tokenizer.encode(TEXTS[3]) == expected) == 0
