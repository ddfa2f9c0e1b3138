"""Samples are windows of the corpora: split, blended, shuffled, masked, and checked."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.config import CorpusConfig, DataConfig
from megafrontier.data.sampling.samples import Samples, open_samples
from tests.data.corpora import write_corpus, write_counting

S = 8
VOCABULARY = 5000


def opened(part: str = "train", seed: int = 1, vocab_size: int = VOCABULARY, **data) -> Samples:
    samples = open_samples(DataConfig(**data), S, seed, vocab_size, part, int)  # type: ignore[arg-type]
    assert samples is not None
    return samples


def windows(samples: Samples, first: int, count: int) -> list[int]:
    """The window of each sample, for a corpus of the ids 0, 1, 2, …"""
    return (samples.batch(first, count).tokens[:, 0] // S).tolist()


@pytest.fixture
def corpus(tmp_path: Path) -> CorpusConfig:
    """100 windows."""
    return CorpusConfig(str(write_counting(tmp_path / "counting", 100 * S + 1)))


def test_a_sample_is_a_window_and_its_targets_are_the_next_tokens(corpus: CorpusConfig) -> None:
    batch = opened(train=[corpus]).batch(5, 3)
    assert batch.tokens.shape == batch.targets.shape == (3, S)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.first_sample == 5
    assert batch.documents is None
    assert torch.equal(batch.tokens + 1, batch.targets)
    assert (batch.tokens[:, 0] % S == 0).all()


def test_tokens_that_the_corpus_masks_are_no_targets(corpus: CorpusConfig) -> None:
    mask = np.arange(100 * S + 1) % 3 == 0
    Path(f"{corpus.path}.mask").write_bytes(mask.tobytes())
    samples = opened(train=[corpus])
    batch = samples.batch(0, 100)
    expected = torch.where((batch.tokens + 1) % 3 == 0, batch.tokens + 1, -100)
    assert torch.equal(batch.targets, expected)
    before = samples.fingerprints
    Path(f"{corpus.path}.mask").write_bytes((~mask).tobytes())
    assert opened(train=[corpus]).fingerprints != before
    Path(f"{corpus.path}.mask").write_bytes(b"1")
    with pytest.raises(UserError, match=r"counting.mask: 1 bytes, need one for each of 801 tokens"):
        opened(train=[corpus])


def test_a_sample_does_not_depend_on_the_batch(corpus: CorpusConfig) -> None:
    expected = opened(train=[corpus]).batch(0, 250).tokens
    for n in (249, 0, 99, 100, 101):
        assert torch.equal(expected[n : n + 1], opened(train=[corpus]).batch(n, 1).tokens)


def test_epochs_differ_in_order_and_each_has_every_window_once(corpus: CorpusConfig) -> None:
    samples = opened(train=[corpus], split=[1.0, 0.0])
    epochs = [windows(samples, epoch * 100, 100) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(100))


def test_the_split_keeps_validation_out_of_training(corpus: CorpusConfig) -> None:
    data = {"train": [corpus], "split": [0.9, 0.1]}
    assert sorted(windows(opened(**data), 0, 90)) == list(range(90))
    assert windows(opened("valid", **data), 0, 10) == list(range(90, 100))


def test_validation_runs_in_file_order_and_starts_over(corpus: CorpusConfig) -> None:
    samples = opened("valid", train=[corpus], split=[0.97, 0.03])
    assert windows(samples, 0, 7) == [97, 98, 99, 97, 98, 99, 97]
    assert samples.windows == [3]


def test_a_corpus_of_its_own_for_validation_leaves_training_whole(
    corpus: CorpusConfig, tmp_path: Path
) -> None:
    other = CorpusConfig(str(write_counting(tmp_path / "other", 2 * S + 1, start=1000)))
    data = {"train": [corpus], "valid": [other]}
    assert sorted(windows(opened(**data), 0, 100)) == list(range(100))
    assert opened("valid", **data).batch(0, 2).tokens[:, 0].tolist() == [1000, 1000 + S]


def test_nothing_kept_for_validation_is_no_samples(corpus: CorpusConfig) -> None:
    data = DataConfig(train=[corpus], split=[1.0, 0.0])
    assert open_samples(data, S, 1, VOCABULARY, "valid", int) is None


def test_a_blend_draws_from_each_corpus_by_its_weight(tmp_path: Path) -> None:
    small = CorpusConfig(str(write_counting(tmp_path / "a", 10 * S + 1)), weight=3)
    large = CorpusConfig(str(write_counting(tmp_path / "b", 50 * S + 1, start=1000)), weight=1)
    samples = opened(train=[small, large], split=[1.0, 0.0])
    starts = samples.batch(0, 200).tokens[:, 0]
    from_small = starts[starts < 1000]
    assert len(from_small) == 150
    # 15 epochs of the small one, each whole, and one of the large one.
    for epoch in from_small.reshape(15, 10):
        assert sorted(epoch.tolist()) == [S * i for i in range(10)]
    assert sorted(starts[starts >= 1000].tolist()) == [1000 + S * i for i in range(50)]


def test_a_corpus_is_read_as_often_as_its_epochs_say(tmp_path: Path) -> None:
    corpora = [
        CorpusConfig(str(write_counting(tmp_path / name, 10 * S + 1, start=start)), epochs=epochs)
        for name, start, epochs in (("a", 0, 1.5), ("b", 500, None))
    ]
    samples = opened(train=corpora, split=[1, 0], vocab_size=1000)
    located = samples.locate(0, 100)
    own = [window for corpus, window in located if corpus == 0]
    assert len(own) == 15
    assert sorted(own[:10]) == list(range(10))
    corpora[0].epochs = 0.01
    with pytest.raises(UserError, match=r"epochs: 0\.01, need at least 0\.1 for one of the 10"):
        opened(train=corpora, split=[1, 0], vocab_size=1000)


def test_a_document_mask_separates_documents(tmp_path: Path) -> None:
    # Documents of 5, 2 and 10 tokens, the last of two sequences; windows start at 0 and 8.
    documents = [[list(range(5))], [[5, 6]], [list(range(7, 12)), list(range(12, 17))]]
    corpus = CorpusConfig(str(write_corpus(tmp_path / "c", documents)))
    samples = opened(train=[corpus], valid=[corpus], document_mask=True)
    valid = open_samples(
        DataConfig(train=[corpus], valid=[corpus], document_mask=True),
        S,
        1,
        VOCABULARY,
        "valid",
        int,
    )
    assert valid is not None
    assert samples.windows == valid.windows == [2]
    batch = valid.batch(0, 2)
    assert batch.documents is not None
    assert batch.documents.dtype == torch.int32
    assert batch.documents.tolist() == [0, 5, 7, 8, 16]
    assert batch.targets.tolist() == [
        [1, 2, 3, 4, -100, 6, -100, 8],
        [9, 10, 11, 12, 13, 14, 15, 16],
    ]


def test_a_target_across_the_end_of_the_window_is_masked_too(tmp_path: Path) -> None:
    corpus = CorpusConfig(str(write_counting(tmp_path / "c", 2 * S + 1, document=S)))
    batch = opened(train=[corpus], split=[1.0, 0.0], document_mask=True).batch(0, 2)
    assert (batch.targets[:, -1] == -100).all()
    assert (batch.targets[:, :-1] >= 0).all()


@pytest.mark.parametrize(("dtype", "wrong"), [("uint16", 4000), ("int32", -5)])
def test_an_id_beyond_the_vocabulary_is_refused_by_file_and_byte(
    tmp_path: Path, dtype: str, wrong: int
) -> None:
    ids = list(range(3 * S + 1))
    ids[S + 3] = wrong
    prefix = write_corpus(tmp_path / "c", [[ids]], dtype)
    samples = opened(train=[CorpusConfig(str(prefix))], split=[1.0, 0.0], vocab_size=4000)
    byte = (S + 3) * (2 if dtype == "uint16" else 4)
    with pytest.raises(UserError, match=rf"c\.bin: byte {byte}: token id {wrong}, need 0 to 3999"):
        samples.batch(0, 3)


def test_a_corpus_shorter_than_one_window_is_refused(tmp_path: Path) -> None:
    corpus = CorpusConfig(str(write_counting(tmp_path / "c", S)))
    with pytest.raises(UserError, match=rf"c\.bin: {S} tokens, need at least {S + 1}"):
        opened(train=[corpus])


def test_a_split_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    corpus = CorpusConfig(str(write_counting(tmp_path / "c", S + 1)))
    with pytest.raises(UserError, match=r"data.split \[0.99, 0.01\] leaves none to train on"):
        opened(train=[corpus])


def test_no_corpus_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.train: empty"):
        opened(train=[])
