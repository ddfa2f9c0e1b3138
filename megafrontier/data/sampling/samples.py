"""Training samples: sample n of (seed, corpora) as tensors, at any time, in any order, on any rank.

`order.py` says which window of which corpus sample n is; here the windows are read. A window is
S + 1 consecutive tokens, of which the last is only a target; windows overlap in that one token.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from megafrontier.common.errors import UserError
from megafrontier.config import CorpusConfig, DataConfig
from megafrontier.data.corpus.indexed import IndexedDataset, bin_path
from megafrontier.data.sampling.order import Blend, make_key, permute
from megafrontier.model.loss import IGNORE_INDEX

LOOKED_AT = 8
"""Windows of a corpus that stand for all of it, however long: each may be a read of its own."""


@dataclass
class Batch:
    """Samples [b] of S tokens [s]."""

    tokens: torch.Tensor
    """Input ids [b, s], int64."""
    targets: torch.Tensor
    """The id after each token [b, s], int64; IGNORE_INDEX where it belongs to another document."""
    documents: torch.Tensor | None
    """With a document mask: where each begins in the b · s tokens, and b · s, int32 [n + 1]. Every
    window begins one."""
    first_sample: int
    """Global number of the first sample."""

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory, from which a device copies by itself."""
        return self._map(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        """The same on `device`; from pinned memory without waiting for the copy."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        return Batch(
            move(self.tokens),
            move(self.targets),
            None if self.documents is None else move(self.documents),
            self.first_sample,
        )


@dataclass
class Part:
    """The windows of one corpus that belong to training, or to validation."""

    corpus: IndexedDataset
    first_window: int
    windows: int


class Samples:
    """The endless row of samples of one part; see `open_samples`."""

    def __init__(
        self,
        parts: Sequence[Part],
        weights: Sequence[float],
        sequence_length: int,
        vocab_size: int,
        seed: int | None,
        document_mask: bool,
    ) -> None:
        """`seed` None keeps the windows in the order of the corpus, epoch after epoch."""
        self._parts = parts
        self._blend = Blend(weights)
        self._length = sequence_length
        self._vocab_size = vocab_size
        self._seed = seed
        self._document_mask = document_mask

    @property
    def windows(self) -> list[int]:
        """Windows in one epoch of each corpus."""
        return [part.windows for part in self._parts]

    @cached_property
    def contents(self) -> list[str]:
        """CRC-32 of the ids in LOOKED_AT windows of each corpus, from its first to its last: the
        same for every copy of it, wherever that lies, and another for one that was made anew of
        other text or with another tokenizer."""
        return [self._content(part) for part in self._parts]

    def _content(self, part: Part) -> str:
        checksum = 0
        for place in range(LOOKED_AT):
            window = part.first_window + place * (part.windows - 1) // (LOOKED_AT - 1)
            checksum = crc32(self._ids(part.corpus, window).astype("<i8").tobytes(), checksum)
        return f"{checksum:08x}"

    def read_again(self, count: int) -> Iterator[tuple[str, int, int]]:
        """(corpus, samples, windows) of each of which the first `count` samples take more than it
        has."""
        for part, samples in zip(self._parts, self._blend.counts(count), strict=True):
            if samples > part.windows:
                yield part.corpus.prefix, samples, part.windows

    def locate(self, first: int, count: int) -> list[tuple[int, int]]:
        """(corpus, window of its file) of samples first … first + count - 1."""
        numbers: dict[int, list[int]] = defaultdict(list)
        rows: dict[int, list[int]] = defaultdict(list)
        for row in range(count):
            corpus, number = self._blend.locate(first + row)
            numbers[corpus].append(number)
            rows[corpus].append(row)
        located = [(0, 0)] * count
        for corpus in numbers:
            windows = self._windows_of(corpus, np.array(numbers[corpus], np.uint64))
            for row, window in zip(rows[corpus], windows.tolist(), strict=True):
                located[row] = (corpus, window)
        return located

    def batch(self, first: int, count: int) -> Batch:
        """Samples first … first + count - 1, as tensors [count, s].

        Raises UserError for an id that the vocabulary does not have.
        """
        located = self.locate(first, count)
        read = np.stack([self._read(corpus, window) for corpus, window in located])
        targets = read[:, 1:].copy()
        documents = None
        if self._document_mask:
            numbers = np.stack([self._documents(corpus, window) for corpus, window in located])
            targets[numbers[:, 1:] != numbers[:, :-1]] = IGNORE_INDEX
            documents = document_starts(torch.from_numpy(numbers[:, :-1]))
        tokens = torch.from_numpy(read[:, :-1].copy())
        return Batch(tokens, torch.from_numpy(targets), documents, first)

    def _windows_of(self, corpus: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        part = self._parts[corpus]
        epoch, place = np.divmod(numbers, np.uint64(part.windows))
        if self._seed is not None:
            place = permute(place, part.windows, make_key(self._seed, corpus, epoch))
        return place + np.uint64(part.first_window)

    def _read(self, corpus: int, window: int) -> NDArray[np.int64]:
        dataset, start = self._parts[corpus].corpus, window * self._length
        tokens = self._ids(dataset, window).astype(np.int64)
        wrong = (tokens < 0) | (tokens >= self._vocab_size)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise UserError(
                f"{bin_path(dataset.prefix)}: byte {(start + at) * dataset.dtype.itemsize}: token "
                f"id {tokens[at]}, need 0 to {self._vocab_size - 1}, the ids of `tokenizer` that "
                "the model has; was it prepared with another one?"
            )
        return tokens

    def _ids(self, dataset: IndexedDataset, window: int) -> NDArray:
        """A window as it is on the disk [s + 1]."""
        start = window * self._length
        return dataset.tokens[start : start + self._length + 1]

    def _documents(self, corpus: int, window: int) -> NDArray[np.int32]:
        """Number of each token's document in the window [s + 1]."""
        start = window * self._length
        starts = self._parts[corpus].corpus.document_starts(start + 1, start + self._length + 1)
        begins = np.zeros(self._length + 1, np.int32)
        begins[starts - start] = 1
        return np.cumsum(begins, dtype=np.int32)


def document_starts(numbers: torch.Tensor) -> torch.Tensor:
    """Where documents begin in the b · s tokens, and b · s, int32 [n + 1], given the number
    [b, s] of each token's; each row begins one."""
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([numbers.numel()])]).int()


