"""Best-fit packing: whole documents, every pair of tokens once, in few sequences."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from megafrontier.config import CorpusConfig
from megafrontier.data.corpus.indexed import IndexedDataset
from megafrontier.data.sampling import packing
from megafrontier.data.sampling.packing import PackedRange, best_fit
from tests.data.corpora import write_corpus
from tests.data.sampling.test_samples import opened

S = 8


def rooms_left(sizes: list[int], room: int) -> list[int]:
    """Of the sequences that best-fit decreasing makes, one item at a time."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        best = min((left for left in rooms if left >= size), default=None)
        if best is None:
            rooms.append(room - size)
        else:
            rooms[rooms.index(best)] -= size
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(8))
def test_sizes_are_packed_as_one_item_at_a_time_would_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    room = int(rng.integers(3, 60))
    sizes = rng.integers(1, room + 1, 300) if seed % 2 else rng.geometric(0.2, 300).clip(1, room)
    counts = np.bincount(sizes, minlength=room + 1).tolist()
    packed = [
        [(size, first + i * each + j) for size, first, each in group.items for j in range(each)]
        for group in best_fit(counts, room)
        for i in range(group.count)
    ]
    items = Counter(item for sequence in packed for item in sequence)
    assert items == {(size, i): 1 for size in range(room + 1) for i in range(counts[size])}
    left = sorted(room - sum(size for size, _ in sequence) for sequence in packed)
    assert left == rooms_left(sizes.tolist(), room)


@pytest.fixture
def corpus(tmp_path: Path) -> CorpusConfig:
    """60 documents of 0 to 29 tokens, some of two sequences, the ids of which count."""
    lengths = [(7 * i) % 30 for i in range(60)]
    starts = np.cumsum([0, *lengths]).tolist()
    ids = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    documents = [[d[: i % 5], d[i % 5 :]] if i % 4 == 0 else [d] for i, d in enumerate(ids)]
    return CorpusConfig(str(write_corpus(tmp_path / "c", documents)))


def test_an_epoch_has_every_pair_once_and_cuts_only_documents_that_are_too_long(
    corpus: CorpusConfig,
) -> None:
    samples = opened(train=[corpus], split=[1, 0], document_mask=True, packing="best_fit")
    (count,) = samples.windows
    batch = samples.batch(0, count)
    assert batch.documents is not None
    has_target = batch.targets >= 0
    assert (batch.targets == batch.tokens + 1)[has_target].all()
    lengths = [(7 * i) % 30 for i in range(60)]
    starts = np.cumsum([0, *lengths]).tolist()
    pairs = {t for a, b in itertools.pairwise(starts) for t in range(a, b - 1)}
    assert Counter(batch.tokens[has_target].tolist()) == dict.fromkeys(pairs, 1)
    assert not batch.tokens[~has_target].any()
    assert batch.padding is not None
    assert torch.equal(batch.padding, ~has_target)
    # In each document of the batch, all tokens follow each other, or it is padding.
    tokens, bounds = batch.tokens.flatten().tolist(), batch.documents.tolist()
    whole = [tokens[a:b] for a, b in itertools.pairwise(bounds)]
    assert all(d == list(range(d[0], d[0] + len(d))) or not any(d) for d in whole)
    first_tokens = {d[0] for d in whole}
    fits = [a for a, n in zip(starts, lengths, strict=False) if 2 <= n <= S + 1]
    assert first_tokens >= set(fits)
    assert sum(d[0] in pairs and bool(any(d)) for d in whole) == sum(
        -(-(n - 1) // S) for n in lengths if n > 1
    )
    least = -(-len(pairs) // S)
    assert count <= least + 2, "no more than the exact minimum and a little"


def test_the_split_is_one_of_documents_and_blocks_change_nothing(
    corpus: CorpusConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"train": [corpus], "split": [0.7, 0.3], "document_mask": True, "packing": "best_fit"}
    parts = [opened(part, **options) for part in ("train", "valid")]
    seen = [set(p.batch(0, p.windows[0]).targets.flatten().tolist()) - {-100} for p in parts]
    assert seen[0]
    assert seen[1]
    assert max(seen[0]) < min(seen[1])
    dataset = IndexedDataset(corpus.path)
    whole = PackedRange(dataset, 0, len(dataset), S)
    monkeypatch.setattr(packing, "_LEAST_BLOCK", 7)
    blocks = PackedRange(dataset, 0, len(dataset), S)
    assert blocks.windows == whole.windows
    for window in range(whole.windows):
        assert blocks.pieces(window) == whole.pieces(window)
