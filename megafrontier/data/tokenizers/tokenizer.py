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

MARKER = "megafrontier_tokenizer.json"
"""File that tells a folder written by `save` which kind of tokenizer it holds."""

MODEL_FILE = "tokenizer.model"
SAVED_FILES = (MARKER, MODEL_FILE, "tokenizer.json", "tokenizer_config.json")
"""What `save` writes of a SentencePiece model, and of bytes."""

EOD_PIECES = ("<|endoftext|>", "</s>", "<eod>")
"""What ends a document where the tokenizer itself does not say."""

_SPACE = "\u2581"  # what SentencePiece writes for a space, and so cannot tell from one


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer. Safe to use in forked processes."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""

    @property
    def min_vocab_size(self) -> int:
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

    vocab_size = min_vocab_size = 257
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
    min_vocab_size = 0
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
        self.min_vocab_size = self.vocab_size
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
        from megafrontier.data.tokenizers.fast import save_fast_tokenizer

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
        named = (self._model.piece_to_id(piece) for piece in EOD_PIECES)
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
        from megafrontier.data.tokenizers.hf import HuggingFaceTokenizer

        return HuggingFaceTokenizer(spec)
    raise UserError(
        f"tokenizer {spec!r}: no such file or folder{looked_in(spec)}; give a SentencePiece "
        ".model, a Hugging Face tokenizer folder or name, or `bytes`"
    )


@cache
def cached_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names, loaded once in a process and those forked from it: for a
    run, in whose course the files may go. Raises UserError as `load_tokenizer` does."""
    return load_tokenizer(spec)


_KEPT_FILES: dict[str, dict[Path, bytes]] = {}


def save_cached_tokenizer(spec: str, folder: Path) -> None:
    """Write the files of the tokenizer that `spec` names into a new folder. They are made once in a
    process: each checkpoint has them, and some take seconds to convert."""
    if spec not in _KEPT_FILES:
        folder.mkdir(parents=True, exist_ok=True)
        cached_tokenizer(spec).save(folder)
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
