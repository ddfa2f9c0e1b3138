"""`megafrontier prepare`: text to a corpus, by many processes, the same bytes at any number."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import bin_path, idx_path, token_dtype
from megafrontier.data.corpus.writer import CorpusWriter, DocumentWriter, partial_path
from megafrontier.data.text.progress import Progress
from megafrontier.data.text.reader import BadText, read_texts
from megafrontier.data.text.sources import Reader, TextRange, find_sources, share
from megafrontier.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megafrontier.data.workers import Workers


@dataclass
class Encoded:
    """What became of one batch of pieces."""

    tokens: NDArray
    """All runs' ids, one after the other [tokens]."""
    sizes: NDArray[np.int32]
    """Tokens of each run [runs]; a run is a document, or a part of one."""
    ends: NDArray[np.bool_]
    """Whether a document ends with the run [runs]."""
    bad: NDArray[np.bool_]
    """Whether the run's text was bad [runs], and so its document is to be left out."""
    messages: list[str] = field(default_factory=list)
    """Why, for each bad one."""
    text_bytes: int = 0
    """UTF-8 bytes tokenised."""
    unknown: list[int] = field(default_factory=list)
    """Tokens of each run [runs] that stand for characters without a piece."""


@dataclass
class Summary:
    """What a corpus was made of."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad: int = 0
    """Documents left out for bad text: lines, rows and files."""
    unknown: int = 0
    """Tokens that stand for characters which the tokenizer has no piece for, …"""
    unknown_documents: int = 0
    """… and documents with one."""


_WORD = "a"


@dataclass(frozen=True)
class Job:
    """What a worker has to know."""

    tokenizer: Tokenizer
    key: str
    append_eod: bool
    skip_bad: bool

    def encode(self, pieces: Sequence[TextRange]) -> Encoded:
        """Tokenise a batch. Raises UserError at the first bad text, unless `skip_bad`."""
        texts = [(text, p) for p in pieces for text in read_texts(p, self.key)]
        messages = [str(text) for text, _ in texts if isinstance(text, BadText)]
        if messages and not self.skip_bad:
            raise UserError(f"{messages[0]}; --skip-bad leaves such texts out")
        good = [(text, piece.is_rest) for text, piece in texts if isinstance(text, str)]
        runs = iter(self._runs(good))
        ids: list[int] = []
        sizes, unknown = [], []
        for text, piece in texts:
            run = [] if isinstance(text, BadText) else next(runs)
            unknown.append(0 if self.tokenizer.unk is None else run.count(self.tokenizer.unk))
            has_more = piece.is_rest and not isinstance(text, BadText)
            if piece.last and (run or has_more) and self.append_eod:
                run = [*run, self.tokenizer.eod]
            ids += run
            sizes.append(len(run))
        return Encoded(
            np.array(ids, token_dtype(self.tokenizer.vocab_size)),
            np.array(sizes, np.int32),
            np.array([piece.last for _, piece in texts], bool),
            np.array([isinstance(text, BadText) for text, _ in texts], bool),
            messages,
            sum(len(text.encode()) for text, _ in good),
            unknown,
        )

    def _runs(self, texts: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """Ids of each text; one may be the rest of a document that was cut between two words.

        A rest is encoded behind a word, whose ids are then taken away: by itself it would begin as
        a text does, for some tokenizers with one more space.
        """
        runs = self.tokenizer.encode_batch([_WORD * is_rest + text for text, is_rest in texts])
        for index, (text, is_rest) in enumerate(texts):
            if is_rest:
                run, word = runs[index], self.tokenizer.encode(_WORD)
                is_apart = run[: len(word)] == word
                runs[index] = run[len(word) :] if is_apart else self.tokenizer.encode(text)
        return runs


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

    `workers` processes (default: one a core), `append_eod` ends each document with the tokenizer's
    eod, `skip_bad` leaves out and counts what is no text, `key` is the field or column that holds
    the text, `split` the split of a `datasets` dataset (default: train). `part` (number from 1, of
    how many) takes one share of the inputs' files; merged in order, the shares are what one process
    would write. Empty texts are left out. Raises UserError for inputs that cannot be read, bad
    text, and when no text is left; a share without any becomes a corpus of nothing, for `merge`
    alone.
    """
    cores = len(os.sched_getaffinity(0))
    workers = cores if workers is None else workers
    if not 1 <= workers <= 8 * cores:
        raise UserError(f"--workers: {workers}, need 1 to {8 * cores}, 8 for each core")
    job = Job(load_tokenizer(tokenizer), key, append_eod, skip_bad)
    job.tokenizer.encode(_WORD)  # raises where there is none
    reader = Reader(share(find_sources(inputs, split), *part), key)
    _refuse_inputs(reader, out)
    total = sum(source.file_bytes for source in reader.sources)
    with (
        Workers(workers, partial(_take, job)) as pool,
        CorpusWriter(out, _dtype(job)) as corpus,
        Progress(total) as bar,
    ):
        encoded = pool.results(_encode, reader.batches(), "try fewer --workers")
        summary = _write(encoded, corpus, bar, reader)
        if summary.tokens == 0 and part[1] == 1:
            raise UserError(f"{', '.join(inputs)}: no text in it, need a corpus with some")
        corpus.publish()
    return summary


class _Unknown:
    """Counts unknown tokens of documents, which may come in several runs, some of them bad."""

    def __init__(self) -> None:
        self._tokens, self._is_bad = 0, False

    def count(self, encoded: Encoded, summary: Summary) -> None:
        """Add the documents that end in a batch to the summary."""
        runs = zip(encoded.unknown, encoded.ends.tolist(), encoded.bad.tolist(), strict=True)
        for tokens, is_end, is_bad in runs:
            self._tokens += tokens
            self._is_bad |= is_bad
            if is_end:
                if self._tokens and not self._is_bad:
                    summary.unknown += self._tokens
                    summary.unknown_documents += 1
                self._tokens, self._is_bad = 0, False


def _refuse_inputs(reader: Reader, out: str | Path) -> None:
    made = {path.resolve() for path in (bin_path(out), idx_path(out))}
    made |= {partial_path(path) for path in made}
    for source in reader.sources:
        if source.kind != "dataset" and Path(source.name).resolve() in made:
            raise UserError(f"--out {out}: {source.name} is one of the inputs; give another prefix")


def _dtype(job: Job) -> np.dtype:
    return token_dtype(job.tokenizer.vocab_size)


def _write(
    results: Iterator[Encoded], corpus: CorpusWriter, bar: Progress, reader: Reader
) -> Summary:
    writer = DocumentWriter(corpus)
    summary, unknown = Summary(), _Unknown()
    for encoded in results:
        unknown.count(encoded, summary)
        writer.write_runs(encoded.tokens, encoded.sizes, encoded.ends, encoded.bad)
        summary.text_bytes += encoded.text_bytes
        summary.bad = writer.left_out
        for message in encoded.messages:
            bar.skipped(message)
        summary.tokens, summary.documents = writer.tokens, corpus.index.documents
        bar.update(reader.done_bytes, summary.text_bytes, summary.tokens)
    return summary


_job: Job
"""The worker's own, set when it starts: a tokenizer need not be picklable."""


def _take(job: Job) -> None:
    global _job
    _job = job


def _encode(pieces: list[TextRange]) -> Encoded:
    return _job.encode(pieces)