def open_samples(
    data: DataConfig,
    sequence_length: int,
    seed: int,
    vocab_size: int,
    part: Literal["train", "valid"],
) -> Samples | None:
    """The samples of `data` to train on, shuffled by `seed`, or to validate on, in file order.

    With `data.valid` each corpus is used whole for its purpose; without, `data.split` cuts each
    training corpus. None when nothing is kept for validation. Raises UserError for a corpus that
    cannot be read or is too short for one window.
    """
    corpora = data.valid if part == "valid" and data.valid else data.train
    if part == "train":
        refuse_no_corpus(data)
    if not corpora:
        return None
    split = [Fraction(1), Fraction(0)] if data.valid else [Fraction(str(x)) for x in data.split]
    parts = [_open_part(c, sequence_length, split, part, bool(data.valid)) for c in corpora]
    kept = [(p, c.weight) for p, c in zip(parts, corpora, strict=True) if p.windows]
    if not kept:
        return None
    weights = [weight for _, weight in kept]
    order = seed if part == "train" else None
    opened = [p for p, _ in kept]
    return Samples(opened, weights, sequence_length, vocab_size, order, data.document_mask)


def refuse_no_corpus(data: DataConfig) -> None:
    """Raises UserError where there is nothing to train on."""
    if not data.train:
        raise UserError("data.train: empty, need at least one corpus, as {path: PREFIX}")


def _open_part(
    config: CorpusConfig, length: int, split: Sequence[Fraction], part: str, whole: bool
) -> Part:
    corpus = IndexedDataset(config.path)
    windows = (len(corpus.tokens) - 1) // length
    if windows < 1:
        raise UserError(
            f"{bin_path(config.path)}: {len(corpus.tokens)} tokens, need at least {length + 1} "
            "for one sequence (model.sequence_length + 1)"
        )
    training = windows if whole else int(windows * split[0] / sum(split))
    if part == "valid" and not whole:
        return Part(corpus, training, windows - training)
    if training < 1:
        raise UserError(
            f"{bin_path(config.path)}: {windows} sequences, data.split {[float(x) for x in split]} "
            "leaves none to train on; need a longer corpus, data.valid, or data.split=[1,0]"
        )
    return Part(corpus, 0, training)
