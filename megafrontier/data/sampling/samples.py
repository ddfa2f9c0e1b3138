"""Training samples as tensors: sample n is a function of the seed and the corpora.

`order.py` maps sample n to a window of a corpus; this module reads the window. A window is S + 1
consecutive tokens. Its last token is only a target, so consecutive windows share one token. With
`data.packing` a window is a sequence of whole documents instead, see `packing.py`.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from megafrontier.common.errors import UserError, need
from megafrontier.config import DataConfig, refuse_no_corpus
from megafrontier.data.corpus.indexed import IndexedDataset, bin_path
from megafrontier.data.sampling.order import Blend, Curriculum, make_blend, make_key, permute
from megafrontier.data.sampling.packing import PackedRange, Piece
from megafrontier.model.loss import IGNORE_INDEX

OpenCorpora = dict[str, IndexedDataset]
"""By path. Opening a corpus takes three metadata operations of the file system, which thousands of
ranks do at the same time."""
FINGERPRINT_WINDOWS = 8
"""Windows of a corpus that its fingerprint covers. Each may cost one read from disk."""


@dataclass
class Batch:
    """b samples of s tokens."""

    tokens: torch.Tensor
    """Input ids [b, s], int64."""
    targets: torch.Tensor
    """The next id of each token [b, s], int64; IGNORE_INDEX if that is in another document, with a
    document mask, or if the corpus has a mask in which it is no target."""
    documents: torch.Tensor | None
    """With a document mask: the start of each of n documents in the b · s tokens, then b · s, int32
    [n + 1], on the host. Every window starts a document."""
    first_sample: int
    """Global number of the first sample."""
    padding: torch.Tensor | None = None
    """With packing: which tokens [b, s] only fill a sample, bool."""
    corpora: torch.Tensor | None = None
    """The number of each sample's corpus [b], int64."""

    def pin_memory(self) -> "Batch":
        """Return a copy in page-locked memory, for asynchronous copies to a device."""
        documents = None if self.documents is None else self.documents.pin_memory()
        padding, corpora = (
            None if tensor is None else tensor.pin_memory()
            for tensor in (self.padding, self.corpora)
        )
        pinned = self.tokens.pin_memory(), self.targets.pin_memory(), documents
        return Batch(*pinned, self.first_sample, padding, corpora)

    def to(self, device: torch.device) -> "Batch":
        """Return a copy with all but the documents on `device`. From pinned memory, the host does
        not wait for the copy."""
        tokens, targets = (t.to(device, non_blocking=True) for t in (self.tokens, self.targets))
        padding, corpora = (
            None if tensor is None else tensor.to(device, non_blocking=True)
            for tensor in (self.padding, self.corpora)
        )
        return replace(self, tokens=tokens, targets=targets, padding=padding, corpora=corpora)


@dataclass
class WindowRange:
    """The consecutive windows of one corpus that are used for training, or for validation."""

    corpus: IndexedDataset
    first_window: int
    windows: int
    length: int

    def pieces(self, window: int) -> list[Piece]:
        """The whole window."""
        return [Piece(window * self.length, self.length)]


