"""`megafrontier prepare`: tokenise text with many processes; their number changes no byte."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafrontier.common.errors import UserError, print_error
from megafrontier.common.progress import Progress
from megafrontier.data.corpus.indexed import token_dtype
from megafrontier.data.corpus.writer import CorpusWriter, DocumentWriter
from megafrontier.data.text.chats import CHAT_COLUMNS, ChatEncoder, Template, shown_chat
from megafrontier.data.text.encode import WORD, EncodedBatch, Encoder
from megafrontier.data.text.reader import Reader
from megafrontier.data.text.sources import Source, find_sources, select_part
from megafrontier.data.tokenizers.base import Tokenizer
from megafrontier.data.tokenizers.tokenizer import load_tokenizer
from megafrontier.data.workers import Workers

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
    trained: int = 0
    """Of chats: tokens that are trained on."""
    sample: str = ""
    """Of chats: the first one, as `shown_chat` shows it."""


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
    chat: Template | None = None,
) -> Summary:
    """Tokenise every text of the inputs, in order, into OUT.bin and OUT.idx.

    `workers` is the number of processes (default: one per core). `append_eod` ends each document
    with the tokenizer's eod. `skip_bad` leaves out and counts bad texts. `key` is the field or
    column that holds the text. `split` is the split of a dataset (default: train). `part` (number
    from 1, of how many) takes a part of the input files; the parts merged in order are what one
    process would write. Empty texts are left out. With `chat` the inputs hold chats instead of
    texts: this template makes text of them, and OUT.mask has the tokens of the assistant's turns.

    Raises UserError for inputs that cannot be read, for bad text, and if no text is left. A part
    without text becomes an empty corpus, which only `merge` accepts.
    """
    cores = len(os.sched_getaffinity(0))
    workers = cores if workers is None else workers
    if not 1 <= workers <= 8 * cores:
        raise UserError(f"--workers: {workers}, need 1 to {8 * cores}, 8 for each core")
    args = load_tokenizer(tokenizer), key, append_eod, skip_bad
    encoder = Encoder(*args) if chat is None else ChatEncoder(*args, chat)
    encoder.tokenizer.encode(WORD)  # raises UserError for the tokenizer `none`
    sources = find_sources(inputs, split)
    if chat is not None:
        _refuse_plain_text(sources)
    also = () if chat is None else CHAT_COLUMNS
    reader = Reader(select_part(sources, *part), key, also)
    with (
        Workers(workers, encoder.encode) as pool,
        CorpusWriter(out, token_dtype(encoder.tokenizer.vocab_size), chat is not None) as corpus,
    ):
        batches = pool.map(reader.batches(), "try fewer --workers")
        with Progress("prepare") as show:
            summary = _write(batches, corpus, reader, show, encoder.tokenizer)
        if summary.tokens == 0 and part[1] == 1:
            raise UserError(f"{', '.join(inputs)}: no text in it, need a corpus with some")
        corpus.publish()
    return summary


def _refuse_plain_text(sources: Sequence[Source]) -> None:
    for source in sources:
        if source.kind == "text":
            raise UserError(f"input {source.name!r}: plain text, need chats in .jsonl or .parquet")


def _write(
    batches: Iterator[EncodedBatch],
    corpus: CorpusWriter,
    reader: Reader,
    show: Progress,
    tokenizer: Tokenizer,
) -> Summary:
    """Write the batches. Prints what is wrong with bad texts, of which it only counts those after
    the first few."""
    writer, made, messages = DocumentWriter(corpus), Summary(), 0
    total = sum(source.file_bytes for source in reader.sources)
    for batch in batches:
        writer.write_chunks(batch.tokens, batch.sizes, batch.ends, batch.bad, batch.mask)
        made.text_bytes += batch.text_bytes
        made.unknown += batch.unknown
        if batch.mask is not None:
            made.trained += int(batch.mask.sum())
            made.sample = made.sample or _shown_first(batch, batch.mask, tokenizer)
        for message in batch.messages[: max(0, _SHOWN_BAD_TEXTS - messages)]:
            show.clear()
            print_error(f"skipped {message}")
        messages += len(batch.messages)
        read = f"{reader.done_bytes / 1e6:.1f} of {total / 1e6:.1f} MB read"
        show(f"{read}, {writer.tokens:,} tokens", reader.done_bytes / total if total else None)
    if messages > _SHOWN_BAD_TEXTS:
        print_error(f"… and {messages - _SHOWN_BAD_TEXTS} more skipped")
    made.documents, made.tokens, made.bad = corpus.index.documents, writer.tokens, writer.left_out
    return made


def _shown_first(batch: EncodedBatch, mask: NDArray[np.uint8], tokenizer: Tokenizer) -> str:
    """The first chat of a batch that is not empty; "" without one."""
    count = next((int(size) for size in batch.sizes if size), 0)
    return shown_chat(tokenizer, batch.tokens[:count].tolist(), mask[:count].tolist())
