"""`megafrontier prepare`: tokenise text with many processes; their number changes no byte."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafrontier.common.errors import UserError, print_error
from megafrontier.data.corpus.indexed import token_dtype
from megafrontier.data.corpus.writer import CorpusWriter, DocumentWriter
from megafrontier.data.text.reader import BadText, Reader, TextRange, read_texts, refuse_bad
from megafrontier.data.text.sources import find_sources, select_part
from megafrontier.data.tokenizers.base import Tokenizer
from megafrontier.data.tokenizers.tokenizer import load_tokenizer
from megafrontier.data.workers import Workers

_PROGRESS_SECONDS = 10.0
_SHOWN_BAD_TEXTS = 10


@dataclass
class Summary:
    """What a corpus was made of."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad: int = 0
    """Documents left out because of a bad text, line or row."""
    unknown: int = 0
    """Tokens for characters that the tokenizer has no piece for."""


@dataclass
class EncodedBatch:
    """The tokens of a batch. A chunk is a document, or one part of a long document."""

    tokens: NDArray
    """Ids of all chunks [tokens]."""
    sizes: NDArray[np.int32]
    """Tokens of each chunk [chunks]."""
    ends: NDArray[np.bool_]
    """Whether the document ends with the chunk [chunks]."""
    bad: NDArray[np.bool_]
    """Whether the text of the chunk is bad, so that its document is left out [chunks]."""
    unknown: int
    messages: list[str]
    """What is wrong with each bad text."""
    text_bytes: int
    """UTF-8 bytes of all texts."""


_WORD = "a"


@dataclass(frozen=True)
class Encoder:
    """Tokenises batches in a worker."""

    tokenizer: Tokenizer
    key: str
    append_eod: bool
    skip_bad: bool

    def encode(self, ranges: Sequence[TextRange]) -> EncodedBatch:
        """Tokenise a batch. Raises UserError at the first bad text, unless `skip_bad`."""
        texts = [(text, r) for r in ranges for text in read_texts(r, self.key)]
        bad = [text for text, _ in texts if isinstance(text, BadText)]
        if bad and not self.skip_bad:
            raise refuse_bad(bad[0])
        good = [("" if isinstance(text, BadText) else text, r) for text, r in texts]
        chunks = self._encode([(text, r.is_continuation) for text, r in good])
        unknown = sum(chunk.count(self.tokenizer.unk) for chunk in chunks)
        for chunk, (_, r) in zip(chunks, good, strict=True):
            # A continuation may have no tokens; the document has some from earlier ranges.
            if self.append_eod and r.is_last and (chunk or r.is_continuation):
                chunk.append(self.tokenizer.eod)
        return EncodedBatch(
            np.array(list(chain.from_iterable(chunks)), token_dtype(self.tokenizer.vocab_size)),
            np.array([len(chunk) for chunk in chunks], np.int32),
            np.array([r.is_last for _, r in texts], bool),
            np.array([isinstance(text, BadText) for text, _ in texts], bool),
            unknown,
            [text.message for text in bad],
            sum(len(text.encode()) for text, _ in good),
        )

    def _encode(self, texts: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """Ids of each text, given whether it continues a document that was split between words."""
        # Many tokenizers put a space before a text. A continuation is therefore encoded after a
        # word, and the word's ids are removed.
        chunks = self.tokenizer.encode_batch([_WORD * later + text for text, later in texts])
        for index, (text, is_continuation) in enumerate(texts):
            if is_continuation:
                chunk, word = chunks[index], self.tokenizer.encode(_WORD)
                is_apart = chunk[: len(word)] == word
                chunks[index] = chunk[len(word) :] if is_apart else self.tokenizer.encode(text)
        return chunks


def prepare(
    inputs: Sequence[str],
    tokenizer: str,
    out: str | Path,
    workers: int | None = None,
    append_eod: bool = False,
    skip_bad: bool = False,
    key: str = "text",
    split: str | None = None,
    part: tuple[int, int] = (1, 1),
) -> Summary:
    """Tokenise every text of the inputs, in order, into OUT.bin and OUT.idx.

    `workers` is the number of processes (default: one per core). `append_eod` ends each document
    with the tokenizer's eod. `skip_bad` leaves out and counts bad texts. `key` is the field or
    column that holds the text. `split` is the split of a dataset (default: train). `part` (number
    from 1, of how many) takes a part of the input files; the parts merged in order are what one
    process would write. Empty texts are left out. Raises UserError for inputs that cannot be read,
    for bad text, and if no text is left. A part without text becomes an empty corpus, which only
    `merge` accepts.
    """
    cores = len(os.sched_getaffinity(0))
    workers = cores if workers is None else workers
    if not 1 <= workers <= 8 * cores:
        raise UserError(f"--workers: {workers}, need 1 to {8 * cores}, 8 for each core")
    encoder = Encoder(load_tokenizer(tokenizer), key, append_eod, skip_bad)
    encoder.tokenizer.encode(_WORD)  # raises UserError for the tokenizer `none`
    reader = Reader(select_part(find_sources(inputs, split), *part), key)
    with (
        Workers(workers, encoder.encode) as pool,
        CorpusWriter(out, token_dtype(encoder.tokenizer.vocab_size)) as corpus,
    ):
        summary = _write(pool.map(reader.batches(), "try fewer --workers"), corpus, reader)
        if summary.tokens == 0 and part[1] == 1:
            raise UserError(f"{', '.join(inputs)}: no text in it, need a corpus with some")
        corpus.publish()
    return summary


def _write(batches: Iterator[EncodedBatch], corpus: CorpusWriter, reader: Reader) -> Summary:
    """Write the batches. Prints progress every few seconds, and what is wrong with bad texts, of
    which it only counts those after the first few."""
    writer, made, messages = DocumentWriter(corpus), Summary(), 0
    total, last = sum(source.file_bytes for source in reader.sources), time.monotonic()
    for batch in batches:
        writer.write_chunks(batch.tokens, batch.sizes, batch.ends, batch.bad)
        made.text_bytes += batch.text_bytes
        made.unknown += batch.unknown
        for message in batch.messages[: max(0, _SHOWN_BAD_TEXTS - messages)]:
            print_error(f"skipped {message}")
        messages += len(batch.messages)
        if time.monotonic() - last >= _PROGRESS_SECONDS:
            last, read = time.monotonic(), f"{reader.done_bytes / 1e6:.1f} of {total / 1e6:.1f} MB"
            print_error(f"{read} read, {writer.tokens:,} tokens")
    if messages > _SHOWN_BAD_TEXTS:
        print_error(f"… and {messages - _SHOWN_BAD_TEXTS} more skipped")
    made.documents, made.tokens, made.bad = corpus.index.documents, writer.tokens, writer.left_out
    return made
