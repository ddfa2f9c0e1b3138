"""`megafrontier prepare`: tokenise text with many processes; their number changes no byte."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from megafrontier.common.errors import UserError, need, print_error
from megafrontier.common.progress import Progress
from megafrontier.data.corpus.growing import AppendWriter, CorpusSources
from megafrontier.data.corpus.indexed import token_dtype
from megafrontier.data.corpus.writer import CorpusWriter, DocumentWriter
from megafrontier.data.text.chats import CHAT_COLUMNS, ChatEncoder, Template, shown_chat
from megafrontier.data.text.encode import WORD, EncodedBatch, Encoder
from megafrontier.data.text.reader import Reader, TextRange
from megafrontier.data.text.sources import Source, find_sources, select_part
from megafrontier.data.tokenizers.base import Tokenizer
from megafrontier.data.tokenizers.tokenizer import load_tokenizer
from megafrontier.data.workers import Workers

_SHOWN_BAD_TEXTS = 10
PROBE = "The 3 quick brown foxes jumped over 27 lazy dogs; naïve façade, 你好, здравствуй.\n\tend\n"
"""A text whose ids tell tokenizers apart."""


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
    append: bool = False,
) -> Summary:
    """Tokenise every text of the inputs, in order, into OUT.bin and OUT.idx.

    `workers` is the number of processes (default: one per core). `append_eod` ends each document
    with the tokenizer's eod. `skip_bad` leaves out and counts bad texts. `key` is the field or
    column that holds the text. `split` is the split of a dataset (default: train). `part` (number
    from 1, of how many) takes a part of the input files; the parts merged in order are what one
    process would write. Empty texts are left out. With `chat` the inputs hold chats instead of
    texts: this template makes text of them, and OUT.mask has the tokens of the assistant's turns.
    With `append` the files that a corpus does not have go behind it, or begin one (Note [Growing in
    place]).

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
    if append:
        need(part[1] == 1, "--part", f"{part[0]}/{part[1]}", "need no parts with --append")
        return _append(sources, encoder, chat, out, workers)
    with (
        Workers(workers, encoder.encode) as pool,
        CorpusWriter(out, _dtype(encoder), chat is not None) as corpus,
    ):
        summary = _prepare(select_part(sources, *part), encoder, chat, corpus, pool)
        if summary.tokens == 0 and part[1] == 1:
            raise UserError(f"{', '.join(inputs)}: no text in it, need a corpus with some")
        corpus.publish()
    return summary


def _dtype(encoder: Encoder) -> np.dtype:
    return token_dtype(encoder.tokenizer.vocab_size)


def _append(
    found: Sequence[Source],
    encoder: Encoder,
    chat: Template | None,
    out: str | Path,
    workers: int,
) -> Summary:
    """Add the files that the corpus does not have. Without any, nothing is written."""
    for source in found:
        need(source.table is None, "--append", source.name, "need files, not a dataset")
    probe = np.array(encoder.tokenizer.encode(PROBE), "<i8").tobytes()
    options = {"tokenizer": f"{crc32(probe):08x}", "append_eod": encoder.append_eod}
    options |= {"json_key": encoder.key, "chat": chat}
    sources, documents = CorpusSources.open(out, options)
    files = [(source.name, source.file_bytes) for source in found]
    chosen = list(sources.new(files))
    if not chosen and documents is not None:
        return Summary()
    has_mask = chat is not None
    is_new = documents is None
    make = partial(CorpusWriter, out, _dtype(encoder)) if is_new else partial(AppendWriter, out)
    with Workers(workers, encoder.encode) as pool, make(has_mask=has_mask) as corpus:
        summary = _prepare([found[at] for at in chosen], encoder, chat, corpus, pool)
        need(summary.tokens > 0 or not is_new, str(out), "no text", "need a corpus with some")
        text = sources.encoded(corpus.index.documents, [files[at] for at in chosen])
        corpus.publish(text)
    return summary


def _prepare(
    sources: Sequence[Source],
    encoder: Encoder,
    chat: Template | None,
    corpus: CorpusWriter,
    pool: Workers[Sequence[TextRange], EncodedBatch],
) -> Summary:
    """Tokenise all texts of the sources into the corpus."""
    reader = Reader(sources, encoder.key, () if chat is None else CHAT_COLUMNS)
    batches = pool.map(reader.batches(), "try fewer --workers")
    with Progress("prepare") as show:
        return _write(batches, corpus, reader, show, encoder.tokenizer)


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
            show.note(f"skipped {message}")
        messages += len(batch.messages)
        read = f"{reader.done_bytes / 1e6:.1f} of {total / 1e6:.1f} MB read"
        show(f"{read}, {writer.tokens:,} tokens", reader.done_bytes / total if total else None)
    if messages > _SHOWN_BAD_TEXTS:
        print_error(f"… and {messages - _SHOWN_BAD_TEXTS} more skipped")
    made.documents = corpus.index.documents - corpus.documents_before
    made.tokens, made.bad = writer.tokens - corpus.tokens_before, writer.left_out
    return made


def _shown_first(batch: EncodedBatch, mask: NDArray[np.uint8], tokenizer: Tokenizer) -> str:
    """The first chat of a batch that is not empty; "" without one."""
    count = next((int(size) for size in batch.sizes if size), 0)
    return shown_chat(tokenizer, batch.tokens[:count].tolist(), mask[:count].tolist())
