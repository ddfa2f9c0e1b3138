"""Small tokenizers for tests, and texts that they must restore."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer

from megafrontier.data.tokenizers import train

GENERAL = str(Path(__file__).parents[3] / "tokenizers" / "general-16k.model")
SOURCES = [os.__file__, os.path.join(os.path.dirname(os.__file__), "argparse.py")]
END = "<|endoftext|>"


def train_tokenizer(*arguments: Any, **options: Any) -> Any:
    """Call `train.train_tokenizer` in a process of its own.

    SentencePiece leaves OpenMP threads behind. They do not survive a fork, and a rank that a later
    test forks would wait for them forever.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(train.train_tokenizer, *arguments, **options).result()


def train_model(folder: Path, **options: Any) -> Path:
    """Train a SentencePiece model FOLDER/tokenizer.model, by default BPE of 600 pieces."""
    folder.mkdir()
    defaults = {
        "input": SOURCES,
        "model_type": "bpe",
        "vocab_size": 600,
        "normalization_rule_name": "identity",
        "minloglevel": 2,
    }
    SentencePieceTrainer.train(model_prefix=str(folder / "tokenizer"), **(defaults | options))
    (folder / "tokenizer.vocab").unlink()
    return folder / "tokenizer.model"


LOSSLESS = {"byte_fallback": True, "remove_extra_whitespaces": False, "add_dummy_prefix": False}


def save_fast_bpe(folder: Path, eos: str = "<eos>", **truncation: Any) -> None:
    """Save a byte-level BPE of Hugging Face, perhaps with a truncation in its file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[eos], initial_alphabet=alphabet, show_progress=False
    )
    fast.train(SOURCES, trainer)
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=eos).save_pretrained(folder)
    if truncation:
        fast.enable_truncation(**truncation)
        fast.save(str(folder / "tokenizer.json"))


def save_digits(folder: Path, tokenizer_class: str, prefix: bool = False) -> None:
    """Save a byte-level BPE that splits numbers into three digits, in the folder of a model."""
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
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