@dataclass
class Samples:
    """The endless sequence of samples for training, or for validation; see `open_samples`."""

    ranges: Sequence[WindowRange | PackedRange]
    blend: Blend | Curriculum
    sequence_length: int
    vocab_size: int
    seed: int | None
    """None reads the windows in the order of the corpus in every epoch."""
    document_mask: bool

    @property
    def windows(self) -> list[int]:
        """The number of windows in one epoch of each corpus."""
        return [used.windows for used in self.ranges]

    @cached_property
    def fingerprints(self) -> list[str]:
        """CRC-32 of the ids, and of the mask, in FINGERPRINT_WINDOWS windows of each corpus, evenly
        spaced.

        Copies of a corpus have equal fingerprints. A corpus made of other text, or with another
        tokenizer, has a different one.
        """
        return [self._fingerprint(used) for used in self.ranges]

    def _fingerprint(self, used: WindowRange | PackedRange) -> str:
        checksum = 0
        for i in range(FINGERPRINT_WINDOWS):
            window = used.first_window + i * (used.windows - 1) // (FINGERPRINT_WINDOWS - 1)
            for piece in used.pieces(window):
                checksum = crc32(_ids(used.corpus, piece).astype("<i8").tobytes(), checksum)
                mask = _mask(used.corpus, piece)
                checksum = checksum if mask is None else crc32(mask.tobytes(), checksum)
        return f"{checksum:08x}"

    def locate(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return (corpus index, window in its file) of samples first … first + count - 1."""
        located = np.array([self.blend.locate(first + row) for row in range(count)])
        for corpus in np.unique(located[:, 0]).tolist():
            mine = located[:, 0] == corpus
            located[mine, 1] = self._windows_of(corpus, located[mine, 1].astype(np.uint64))
        return [(corpus, window) for corpus, window in located.tolist()]

    def batch(self, first: int, count: int) -> Batch:
        """Read samples first … first + count - 1 as tensors [count, s].

        Raises UserError for an id that is not in the vocabulary.
        """
        located = self.locate(first, count)
        rows = [self._row(corpus, window) for corpus, window in located]
        parts = zip(*rows, strict=True)
        tokens, targets, numbers = (torch.from_numpy(np.stack(part)) for part in parts)
        documents = document_starts(numbers) if self.document_mask else None
        is_packed = any(isinstance(used, PackedRange) for used in self.ranges)
        padding = numbers == self.sequence_length if is_packed else None
        corpora = torch.tensor([corpus for corpus, _ in located])
        return Batch(tokens, targets, documents, first, padding, corpora)

    def padding(self, first: int, count: int) -> Batch:
        """A batch [count, s] of padding alone, without targets. `first`: its `first_sample`."""
        tokens = torch.zeros(count, self.sequence_length, dtype=torch.int64)
        documents = document_starts(tokens) if self.document_mask else None
        targets, padding = torch.full_like(tokens, IGNORE_INDEX), torch.ones_like(tokens).bool()
        corpora = torch.zeros(count, dtype=torch.int64)
        return Batch(tokens, targets, documents, first, padding, corpora)

    def _windows_of(self, corpus: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        used = self.ranges[corpus]
        epoch, index = np.divmod(numbers, np.uint64(used.windows))
        if self.seed is not None:
            index = permute(index, used.windows, make_key(self.seed, corpus, epoch))
        return index + np.uint64(used.first_window)

    def _row(self, corpus: int, window: int) -> tuple[NDArray, NDArray, NDArray]:
        """Tokens, targets, and the number of each token's document [s], which increases. What is
        left of the window is padding: tokens 0 without targets, in a document of their own."""
        used, length = self.ranges[corpus], self.sequence_length
        tokens, targets = np.zeros(length, np.int64), np.full(length, IGNORE_INDEX, np.int64)
        numbers = np.full(length, length, np.int32)
        at = 0
        for piece in used.pieces(window):
            part = slice(at, at + piece.pairs)
            ids = self._read(used.corpus, piece)
            tokens[part], targets[part] = ids[:-1], ids[1:]
            mask = _mask(used.corpus, piece)
            if mask is not None:
                targets[part][mask[1:] == 0] = IGNORE_INDEX
            if self.document_mask:
                found = _documents(used.corpus, piece)
                targets[part][found[1:] != found[:-1]] = IGNORE_INDEX
                numbers[part] = at + found[:-1]
            at += piece.pairs
        return tokens, targets, numbers

    def _read(self, dataset: IndexedDataset, piece: Piece) -> NDArray[np.int64]:
        tokens = _ids(dataset, piece).astype(np.int64)
        wrong = (tokens < 0) | (tokens >= self.vocab_size)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise UserError(
                f"{bin_path(dataset.prefix)}: byte {(piece.start + at) * dataset.dtype.itemsize}: "
                f"token id {tokens[at]}, need 0 to {self.vocab_size - 1}, the ids of `tokenizer` "
                "that the model has; was it prepared with another one?"
            )
        return tokens


def _ids(dataset: IndexedDataset, piece: Piece) -> NDArray:
    """The ids of a piece as stored [pairs + 1]."""
    return dataset.tokens[piece.start : piece.start + piece.pairs + 1]


def _mask(dataset: IndexedDataset, piece: Piece) -> NDArray[np.uint8] | None:
    """Which tokens of a piece are targets [pairs + 1], if the corpus has a mask."""
    mask = dataset.mask
    return None if mask is None else mask[piece.start : piece.start + piece.pairs + 1]


def _documents(dataset: IndexedDataset, piece: Piece) -> NDArray[np.int32]:
    """The document of each token, counted from the start of the piece [pairs + 1]."""
    starts = dataset.document_starts(piece.start + 1, piece.start + piece.pairs + 1)
    begins = np.zeros(piece.pairs + 1, np.int32)
    begins[starts - piece.start] = 1
    return np.cumsum(begins, dtype=np.int32)


def document_starts(numbers: torch.Tensor) -> torch.Tensor:
    """Return where documents start in b · s tokens, then b · s, int32 [n + 1].

    `numbers` [b, s] is the document of each token. Every row starts a document.
    """
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([numbers.numel()])]).int()


def open_samples(
    data: DataConfig,
    sequence_length: int,
    seed: int,
    vocab_size: int,
    subset: Literal["train", "valid"],
    samples_before: Callable[[int], int],
    opened: OpenCorpora | None = None,
) -> Samples | None:
    """Open the samples of `data` for training (shuffled by `seed`) or validation (in file order).

    `samples_before`: the samples of all data steps before one, for weights that change. `opened`:
    corpora that are open already. It gets those that this opens.

    A training corpus with `epochs` gives so many samples at most.

    With `data.valid`, every corpus is used whole; without, `data.split` divides each training
    corpus. Returns None if there are no validation samples. Raises UserError for a corpus that
    cannot be read or is too short for one window.
    """
    corpora = data.valid if subset == "valid" and data.valid else data.train
    if subset == "train":
        refuse_no_corpus(data)
    if not corpora:
        return None
    split = [Fraction(1), Fraction(0)] if data.valid else [Fraction(str(x)) for x in data.split]
    open_one = _open_windows if data.packing == "none" else _open_packed
    opened = {} if opened is None else opened
    for each in corpora:
        if each.path not in opened:
            opened[each.path] = IndexedDataset(each.path)
    found = [
        open_one(opened[c.path], sequence_length, split, subset, bool(data.valid)) for c in corpora
    ]
    used = [(r, c.weights, c.epochs) for r, c in zip(found, corpora, strict=True) if r.windows]
    if not used:
        return None
    ranges, curricula, epochs = zip(*used, strict=True)
    if subset == "valid":
        # The same samples whenever they are read: those of the last weights.
        curricula = tuple([[0, weights[-1][1]]] for weights in curricula)
        epochs = (None,) * len(epochs)
    order = seed if subset == "train" else None
    budgets = [_budget(*each) for each in zip(ranges, epochs, strict=True)]
    blend = make_blend(curricula, samples_before, budgets)
    return Samples(ranges, blend, sequence_length, vocab_size, order, data.document_mask)


def _budget(used: WindowRange | PackedRange, epochs: float | None) -> int | None:
    """The samples of so many epochs. Raises UserError if there is none."""
    if epochs is None:
        return None
    budget = int(used.windows * Fraction(str(epochs)))
    fits = f"need at least {1 / used.windows:.2g} for one of the {used.windows} sequences of "
    need(budget > 0, "data.train: epochs", epochs, f"{fits}{used.corpus.prefix}")
    return budget


def _open_windows(
    corpus: IndexedDataset, length: int, split: Sequence[Fraction], subset: str, whole: bool
) -> WindowRange:
    windows = (len(corpus.tokens) - 1) // length
    if windows < 1:
        raise UserError(
            f"{bin_path(corpus.prefix)}: {len(corpus.tokens)} tokens, need at least {length + 1} "
            "for one sequence (model.sequence_length + 1)"
        )
    training = windows if whole else int(windows * split[0] / sum(split))
    if subset == "valid" and not whole:
        return WindowRange(corpus, training, windows - training, length)
    if training < 1:
        raise UserError(
            f"{bin_path(corpus.prefix)}: {windows} sequences, data.split "
            f"{[float(x) for x in split]} leaves none to train on; need a longer corpus, "
            "data.valid, or data.split=[1,0]"
        )
    return WindowRange(corpus, 0, training, length)


def _open_packed(
    corpus: IndexedDataset, length: int, split: Sequence[Fraction], subset: str, whole: bool
) -> PackedRange:
    """The documents that start in the part of the tokens that the split gives to `subset`."""
    training = len(corpus)
    if not whole:
        cut = int(len(corpus.tokens) * split[0] / sum(split))
        training = bisect_left(range(len(corpus)), cut, key=corpus.document_start)
    if subset == "valid" and not whole:
        return PackedRange(corpus, training, len(corpus), length)
    found = PackedRange(corpus, 0, training, length)
    if found.windows < 1:
        raise UserError(
            f"{bin_path(corpus.prefix)}: no document of two tokens to train on, need one, or "
            "another data.split"
        )
    return found
