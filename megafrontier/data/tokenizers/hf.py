"""Any tokenizer of Hugging Face's, of a folder, a file, or a name on the hub."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megafrontier.common.errors import UserError
from megafrontier.common.files import looked_in
from megafrontier.data.hub import hub_lookup
from megafrontier.data.tokenizers.tokenizer import EOD_PIECES, MODEL_FILE

GENERATION_FILE = "generation_config.json"


class HuggingFaceTokenizer:
    """Any tokenizer that `transformers` loads without running code from its folder.

    Raises UserError when there is none of that name, or it has nothing to end a document with.
    """

    def __init__(self, name: str) -> None:
        _refuse_folder_without(name)
        try:
            with hub_lookup(name):
                self._tokenizer: Any = _from_files(name) or _from_pretrained(name)
        except UserError:
            raise
        except Exception as error:  # the library raises a dozen kinds for a folder it cannot read
            what = (
                "no SentencePiece file, and not a Hugging Face tokenizer either"
                if Path(name).exists()
                else f"no file or folder of that name{looked_in(name)}, and none to be had "
                "from the hub"
            )
            raise UserError(f"tokenizer {name!r}: {what}: {error}") from error
        vocabulary = self._tokenizer.get_vocab()
        if not vocabulary.keys() - set(self._tokenizer.all_special_tokens):
            # What transformers makes of a model's folder that has no tokenizer in it.
            raise UserError(f"tokenizer {name!r}: no piece of text in its vocabulary, {_NEED}")
        _refuse_new_ids(self._tokenizer, name)
        self.vocab_size = 1 + max(vocabulary.values())  # there may be holes
        self.eod = self._find_eod(name)
        bos = self._tokenizer.bos_token_id
        self.bos = self.eod if bos is None else int(bos)
        pad = self._tokenizer.pad_token_id
        self.pad = None if pad in (None, self.eod, self.bos) else int(pad)
        unk = self._tokenizer.unk_token_id  # GPT-2's is its eos: a name for what it has no need of
        self.unk = None if unk in (None, self.eod, self.bos) else int(unk)
        self._ends = _end_ids(name)
        added = self._tokenizer.added_tokens_decoder
        others = (i for i in vocabulary.values() if i not in added or not added[i].special)
        self.min_vocab_size = 1 + max(*others, self.eod, self.bos)
        self._backend = _bare_backend(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        if not texts:  # which some of transformers' own trip over
            return []
        if self._backend is not None:
            # As the call below, without the offsets and masks that nobody asks for here.
            self._backend.no_truncation()
            self._backend.no_padding()
            encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encoded]
        # verbose: a document longer than the model's context is nothing to warn of here.
        return self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        plain = [int(i) for i in ids]
        return self._tokenizer.decode(plain, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        """Write it as `transformers` does, and all ids that its model ends a text with."""
        self._tokenizer.save_pretrained(folder)
        if len(self._ends) > 1:
            ends = {"bos_token_id": self.bos, "eos_token_id": self._ends}
            (folder / GENERATION_FILE).write_text(json.dumps(ends, indent=2) + "\n")

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


def _refuse_folder_without(name: str) -> None:
    path = Path(name)
    if path.is_dir() and not any(_TOKENIZER_FILE.search(file.name) for file in path.iterdir()):
        raise UserError(f"tokenizer {name!r}: no tokenizer in this folder, {_NEED}")


def _refuse_new_ids(tokenizer: Any, name: str) -> None:
    """Raise UserError for an end or a beginning of texts that the folder's vocabulary lacks, to
    which transformers gives a new id that no model has learned."""
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
    """The ids that a folder's files give to added tokens."""
    legacy = _read_file_of(name, "added_tokens.json")
    config = _read_file_of(name, "tokenizer_config.json").get("added_tokens_decoder", {})
    fast = _read_file_of(name, "tokenizer.json").get("added_tokens", [])
    return {
        **legacy,
        **{token["content"]: int(i) for i, token in config.items()},
        **{token["content"]: token["id"] for token in fast},
    }


def _from_pretrained(name: str) -> Any:
    """The tokenizer that transformers makes by the class which the folder names."""
    from transformers import AutoTokenizer

    from megafrontier.data.tokenizers.fast import with_rules_of

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    model = _file_of(name, MODEL_FILE)
    return tokenizer if model is None else with_rules_of(Path(model), tokenizer)


def _end_ids(name: str) -> list[int]:
    """All ids that the model in a folder ends a text with, where its files name several."""
    for file in (GENERATION_FILE, "config.json"):
        ends = _read_file_of(name, file).get("eos_token_id")
        if isinstance(ends, list):
            return [int(i) for i in ends]
    return []


def _file_of(name: str, file: str) -> str | None:
    """Where a file of a folder, or of a name on the hub, lies here; None if it has none."""
    from transformers.utils import cached_file

    may_lack = ("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors")
    found: str | None = cached_file(name, file, **dict.fromkeys(may_lack, False))
    return found


def _read_file_of(name: str, file: str) -> dict[str, Any]:
    """A JSON file of a folder, or of a name on the hub; empty if it has none."""
    path = None if Path(name).is_file() else _file_of(name, file)
    try:
        found = {} if path is None else json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: a list or a single value, need keys and values")
    return found


def _from_files(name: str) -> Any:
    """The tokenizer of a tokenizer.json, in a folder or alone (as GPT-NeoX has one), or of a folder
    whose only JSON is Megatron-LM's vocab.json of GPT-2, with its merges.txt; else None."""
    from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

    path = Path(name)
    if path.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=name)
    if _file_of(name, "tokenizer.json") is not None:
        # The class that tokenizer_config.json names would put its own rules over the file's.
        return PreTrainedTokenizerFast.from_pretrained(name)
    vocabulary, merges = path / "vocab.json", path / "merges.txt"
    if list(path.glob("*.json")) == [vocabulary] and merges.is_file():
        return GPT2TokenizerFast(str(vocabulary), str(merges))
    return None


def _bare_backend(tokenizer: Any) -> Any:
    """The tokenizer of Hugging Face's `tokenizers` inside one of transformers', where the latter
    adds nothing of its own to the ids; else None."""
    from transformers import PreTrainedTokenizerFast

    kind, base = type(tokenizer), PreTrainedTokenizerFast
    if not isinstance(tokenizer, base) or kind.__call__ is not base.__call__:
        return None
    return tokenizer.backend_tokenizer if kind._encode_plus is base._encode_plus else None
