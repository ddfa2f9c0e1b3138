"""Hugging Face tokenizers: the ids of their files, whatever class their folder names."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor

from megafrontier.common.errors import UserError
from megafrontier.data.tokenizers.fast import _fast_model
from megafrontier.data.tokenizers.tokenizer import load_tokenizer
from tests.data.tokenizers.models import END, SOURCES, save_digits, save_fast_bpe, train_model

TEXTS = [
    *("", " ", "  ", "word", " word", "  word", "word ", "word  ", "a b", "a  b", " a   b "),
    *("\t", "\tx", "x\t", "a\tb", "\n", "\nx", "x\n", "a\n\nb", " \n x", "é 日本 \u2028 end"),
]
LLAMA = {"byte_fallback": True, "remove_extra_whitespaces": False}


@pytest.mark.parametrize(
    ("named", "prefix"),
    [("GPT2Tokenizer", True), ("X", False)],
)
def test_the_tokenizer_json_of_a_folder_decides_the_ids_whatever_class_it_names(
    tmp_path: Path, named: str, prefix: bool
) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    save_digits(tmp_path / "model", named, prefix)
    alone = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    texts = [*TEXTS, "2023", "1234567"]
    expected = [alone.encode(text).ids for text in texts]
    if not prefix:
        cut = [alone.id_to_token(i) for i in expected[-1]]
        assert cut == ["123", "456", "7"]
    found = load_tokenizer(str(tmp_path / "model"))
    assert found.encode_batch(texts) == expected
    assert found.eod == alone.token_to_id(END)
    # The same holds for the folder in checkpoints and exports.
    found.save(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    assert theirs(texts, add_special_tokens=False)["input_ids"] == expected
    assert theirs.chat_template == "{{ 1 }}"
    assert load_tokenizer(str(tmp_path / "saved")).encode_batch(texts) == expected


def write_json(model: Path, prefix: bool) -> Path:
    """Write the same as a tokenizer.json, with the rules of Llama 2's."""
    from tokenizers import Tokenizer, decoders, normalizers

    fast = Tokenizer(_fast_model(SentencePieceProcessor(model_file=str(model))))
    before = [normalizers.Prepend("▁")] if prefix else []
    fast.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast.save(str(model.with_name("tokenizer.json")))
    return model.with_name("tokenizer.json")


@pytest.mark.parametrize("prefix", [True, False])
def test_a_model_its_tokenizer_json_and_their_folder_give_the_same_ids(
    tmp_path: Path, prefix: bool
) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", **special}
    model = train_model(tmp_path / "x", **LLAMA, add_dummy_prefix=prefix)
    (tmp_path / "x" / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = SentencePieceProcessor(model_file=str(model))
    expected = theirs.encode(TEXTS)
    for names in ([model, model.parent], [write_json(model, prefix), model, model.parent]):
        for name in names:
            found = load_tokenizer(str(name))
            assert found.encode_batch(TEXTS) == expected, name
            assert [found.decode(ids) for ids in expected] == TEXTS, name
            assert (found.eod, found.vocab_size) == (theirs.eos_id(), len(theirs))


@pytest.mark.parametrize("truncation", [{}, {"max_length": 3}])
def test_ids_are_those_of_transformers_and_never_truncated(
    tmp_path: Path, truncation: dict[str, int]
) -> None:
    from transformers import AutoTokenizer

    save_fast_bpe(tmp_path, **truncation)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))(TEXTS, add_special_tokens=False)
    ours = load_tokenizer(str(tmp_path))
    assert (ours.vocab_size, ours.eod) == (400, 0)
    assert ours.encode_batch(TEXTS) == theirs["input_ids"]
    assert [ours.decode(ids) for ids in theirs["input_ids"]] == TEXTS


def test_the_folder_of_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers makes a tokenizer of nothing but special tokens from it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match=r"': no piece of text in its vocabulary, need tokenizer\."):
        load_tokenizer(str(tmp_path))


def test_the_files_of_gpt_neox_and_megatron_lm_are_tokenizers(tmp_path: Path) -> None:
    """They do not say what ends a document, but both vocabularies have a token for it."""
    save_fast_bpe(tmp_path / "saved", eos=END)
    theirs = load_tokenizer(str(tmp_path / "saved"))
    (tmp_path / "gpt2").mkdir()
    alone = tmp_path / "20B_tokenizer.json"
    shutil.copy(tmp_path / "saved" / "tokenizer.json", alone)
    model = json.loads(alone.read_text())["model"]
    (tmp_path / "gpt2" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "gpt2" / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (tmp_path / "only").mkdir()
    shutil.copy(alone, tmp_path / "only" / "tokenizer.json")
    for spec in (alone, tmp_path / "only", tmp_path / "gpt2"):
        found = load_tokenizer(str(spec))
        assert (found.vocab_size, found.eod) == (400, theirs.eod)
        assert found.encode_batch(TEXTS) == theirs.encode_batch(TEXTS)


def test_a_name_that_does_not_exist_is_refused_in_one_line() -> None:
    said = f"tokenizer 'my-tokenizr': no file or folder of that name in {os.getcwd()}, and none in"
    with pytest.raises(UserError, match=f"^{said} the hub: [^\n]+$"):
        load_tokenizer("my-tokenizr")


@pytest.mark.parametrize("family", ["GPT2", "GPTNeoX", "Qwen2", "Llama", "Gemma", "T5"])
def test_tokenizers_of_the_families_give_the_ids_of_their_own_class(
    tmp_path: Path, family: str
) -> None:
    """Each has its own normalizer, splits and model: byte-level BPE, BPE with ▁, or unigram."""
    import transformers

    kind = getattr(transformers, f"{family}Tokenizer")
    lines = [line for path in SOURCES for line in Path(path).read_text().splitlines()]
    trained = kind().train_new_from_iterator([lines[:400]], 500, show_progress=False)
    trained.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert isinstance(theirs, kind)
    ours, texts = load_tokenizer(str(tmp_path)), [*TEXTS, "é", "Ａ ﬁ 12345 don't"]
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    assert ours.encode_batch(texts) == expected
    assert ours.eod == theirs.eos_token_id
    assert [ours.decode(ids) for ids in expected] == [theirs.decode(ids) for ids in expected]
