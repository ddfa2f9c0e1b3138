"""Hugging Face tokenizers, from a folder, a file, or a name in the hub."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megafrontier.common.errors import UserError
from megafrontier.common.files import search_folder_hint
from megafrontier.data.hub import hub_lookup
from megafrontier.data.tokenizers.base import EOD_PIECES, MODEL_FILE, Tokenizer

GENERATION_FILE = "generation_config.json"


class HuggingFaceTokenizer(Tokenizer):
    """Any tokenizer that `transformers` loads without running code from its folder.

    Raises UserError if there is none of that name, or it has no token to end a document with.
    """

    def __init__(self, name: str) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = _load(name)
        vocabulary = self._tokenizer.get_vocab()
        if not vocabulary.keys() - set(self._tokenizer.all_special_tokens):
            # transformers makes such a tokenizer from the folder of a model without one.
            raise UserError(f"tokenizer {name!r}: no piece of text in its vocabulary, {_NEED}")
        _refuse_new_ids(self._tokenizer, name)
        self.vocab_size = 1 + max(vocabulary.values())  # ids may have gaps
        self.eod = self._find_eod(name)
        bos = self._tokenizer.bos_token_id
        self.bos = self.eod if bos is None else int(bos)
        pad = self._tokenizer.pad_token_id
        self.pad = None if pad in (None, self.eod, self.bos) else int(pad)
        unk = self._tokenizer.unk_token_id  # GPT-2 names its eos here, because it needs no unk
        self.unk = None if unk in (None, self.eod, self.bos) else int(unk)
        self._eos_ids = _eos_ids(name)
        added = self._tokenizer.added_tokens_decoder
        others = (i for i in vocabulary.values() if i not in added or not added[i].special)
        self.min_vocab_size = 1 + max(*others, self.eod, self.bos)
        # Its subclasses may change the ids of the `tokenizers` object inside.
        is_plain = type(self._tokenizer) is PreTrainedTokenizerFast
        self._backend = self._tokenizer.backend_tokenizer if is_plain else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:  # some tokenizers of transformers fail for an empty list
            return []
        if self._backend is not None:
            # The same ids as below, without computing offsets and masks.
            self._backend.no_truncation()
            self._backend.no_padding()
            encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encoded]
        # verbose=False: do not warn of documents that are longer than the model's context.
        return self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        plain = [int(i) for i in ids]
        return self._tokenizer.decode(plain, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        """Write it as `transformers` does, and all ids with which its model ends a text."""
        self._tokenizer.save_pretrained(folder)
        if len(self._eos_ids) > 1:
            ids = {"bos_token_id": self.bos, "eos_token_id": self._eos_ids}
            (folder / GENERATION_FILE).write_text(json.dumps(ids, indent=2) + "\n")

    def _find_eod(self, name: str) -> int:
        tokenizer = self._tokenizer
        for candidate in (tokenizer.eos_token_id, tokenizer.sep_token_id):
            if candidate is not None:
                return int(candidate)
        vocabulary = tokenizer.get_vocab()
        for piece in EOD_PIECES:
            if piece in vocabulary:
                return int(vocabulary[piece])
        need = f"need one to end documents, or {' or '.join(EOD_PIECES)} in its vocabulary"
        raise UserError(f"tokenizer {name!r}: no eos token, {need}")


_NEED = "need tokenizer.json, or vocab.json and merges.txt, or a SentencePiece tokenizer.model"
_TOKENIZER_FILE = re.compile(r"token|tekken|vocab|merges|\.model$|\.tiktoken$")


def _load(name: str) -> Any:
    path = Path(name)
    if path.is_dir() and not any(_TOKENIZER_FILE.search(file.name) for file in path.iterdir()):
        raise UserError(f"tokenizer {name!r}: no tokenizer in this folder, {_NEED}")
    try:
        with hub_lookup(name):
            return _from_files(name) or _from_pretrained(name)
    except UserError:
        raise
    except Exception as error:  # transformers raises a dozen kinds for a folder it cannot read
        what = (
            "no SentencePiece file, and not a Hugging Face tokenizer either"
            if path.exists()
            else f"no file or folder of that name{search_folder_hint(name)}, and none in the hub"
        )
        raise UserError(f"tokenizer {name!r}: {what}: {error}") from error


def _refuse_new_ids(tokenizer: Any, name: str) -> None:
    """Refuse an eos or bos that the vocabulary lacks.

    transformers would give it a new id, which no model has been trained on.
    """
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return
    pieces = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    for role in ("eos_token", "bos_token"):
        piece = getattr(tokenizer, role)
        if piece is None or piece in pieces:
            continue
        if _added_ids(name).get(piece) != tokenizer.convert_tokens_to_ids(piece):
            what = f"{role} {piece!r}: not in its vocabulary, need one that is"
            raise UserError(f"tokenizer {name!r}: {what}")


def _added_ids(name: str) -> dict[str, int]:
    """Return the ids of added tokens in the files of a folder."""
    legacy = _read_file_of(name, "added_tokens.json")
    config = _read_file_of(name, "tokenizer_config.json").get("added_tokens_decoder", {})
    fast = _read_file_of(name, "tokenizer.json").get("added_tokens", [])
    return {
        **legacy,
        **{token["content"]: int(i) for i, token in config.items()},
        **{token["content"]: token["id"] for token in fast},
    }


def _from_pretrained(name: str) -> Any:
    """Load a tokenizer by the class that its folder names."""
    from transformers import AutoTokenizer

    from megafrontier.data.tokenizers.fast import with_rules_of

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    model = _file_of(name, MODEL_FILE)
    return tokenizer if model is None else with_rules_of(Path(model), tokenizer)


def _eos_ids(name: str) -> list[int]:
    """Return all ids with which the model in a folder ends a text, if its files name several."""
    for file in (GENERATION_FILE, "config.json"):
        ids = _read_file_of(name, file).get("eos_token_id")
        if isinstance(ids, list):
            return [int(i) for i in ids]
    return []


def _file_of(name: str, file: str) -> str | None:
    """Return the local path of a file of a folder or of a name in the hub; None without one."""
    from transformers.utils import cached_file

    may_lack = ("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors")
    found: str | None = cached_file(name, file, **dict.fromkeys(may_lack, False))
    return found


def _read_file_of(name: str, file: str) -> dict[str, Any]:
    """Read a JSON file of a folder or of a name in the hub; empty without one."""
    path = None if Path(name).is_file() else _file_of(name, file)
    return {} if path is None else json.loads(Path(path).read_bytes())


def _from_files(name: str) -> Any:
    """Load a tokenizer.json, alone (as of GPT-NeoX) or in a folder, or a folder with only the
    vocab.json and merges.txt of GPT-2 (as of Megatron-LM). Returns None for anything else."""
    from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

    path = Path(name)
    if path.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=name)
    if _file_of(name, "tokenizer.json") is not None:
        # The class that tokenizer_config.json names would override the file's rules.
        return PreTrainedTokenizerFast.from_pretrained(name)
    vocabulary, merges = path / "vocab.json", path / "merges.txt"
    if list(path.glob("*.json")) == [vocabulary] and merges.is_file():
        return GPT2TokenizerFast(str(vocabulary), str(merges))
    return None
