"""A Hugging Face folder's ids are those of its own files, whatever class it names."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from megafrontier.common.errors import UserError
from megafrontier.data.tokenizers.fast import _fast_model
from megafrontier.data.tokenizers.tokenizer import load_tokenizer

TEXTS = [
    *("", " ", "  ", "word", " word", "  word", "word ", "word  ", "a b", "a  b", " a   b "),
    *("\t", "\tx", "x\t", "a\tb", "\n", "\nx", "x\n", "a\n\nb", " \n x", "é 日本 \u2028 end"),
]
END = "<|endoftext|>"


def save_digits(folder: Path, tokenizer_class: str, prefix: bool, model_type: str) -> None:
    """A byte-level BPE that cuts digits in threes, in the folder of a model."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [*((a, b) for a in "123456789" for b in "0123456789"), ("12", "3"), ("45", "6")]
    vocabulary = [END, *alphabet, *(a + b for a, b in merges)]
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    fast = Tokenizer(models.BPE(ids, merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,3}| ?\D+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([END])
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": tokenizer_class, "eos_token": END, "chat_template": "{{ 1 }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize(
    "named", ["GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "CohereTokenizer", "Unheard"]
)
@pytest.mark.parametrize("prefix", [False, True])
def test_a_folders_ids_are_its_tokenizer_jsons_whatever_class_it_names(
    tmp_path: Path, named: str, prefix: bool
) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    save_digits(tmp_path / "model", named, prefix, "llama")
    alone = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    texts = [*TEXTS, "2023", "1234567"]
    expected = [alone.encode(text).ids for text in texts]
    if not prefix:
        cut = [alone.id_to_token(i) for i in expected[-1]]
        assert cut == ["123", "456", "7"]
    found = load_tokenizer(str(tmp_path / "model"))
    assert found.encode_batch(texts) == expected
    assert found.eod == alone.token_to_id(END)
    # And so in the folder that a checkpoint and `export` have.
    found.save(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    assert theirs(texts, add_special_tokens=False)["input_ids"] == expected
    assert theirs.chat_template == "{{ 1 }}"
    assert load_tokenizer(str(tmp_path / "saved")).encode_batch(texts) == expected


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_all_ids_that_end_a_text_are_kept(tmp_path: Path, file: str) -> None:
    """As Llama 3.1's folders name three; config.json has the one that ends a document."""
    save_digits(tmp_path / "model", "GPT2Tokenizer", False, "llama")
    (tmp_path / "model" / file).write_text(json.dumps({"eos_token_id": [0, 5, 7]}))
    load_tokenizer(str(tmp_path / "model")).save(tmp_path / "saved")
    load_tokenizer(str(tmp_path / "saved")).save(tmp_path / "again")
    kept = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert kept["eos_token_id"] == [0, 5, 7]


@pytest.mark.parametrize("role", ["eos_token", "bos_token"])
def test_an_end_or_beginning_that_the_vocabulary_lacks_is_refused(
    tmp_path: Path, role: str
) -> None:
    """transformers would give it a new id, which the model has never seen."""
    save_digits(tmp_path / "model", "GPT2Tokenizer", False, "llama")
    config = {"eos_token": END, role: "<|im_end|>"}
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"{role} '<\|im_end\|>': not in its vocabulary, need one"):
        load_tokenizer(str(tmp_path / "model"))
    size = 1 + max(json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"][
        "vocab"].values())  # fmt: skip
    token = {"content": "<|im_end|>", "special": True}
    path.write_text(json.dumps({**config, "added_tokens_decoder": {size: token}}))
    found = load_tokenizer(str(tmp_path / "model"))
    assert (found.eod if role == "eos_token" else found.bos) == size


@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_damaged_file_beside_a_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    save_digits(tmp_path / "model", "GPT2Tokenizer", False, "llama")
    (tmp_path / "model" / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json: "):
        load_tokenizer(str(tmp_path / "model"))


def train_model(folder: Path, prefix: bool) -> Path:
    """A SentencePiece model of Llama 2's kind, or without a prefix space, as Yi's."""
    folder.mkdir()
    SentencePieceTrainer.train(
        input=os.__file__,
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    return folder / "tokenizer.model"


def write_json(model: Path, prefix: bool) -> Path:
    """The same as a tokenizer.json, with the rules that Llama 2's has."""
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
@pytest.mark.parametrize("legacy", [{"legacy": True}, {"legacy": False}, {}])
def test_three_names_of_one_tokenizer_give_one_result(
    tmp_path: Path, prefix: bool, legacy: dict[str, bool]
) -> None:
    """Its tokenizer.model, its tokenizer.json, its folder: the latter with and without the file."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", **special, **legacy}
    model = train_model(tmp_path / "x", prefix)
    (tmp_path / "x" / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = SentencePieceProcessor(model_file=str(model))
    expected = theirs.encode(TEXTS)
    for names in ([model, model.parent], [write_json(model, prefix), model, model.parent]):
        for name in names:
            found = load_tokenizer(str(name))
            assert found.encode_batch(TEXTS) == expected, name
            assert [found.decode(ids) for ids in expected] == TEXTS, name
            assert (found.eod, found.vocab_size) == (theirs.eos_id(), len(theirs))


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_model_is_saved_for_transformers_with_its_own_spaces(
    tmp_path: Path, prefix: bool
) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(str(train_model(tmp_path / "x", prefix)))
    ours.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    found = theirs(TEXTS, add_special_tokens=False)["input_ids"]
    assert found == ours.encode_batch(TEXTS)
