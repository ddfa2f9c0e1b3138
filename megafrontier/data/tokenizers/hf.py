"""Hugging Face tokenizers, from a folder, a file, or a name in the hub."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megafrontier.common.errors import UserError
from megafrontier.common.files import search_folder_hint
from megafrontier.data.tokenizers.base import EOD_PIECES, Tokenizer


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
            need = (
                "tokenizer.json, or vocab.json and merges.txt, or a SentencePiece tokenizer.model"
            )
            raise UserError(f"tokenizer {name!r}: no piece of text in its vocabulary, need {need}")
        self.vocab_size = 1 + max(vocabulary.values())  # ids may have gaps
        self.eod = self._find_eod(name)
        bos = self._tokenizer.bos_token_id
        self.bos = self.eod if bos is None else int(bos)
        unk = self._tokenizer.unk_token_id  # GPT-2 names its eos here, because it needs no unk
        self.unk = -1 if unk in (None, self.eod, self.bos) else int(unk)
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

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def markers(self) -> str:
        added = self._tokenizer.added_tokens_decoder.values()
        pieces = sorted((t for t in added if t.content.strip()), key=lambda t: -len(t.content))
        # Such a token takes in the whitespace behind it.
        return "|".join(re.escape(t.content) + r"\s*" * t.rstrip for t in pieces) or "(?!)"

    def render_chat(
        self, chat: Sequence[Mapping[str, Any]], asks: bool = False, tools: Any = None
    ) -> str:
        # Without nulls, which many templates write as None, and some releases of transformers drop.
        messages = [{k: v for k, v in message.items() if v is not None} for message in chat]
        try:
            # A batch of one, because transformers refuses an empty chat that is not in a batch.
            (text,) = self._tokenizer.apply_chat_template(
                [messages], tools=tools, tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # jinja2 raises what the template's code does
            reason = " ".join(str(error).split())
            raise UserError(f"the chat template refuses it: {reason}") from error
        return str(text)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def _find_eod(self, name: str) -> int:
        named = map(self._tokenizer.get_vocab().get, EOD_PIECES)
        for candidate in (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id, *named):
            if candidate is not None:
                return int(candidate)
        need = f"need one to end documents, or {' or '.join(EOD_PIECES)} in its vocabulary"
        raise UserError(f"tokenizer {name!r}: no eos token, {need}")


def _load(name: str) -> Any:
    try:
        return _from_files(name)
    except Exception as error:  # transformers raises a dozen kinds for a folder it cannot read
        what = (
            "no SentencePiece file, and not a Hugging Face tokenizer either"
            if Path(name).exists()
            else f"no file or folder of that name{search_folder_hint(name)}, and none in the hub"
        )
        raise UserError(f"tokenizer {name!r}: {what}: {error}") from error


def _from_files(name: str) -> Any:
    """Load a tokenizer.json, alone (as of GPT-NeoX) or in a folder; a folder with only the
    vocab.json and merges.txt of GPT-2 (as of Megatron-LM); or what else `transformers` reads."""
    from transformers import AutoTokenizer, GPT2TokenizerFast, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    path = Path(name)
    if path.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=name)
    if cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False):
        # The class that tokenizer_config.json names would override the file's rules.
        return PreTrainedTokenizerFast.from_pretrained(name)
    vocabulary, merges = path / "vocab.json", path / "merges.txt"
    if list(path.glob("*.json")) == [vocabulary] and merges.is_file():
        return GPT2TokenizerFast(str(vocabulary), str(merges))
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
