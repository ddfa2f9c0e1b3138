"""One face for every tokenizer: SentencePiece, Hugging Face, and plain bytes."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from megafrontier.common.errors import UserError, as_fatal_error
from megafrontier.common.files import looked_in
from megafrontier.data.text.hub import looked_up

MARKER = "megafrontier_tokenizer.json"
"""File that tells a folder written by `save` which kind of tokenizer it holds."""

MODEL_FILE = "tokenizer.model"
GENERATION_FILE = "generation_config.json"
SAVED_FILES = (MARKER, MODEL_FILE, "tokenizer.json", "tokenizer_config.json")
"""What `save` writes of a SentencePiece model, and of bytes."""

_EOD_PIECES = ("<|endoftext|>", "</s>", "<eod>")
"""What ends a document where the tokenizer itself does not say."""

_SPACE = "\u2581"  # what SentencePiece writes for a space, and so cannot tell from one


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer. Safe to use in forked processes."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""

    @property
    def needed_ids(self) -> int:
        """How many a model has to know; 0 without a tokenizer. Behind them are special tokens that
        were added, `<pad>` perhaps, which only a text that spells them has."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def bos(self) -> int:
        """Id that begins a text for models that expect one; `eod` where it has none of its own."""

    @property
    def pad(self) -> int | None:
        """Id that `transformers` fills short rows of a batch with, where it has one for that alone:
        a model there learns nothing of it."""

    @property
    def unk(self) -> int | None:
        """Id that stands for characters without a piece, where there are such."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any special ones at its ends."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; `eod` has none in SentencePiece and bytes, nor has an unknown id."""

    def save(self, folder: Path) -> None:
        """Write into `folder` what `load_tokenizer(folder)` reads back, and, but for `bytes`, what
        `transformers.AutoTokenizer.from_pretrained(folder)` reads too."""


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 as end of document. `transformers` has none like it, so a
    saved one is only a marker for `load_tokenizer`."""

    vocab_size = needed_ids = 257
    eod = bos = 256
    pad = unk = None

    def encode(self, text: str) -> list[int]:
        """One id a byte."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """One id a byte, for each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD, ids beyond the bytes nothing."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write the marker."""
        _write_marker(folder, "bytes")


class NoTokenizer:
    """For a model whose corpora are ids alone: any ids that the model knows, and no text."""

    vocab_size = 2**31 - 1
    needed_ids = 0
    eod = bos = -1
    pad = unk = None

    def encode(self, text: str) -> list[int]:
        """Raises UserError."""
        raise UserError("tokenizer: none, need one to read and write text")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Raises UserError."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Raises UserError."""
        raise UserError("tokenizer: none, need one to read and write text")

    def save(self, folder: Path) -> None:
        """Write the marker."""
        _write_marker(folder, "none")


class SentencePieceTokenizer:
    """A SentencePiece model. With one from `megafrontier tokenizer`, decode(encode(text)) == text
    for every text.

    Raises UserError when `path` is no SentencePiece model, or has nothing to end a document with.
    """

    pad = None

    def __init__(self, path: str | Path) -> None:
        import sentencepiece

        self.path = Path(path)
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._proto = self.path.read_bytes()
            self._model.LoadFromSerializedProto(self._proto)
        except OSError as error:
            line = f"tokenizer {str(path)!r}: cannot read: {error.strerror}"
            raise as_fatal_error(error, line) from error
        except (RuntimeError, UnicodeDecodeError) as error:
            what = _described(self._proto)
            need = "need a SentencePiece .model, or a tokenizer.json by its name or its folder"
            raise UserError(
                f"tokenizer {str(path)!r}: no SentencePiece model{what}; {need}"
            ) from error
        try:
            self._look_at_pieces()
        except UnicodeDecodeError as error:
            raise UserError(f"tokenizer {str(path)!r}: damaged: a piece is not UTF-8") from error

    def _look_at_pieces(self) -> None:
        self.vocab_size: int = self._model.get_piece_size()
        self.needed_ids = self.vocab_size
        self.unk = self._model.unk_id()
        self.eod = self._find_eod()
        self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else self.eod
        self._lines_stand_alone = self._is_lossless()
        self._space_ids = [self._model.piece_to_id(f"<0x{b:02X}>") for b in _SPACE.encode()]

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        if not self._lines_stand_alone:
            return self._model.encode(list(texts), num_threads=1)
        # As the call above would, in half the time: BPE takes longer than linear, and no piece
        # crosses a line. All lines in one call, which costs as much as thirty short lines do.
        split = [[part.splitlines(True) for part in text.split(_SPACE)] for text in texts]
        lines = [line for parts in split for part in parts for line in part]
        runs = iter(self._model.encode(lines, num_threads=1))
        return [self._join(parts, runs) for parts in split]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return self._model.decode([int(i) for i in ids if 0 <= i < self.vocab_size])

    def save(self, folder: Path) -> None:
        """Write the model and, for `transformers`, the same as a fast tokenizer.

        Its ids are the model's, but where unigram finds two cuts of a text equally likely, for the
        character U+2581, which it takes for a space, and for the text of the eod piece, which it
        takes for the end. A model that `transformers` cannot convert is saved alone.
        """
        from megafrontier.data.tokenizers.hf import save_fast_tokenizer

        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODEL_FILE).write_bytes(self._proto)
        save_fast_tokenizer(self._model, self.bos, self.eod, self._lines_stand_alone, folder)
        _write_marker(folder, "sentencepiece")

    def _join(self, parts: Sequence[Sequence[str]], runs: Iterator[list[int]]) -> list[int]:
        """The ids of one text from those of its lines, the next `runs`; what parts its `parts`
        SentencePiece would read as a space."""
        ids = list(chain.from_iterable(islice(runs, len(parts[0]))))
        for part in parts[1:]:
            ids += self._space_ids
            ids += chain.from_iterable(islice(runs, len(part)))
        return ids

    def _find_eod(self) -> int:
        named = (self._model.piece_to_id(piece) for piece in _EOD_PIECES)
        candidates = [self._model.eos_id(), *(i for i in named if not self._model.is_unknown(i))]
        for candidate in candidates:
            if candidate >= 0:
                return candidate
        raise UserError(f"tokenizer {self.path}: no end-of-sequence piece, need one to end texts")

    def _is_lossless(self) -> bool:
        """Whether line ends are pieces of their own and in no other, spaces are kept, and bytes
        catch the rest: so `megafrontier tokenizer` makes them."""
        newline = self._model.piece_to_id("\n")
        pieces = self._model.id_to_piece(list(range(self.vocab_size)))
        probe = "  a \n"
        return (
            not self._model.is_unknown(newline)
            and self._model.encode("\n") == [newline]
            and self._model.decode(self._model.encode(probe)) == probe
            and not self._model.is_unknown(self._model.piece_to_id("<0x00>"))
            and not any(len(piece) > 1 and piece.splitlines() != [piece] for piece in pieces)
        )


