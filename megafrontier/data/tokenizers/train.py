"""Trains a SentencePiece tokenizer that keeps every character of every text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import BinaryIO, Literal

from megafrontier.common.errors import UserError
from megafrontier.common.files import in_work, sync_file
from megafrontier.data.text.reader import BadText, read_texts
from megafrontier.data.text.sources import Reader, find_sources
from megafrontier.data.tokenizers.tokenizer import MARKER, SAVED_FILES, SentencePieceTokenizer
from megafrontier.data.workers import Workers

EOD_PIECE = "<|endoftext|>"

_SMALLEST_VOCABULARY = 300  # 256 bytes, four special pieces, and a few characters
_LARGEST_VOCABULARY = 2**31 - 1  # an int32 to SentencePiece
_LONGEST_LINE = 4096  # characters; SentencePiece leaves out longer sentences than its limit
_THREADS = 16  # fixed: unigram's sums, and so its pieces, depend on how the work is shared out


@dataclass
class Sample:
    """Lines of text for the trainer, thinned evenly to a size; counts what it passes over."""

    inputs: Sequence[str]
    max_megabytes: float
    key: str = "text"
    skip_bad: bool = False
    bad: list[str] = field(default_factory=list)
    text_bytes: int = 0

    def lines(self) -> Iterator[str]:
        """The lines. Raises UserError for an input that cannot be read, and for bad text unless
        `skip_bad`."""
        reader = Reader(find_sources(self.inputs), self.key)
        for text in _draw(self._texts(reader), self.max_megabytes * 1e6):
            yield from _cut(text)
            self.text_bytes += len(text.encode())

    def _texts(self, reader: Reader) -> Iterator[str]:
        for batch in reader.batches():
            for text in (text for piece in batch for text in read_texts(piece, self.key)):
                if isinstance(text, str):
                    yield text
                else:
                    self._refuse(text)

    def _refuse(self, bad: BadText) -> None:
        if not self.skip_bad:
            raise UserError(f"{bad}; --skip-bad leaves such texts out")
        self.bad.append(str(bad))


def _draw(texts: Iterator[str], limit: float) -> list[str]:
    """Texts of at most `limit` bytes together (or one longer text), in order, each as likely.

    How much there is to choose from, packed as it may be, is known only at the end: so each text
    draws a number, and the smallest ones go while there is too much.
    """
    draws = Random(0)
    kept: list[tuple[float, int, str]] = []
    size = 0
    for number, text in enumerate(texts):
        heappush(kept, (draws.random(), number, text))
        size += len(text.encode())
        while size > limit and len(kept) > 1:
            size -= len(heappop(kept)[2].encode())
    return [text for _, text in sorted((number, text) for _, number, text in kept)]


def _cut(text: str) -> Iterator[str]:
    for line in text.splitlines():
        for start in range(0, len(line), _LONGEST_LINE):
            yield line[start : start + _LONGEST_LINE]


def train_tokenizer(
    inputs: Sequence[str],
    vocab_size: int,
    out: str | Path,
    kind: Literal["bpe", "unigram"] = "bpe",
    max_megabytes: float = 500,
    key: str = "text",
    skip_bad: bool = False,
) -> Sample:
    """Train on the inputs (see `find_sources`) and write the folder `out`, whole or not at all.

    At most `max_megabytes` of text are used, taken evenly from all of it; the trainer needs some
    ten times that in memory. The same inputs give the same bytes. Returns what was read.
    Raises UserError for bad inputs, too little text for the vocabulary, or no place to write.
    """
    if not _SMALLEST_VOCABULARY <= vocab_size <= _LARGEST_VOCABULARY:
        need = f"need {_SMALLEST_VOCABULARY} to {_LARGEST_VOCABULARY}"
        raise UserError(f"--vocab-size: {vocab_size}, {need}")
    if not max_megabytes > 0:  # nan either
        raise UserError(f"--max-megabytes: {max_megabytes}, need more than 0")
    sample = Sample(inputs, max_megabytes, key, skip_bad)
    out = Path(out)
    _check_replaceable(out)
    try:
        with in_work(out.resolve()) as folder:  # `.` has no name
            train = partial(_train, vocab_size=vocab_size, kind=kind, path=folder / "trained.model")
            # Of its own process: SentencePiece, once at work, hears of no Ctrl-C.
            with Workers(1) as pool:
                (sample,) = pool.results(train, iter([sample]), "try a smaller --max-megabytes")
            SentencePieceTokenizer(folder / "trained.model").save(folder / "whole")
            _replace(folder / "whole", out.resolve())
    except OSError as error:
        raise UserError(f"--out {out}: cannot write there: {error.strerror}") from error
    return sample


class _Guard:
    """Passes lines on and keeps the error that ends them, of which SentencePiece, in between,
    would only tell the text."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.error: BaseException | None = None
        self.empty = True

    def __iter__(self) -> Iterator[str]:
        try:
            for line in self._lines:
                self.empty = False
                yield line
        except BaseException as error:
            self.error = error
            raise


def _train(sample: Sample, vocab_size: int, kind: str, path: Path) -> Sample:
    """Write the model of a sample; returns that with what has been read counted."""
    guard = _Guard(sample.lines())
    with path.open("wb") as file:
        try:
            _run_trainer(iter(guard), vocab_size, kind, file)
        except RuntimeError as error:
            if guard.error is not None:
                raise guard.error from None
            if guard.empty:
                raise UserError("tokenizer: the inputs hold no text, need some") from error
            raise UserError(_too_little(vocab_size, str(error))) from error
        sync_file(file)
    return sample


def _too_little(vocab_size: int, said: str) -> str:
    """What SentencePiece's refusal of a vocabulary means, which names the most that it could be."""
    most = re.search(r"value <= (\d+)", said)
    if most is None:
        reason = said.rsplit("] ", 1)[-1]
        return f"--vocab-size {vocab_size}: SentencePiece says: {reason}"
    found = f"--vocab-size: {vocab_size}, but the inputs have text for {most[1]} ids only"
    fewer = f", or at most {most[1]}" if int(most[1]) >= _SMALLEST_VOCABULARY else ""
    return f"{found}; need more text{fewer}"


def _run_trainer(lines: Iterator[str], vocab_size: int, kind: str, file: BinaryIO) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=file,
        vocab_size=vocab_size,
        model_type=kind,
        # Every text comes back as it was: no normalisation, all spaces, bytes for the rest.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        byte_fallback=True,
        user_defined_symbols=["\n", "\t"],
        allow_whitespace_only_pieces=True,
        split_digits=True,
        max_sentence_length=4 * _LONGEST_LINE,
        character_coverage=0.9998,
        required_chars="▁",  # a space, however rare: its three bytes would be read as that
        train_extremely_large_corpus=True,
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        eos_piece=EOD_PIECE,
        num_threads=_THREADS,
        minloglevel=2,
    )


def _replace(whole: Path, out: Path) -> None:
    """Put a finished folder in the place of an older one, which moves out of the way first."""
    if out.exists():
        out.rename(whole.with_name("old"))
    whole.rename(out)


def _check_replaceable(out: Path) -> None:
    free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    # A model's folder has the same files, and others.
    if not free and not (
        (out / MARKER).is_file() and all(path.name in SAVED_FILES for path in out.iterdir())
    ):
        raise UserError(f"--out {out}: exists and is no tokenizer folder; give another name")
