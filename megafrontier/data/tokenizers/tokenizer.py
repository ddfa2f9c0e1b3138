"""One interface for all tokenizers: SentencePiece, Hugging Face, and plain bytes."""

import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from megafrontier.common.errors import UserError
from megafrontier.data.tokenizers.base import EOD_PIECES, MODEL_FILE, Tokenizer

MARKER = "megafrontier_tokenizer.json"
"""The file in a folder written by `save` that says which kind of tokenizer it holds."""

_SPACE = "\u2581"  # SentencePiece's piece for a space


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and 256 as the end of a document."""

    vocab_size = min_vocab_size = 257
    eod = bos = 256

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        _write_marker(folder, "bytes")


class NoTokenizer(Tokenizer):
    """For a model whose corpora are ids without a text. Accepts all ids of the model."""

    vocab_size = 2**31 - 1
    min_vocab_size = 0
    eod = bos = -1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raise UserError("tokenizer: none, need one to read and write text")

    def decode(self, ids: Sequence[int]) -> str:
        raise UserError("tokenizer: none, need one to read and write text")

    def save(self, folder: Path) -> None:
        _write_marker(folder, "none")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    For a model from `megafrontier tokenizer`, decode(encode(text)) == text for every text. Raises
    UserError if `path` is not a SentencePiece model, or has no piece to end a document with.
    """

    def __init__(self, path: str | Path) -> None:
        import sentencepiece

        self.path = Path(path)
        self._model = sentencepiece.SentencePieceProcessor()
        self._proto = self.path.read_bytes()
        try:
            self._model.LoadFromSerializedProto(self._proto)
        except RuntimeError as error:
            need = "need a SentencePiece .model, or a tokenizer.json by its name or its folder"
            raise UserError(f"tokenizer {str(path)!r}: no SentencePiece model; {need}") from error
        self.vocab_size = self.min_vocab_size = self._model.get_piece_size()
        self.unk = self._model.unk_id()
        self.eod = self._find_eod()
        self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else self.eod
        self._is_lossless = self._has_lossless_rules()
        self._space_ids = [self._model.piece_to_id(f"<0x{b:02X}>") for b in _SPACE.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._is_lossless:
            return self._model.encode(list(texts), num_threads=1)
        # No piece of a lossless model crosses a line end, so lines can be encoded one by one. This
        # takes half the time, because the time of BPE grows faster than the length. All lines are
        # encoded in one call, because a call costs as much as thirty short lines.
        split = [[part.splitlines(True) for part in text.split(_SPACE)] for text in texts]
        lines = [line for parts in split for part in parts for line in part]
        encoded = iter(self._model.encode(lines, num_threads=1))
        return [self._join(parts, encoded) for parts in split]

    def _join(self, parts: Sequence[Sequence[str]], encoded: Iterator[list[int]]) -> list[int]:
        """Join the next encoded lines to the ids of one text, whose `parts` U+2581 separates.

        SentencePiece would take U+2581 for a space, so it is encoded as bytes.
        """
        ids = list(chain.from_iterable(islice(encoded, len(parts[0]))))
        for part in parts[1:]:
            ids += self._space_ids
            ids += chain.from_iterable(islice(encoded, len(part)))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids if 0 <= i < self.vocab_size])

    def save(self, folder: Path) -> None:
        """Write the model and, if it can be converted, a fast tokenizer for `transformers`.

        The ids of both are equal, with these exceptions: two segmentations that are equally likely
        for unigram, the character U+2581, and texts that spell the eod piece.
        """
        from megafrontier.data.tokenizers.fast import save_fast_tokenizer

        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODEL_FILE).write_bytes(self._proto)
        save_fast_tokenizer(self._model, self.bos, self.eod, self._is_lossless, folder)
        _write_marker(folder, "sentencepiece")

    def _find_eod(self) -> int:
        named = (self._model.piece_to_id(piece) for piece in EOD_PIECES)
        candidates = [self._model.eos_id(), *(i for i in named if not self._model.is_unknown(i))]
        for candidate in candidates:
            if candidate >= 0:
                return candidate
        raise UserError(f"tokenizer {self.path}: no end-of-sequence piece, need one to end texts")

    def _has_lossless_rules(self) -> bool:
        """Whether line ends are separate pieces, spaces are kept, and the rest becomes bytes."""
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


def load_tokenizer(spec: str) -> Tokenizer:
    """Load the tokenizer that `spec` names, as docs/data-format.md lists. Raises UserError if there
    is none."""
    # The threads of the `tokenizers` library do not survive the fork of our workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = Path(spec)
    marker, model = path / MARKER, path / MODEL_FILE
    kind = json.loads(marker.read_text())["kind"] if marker.is_file() else spec
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "none":
        return NoTokenizer()
    if path.is_file() and path.suffix != ".json":
        return SentencePieceTokenizer(path)
    # A folder like Llama's may have nothing but the model.
    is_alone = model.is_file() and not (path / "tokenizer.json").is_file()
    if kind == "sentencepiece" or is_alone:
        return SentencePieceTokenizer(model)
    from megafrontier.data.tokenizers.hf import HuggingFaceTokenizer

    return HuggingFaceTokenizer(spec)


@cache
def cached_tokenizer(spec: str) -> Tokenizer:
    """Load a tokenizer once per process and its forks, because its files may be deleted later.

    Raises UserError as `load_tokenizer`.
    """
    return load_tokenizer(spec)


def save_cached_tokenizer(spec: str, folder: Path) -> None:
    """Write the files of a cached tokenizer into a folder.

    Every checkpoint has them, and some take seconds to convert, so they are made once per process.
    """
    for path, content in _saved_files(spec).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


@cache
def _saved_files(spec: str) -> dict[Path, bytes]:
    with TemporaryDirectory() as folder:
        cached_tokenizer(spec).save(Path(folder))
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder): path.read_bytes() for path in files}


def _write_marker(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text(json.dumps({"kind": kind}) + "\n")