_FORMATS = {
    rb"GGUF": "a GGUF file",
    rb"[A-Za-z0-9+/]+=* \d+\r?\n": "tiktoken's ranks",
    rb"\s*[{\[]": "JSON",
    rb"PK\x03\x04": "a zip archive, as PyTorch writes it",
    rb"version https://git-lfs": "a pointer of Git LFS, without the file that it stands for",
}
"""What files begin with that are taken for a tokenizer."""


def _described(content: bytes) -> str:
    found = (name for begins, name in _FORMATS.items() if re.match(begins, content))
    return next((f" but {name}" for name in found), "")


class HuggingFaceTokenizer:
    """Any tokenizer that `transformers` loads without running code from its folder.

    Raises UserError when there is none of that name, or it has nothing to end a document with.
    """

    def __init__(self, name: str) -> None:
        _refuse_folder_without(name)
        try:
            with looked_up(name):
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
        self.needed_ids = 1 + max(*others, self.eod, self.bos)
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
        for piece in _EOD_PIECES:
            if piece in vocabulary:
                return int(vocabulary[piece])
        need = f"need one to end documents, or {' or '.join(_EOD_PIECES)} in its vocabulary"
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

    from megafrontier.data.tokenizers.hf import with_rules_of

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


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names: `bytes`, a SentencePiece .model file, a folder that `save`
    wrote, the folder or name of a Hugging Face tokenizer, a tokenizer.json under any name, or the
    folder of a vocab.json and merges.txt of GPT-2's kind; or `none`.

    Raises UserError when it is none of these.
    """
    # Its threads do not survive a fork, and workers are processes here.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = Path(spec)
    if spec == "bytes" or _read_marker(path) == "bytes":
        return ByteTokenizer()
    if spec == "none" or _read_marker(path) == "none":
        return NoTokenizer()
    if path.is_file() and path.suffix != ".json":
        return SentencePieceTokenizer(path)
    if _read_marker(path) == "sentencepiece" and not _is_rewritten(path):
        return SentencePieceTokenizer(path / MODEL_FILE)
    if path.exists() or not _is_a_path(spec):
        return HuggingFaceTokenizer(spec)
    raise UserError(
        f"tokenizer {spec!r}: no such file or folder{looked_in(spec)}; give a SentencePiece "
        ".model, a Hugging Face tokenizer folder or name, or `bytes`"
    )


@cache
def kept_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names, loaded once in a process and those forked from it: for a
    run, in whose course the files may go. Raises UserError as `load_tokenizer` does."""
    return load_tokenizer(spec)


_KEPT_FILES: dict[str, dict[Path, bytes]] = {}


def save_kept(spec: str, folder: Path) -> None:
    """Write the files of the tokenizer that `spec` names into a new folder. They are made once in a
    process: each checkpoint has them, and some take seconds to convert."""
    if spec not in _KEPT_FILES:
        folder.mkdir(parents=True, exist_ok=True)
        kept_tokenizer(spec).save(folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        _KEPT_FILES[spec] = {path.relative_to(folder): path.read_bytes() for path in files}
        return
    for path, content in _KEPT_FILES[spec].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def _is_a_path(spec: str) -> bool:
    """Whether it cannot be the name of a tokenizer, OWNER/NAME or NAME."""
    return spec.startswith((".", "/", "~")) or spec.count("/") > 1 or spec.endswith(".model")


def _write_marker(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text(json.dumps({"kind": kind, "fast": _fast_digest(folder)}) + "\n")


def _read_marker(folder: Path) -> str | None:
    return _marker(folder).get("kind")


def _marker(folder: Path) -> dict[str, Any]:
    marker = folder / MARKER
    try:
        found: dict[str, Any] = json.loads(marker.read_text()) if marker.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError(found)
        return found
    except ValueError as error:
        raise UserError(f"{marker}: cut short or changed, need the folder written anew") from error


def _is_rewritten(folder: Path) -> bool:
    """Whether `transformers` has saved a tokenizer over ours, which may have more ids."""
    return _marker(folder).get("fast", _fast_digest(folder)) != _fast_digest(folder)


def _fast_digest(folder: Path) -> str | None:
    """Of what `transformers` reads in a folder, None where that is nothing."""
    path = folder / "tokenizer.json"
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else None
