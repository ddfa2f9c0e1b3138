"""The options of corpora and samples."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megafrontier.common.errors import UserError
from megafrontier.config.fields import RESUME, bounded, marked


@dataclass
class CorpusConfig:
    path: str = ""
    """Prefix of PREFIX.bin and PREFIX.idx."""
    weight: float | list[list[float]] = 1.0
    """Share of the samples drawn from this corpus, relative to the other corpora: a number above 0,
    or for a curriculum [[step, weight], …], a weight from each of these data steps on, the first of
    which is 0."""
    name: str = ""
    """In `data.train`: the name in `corpus_tokens` and `corpus_loss` of metrics.jsonl, which
    several corpora may share; default: the last part of `path`. In `data.valid`: also evaluate the
    corpora of this name alone, over as many batches, as the metric `valid_loss/NAME`."""
    epochs: float | None = bounded(None, above=0)
    """In `data.train`: how often this corpus may be read, 1.5 for one and a half times. Afterwards
    the others share its samples by their weights. A run with more steps than all corpora together
    allow is refused. null: without end."""

    @property
    def weights(self) -> list[list[float]]:
        """`weight` as a curriculum, also a number."""
        return self.weight if isinstance(self.weight, list) else [[0, self.weight]]


def corpus_labels(corpora: Sequence[CorpusConfig]) -> list[str]:
    """The name of each corpus in metrics: `name`, or the last part of its path, or the path if
    another one has the same last part."""
    ends = {corpus.path: Path(corpus.path).name for corpus in corpora}
    counts = Counter(ends.values())
    return [
        corpus.name or (end if counts[end := ends[corpus.path]] == 1 else corpus.path)
        for corpus in corpora
    ]


def weight_at(step: int, curriculum: Sequence[Sequence[float]]) -> float:
    """The weight of a data step in [[step, weight], …]."""
    return [weight for start, weight in curriculum if start <= step][-1]


@dataclass
class DataConfig:
    train: list[CorpusConfig] = field(default_factory=list)
    """Corpora to train on, blended by weight."""
    valid: list[CorpusConfig] = field(default_factory=list)
    """Corpora to evaluate on. Empty: the last part of each training corpus, see `split`."""
    split: list[float] = field(default_factory=lambda: [0.99, 0.01], metadata={RESUME: "samples"})
    """Fractions of each training corpus for training and validation, used if `valid` is empty."""
    document_mask: bool = marked(False, "samples")
    """Attention and loss do not cross the end of a document, and positions restart there. This
    needs no dense mask, unless `model.dropout` is above 0 or the GPU has no such kernel for the
    head size: the line `attention:` in the log names the kernel."""
    packing: Literal["none", "best_fit"] = marked("none", "samples")
    """none: a sequence is consecutive tokens of a corpus, and cuts documents. best_fit: a sequence
    holds whole documents, and only a document that is longer than a sequence is cut (Ding et al.
    2024, arXiv:2404.10830). What is left of a sequence is padding without loss. Needs
    `document_mask`."""
    skip: list[list[int]] = field(default_factory=list)
    """Ranges [from, to) of data steps, counted from 0, whose batches are left out."""


def refuse_no_corpus(data: DataConfig) -> None:
    """Raise UserError if there is no training corpus."""
    if not data.train:
        raise UserError("data.train: empty, need at least one corpus, as {path: PREFIX}")
