"""Trains SentencePiece tokenizers that preserve every character of every text."""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from pathlib import Path
from random import Random
from typing import BinaryIO, Literal

from megafrontier.common.errors import UserError
from megafrontier.common.files import sync_file, work_folder
from megafrontier.common.progress import Progress
from megafrontier.data.corpus.writer import FULL_ERRORS
from megafrontier.data.text.reader import BadText, Reader, refuse_bad
from megafrontier.data.text.sources import find_sources
from megafrontier.data.tokenizers.tokenizer import SentencePieceTokenizer
from megafrontier.data.workers import Workers

EOD_PIECE = "<|endoftext|>"

# 256 bytes, four special pieces, the space and one character. The text sets closer bounds.
_MIN_VOCAB_SIZE = 262
_MAX_VOCAB_SIZE = 2**24  # unigram does not return for sizes near 2³¹
_MAX_LINE = 4096  # characters; SentencePiece ignores sentences longer than its limit
_THREADS = 16  # fixed, because the sums of unigram depend on how the work is divided


def _sample(texts: Iterator[str], max_bytes: float) -> list[str]:
    """Return texts of at most `max_bytes` (or one longer text), in order, all equally likely."""
    # The total is unknown until the end, because inputs may be packed. So every text gets a random
    # number, and the texts with the smallest numbers are dropped while there are too many bytes.
    random = Random(0)
    kept: list[tuple[float, int, str]] = []
    size = 0
    for number, text in enumerate(texts):
        heappush(kept, (random.random(), number, text))
        size += len(text.encode())
        while size > max_bytes and len(kept) > 1:
            size -= len(heappop(kept)[2].encode())
    return [text for _, text in sorted((number, text) for _, number, text in kept)]


def train_tokenizer(
    inputs: Sequence[str],
    vocab_size: int,
    out: str | Path,
    kind: Literal["bpe", "unigram"] = "bpe",
    max_megabytes: float = 500,
    key: str = "text",
    skip_bad: bool = False,
) -> tuple[int, int]:
    """Train on the inputs (see `find_sources`) and write the folder `out`, complete or not at all.

    A random sample of at most `max_megabytes` of text is used. The trainer needs about ten times
    that in memory. The same inputs give the same bytes. Returns the UTF-8 bytes of the sample, and
    the number of bad texts skipped. Raises UserError for bad inputs, too little text for the
    vocabulary, a folder that is not empty, or a full disk.
    """
    if not _MIN_VOCAB_SIZE <= vocab_size <= _MAX_VOCAB_SIZE:
        raise UserError(f"--vocab-size: {vocab_size}, need {_MIN_VOCAB_SIZE} to {_MAX_VOCAB_SIZE}")
    if not max_megabytes > 0:  # also refuses nan
        raise UserError(f"--max-megabytes: {max_megabytes}, need more than 0")
    target = Path(out).resolve()  # because `.` has no name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--out {out}: exists and is not an empty folder; give another name")
    try:
        with work_folder(target) as folder:
            texts, bad = read_sample(inputs, max_megabytes, key, skip_bad)
            size = sum(len(text.encode()) for text in texts)
            _train_apart(partial(_train, texts, vocab_size, kind), size, folder / "trained.model")
            SentencePieceTokenizer(folder / "trained.model").save(folder / "whole")
            (folder / "whole").rename(target)
    except OSError as error:
        if error.errno not in FULL_ERRORS:
            raise
        raise UserError(f"--out {out}: {error.strerror}") from error
    return size, bad


def _train_apart(train: Callable[[Path], None], size: int, path: Path) -> None:
    """Train in a process of its own, because SentencePiece does not react to Ctrl-C."""
    started = time.monotonic()
    with Workers(1, train) as pool, Progress("tokenizer") as show:

        def say() -> None:
            show(f"training on {size / 1e6:.1f} MB of text for {time.monotonic() - started:.0f} s")

        deque(pool.map(iter([path]), "try a smaller --max-megabytes", say), maxlen=0)


def read_sample(
    inputs: Sequence[str], max_megabytes: float, key: str = "text", skip_bad: bool = False
) -> tuple[list[str], int]:
    """Return a random sample of the texts, of limited size, and the number of bad texts skipped.

    Raises UserError for an input that cannot be read, and for bad text unless `skip_bad`.
    """
    bad = 0
    reader = Reader(find_sources(inputs), key)
    total = sum(source.file_bytes for source in reader.sources)

    def good_texts() -> Iterator[str]:
        nonlocal bad
        for text in reader.texts():
            done = reader.done_bytes / total if total else None
            show(f"{reader.done_bytes / 1e6:.1f} of {total / 1e6:.1f} MB read", done)
            if not isinstance(text, BadText):
                yield text
            elif skip_bad:
                bad += 1
            else:
                raise refuse_bad(text)

    with Progress("tokenizer") as show:
        return _sample(good_texts(), max_megabytes * 1e6), bad


def _lines(texts: Sequence[str]) -> Iterator[str]:
    for line in chain.from_iterable(map(str.splitlines, texts)):
        yield from (line[i : i + _MAX_LINE] for i in range(0, len(line), _MAX_LINE))


def _train(texts: Sequence[str], vocab_size: int, kind: str, path: Path) -> None:
    if not any(_lines(texts)):
        raise UserError("tokenizer: the inputs hold no text, need some")
    with path.open("wb") as file:
        try:
            _run_trainer(_lines(texts), vocab_size, kind, file)
        except RuntimeError as error:
            raise UserError(_refusal(str(error), vocab_size)) from error
        sync_file(file)


def _refusal(error: str, vocab_size: int) -> str:
    """The line for a size outside the bounds that SentencePiece names. Both can be reached."""
    most, least = re.search(r"<= (\d+)", error), re.search(r"required_chars\. \d+ vs (\d+)", error)
    if most:
        return f"--vocab-size: {vocab_size}, need at most {most[1]} for this text, or more text"
    if least:
        return f"--vocab-size: {vocab_size}, need at least {least[1]} for this text's characters"
    return f"--vocab-size: {vocab_size}: SentencePiece says: {error.rsplit('] ', 1)[-1].strip()}"


def _run_trainer(lines: Iterator[str], vocab_size: int, kind: str, file: BinaryIO) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=file,
        vocab_size=vocab_size,
        model_type=kind,
        # Decoding restores every text: no normalisation, all spaces kept, bytes for the rest.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        byte_fallback=True,
        user_defined_symbols=["\n", "\t"],
        allow_whitespace_only_pieces=True,
        split_digits=True,
        max_sentence_length=4 * _MAX_LINE,
        character_coverage=0.9998,
        required_chars="▁",  # the space, even if rare: its bytes would be decoded as U+2581
        train_extremely_large_corpus=True,
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        eos_piece=EOD_PIECE,
        num_threads=_THREADS,
        minloglevel=2,
    )
