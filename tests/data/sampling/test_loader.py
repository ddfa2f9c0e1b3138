"""The loader reads the same samples with any ranks and micro-batches, and after any resume."""

import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.config import BatchWarmupConfig, CorpusConfig, DataConfig
from megafrontier.data.sampling.batches import BatchSizes
from megafrontier.data.sampling.loader import Loader, data_step, open_loader
from megafrontier.data.sampling.samples import Batch, Samples, open_samples
from tests import runs
from tests.data.corpora import write_counting

S = 4
GLOBAL_BATCH = 16


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    corpora = [
        CorpusConfig(str(write_counting(tmp_path / name, 37 * S + 1, start=start)), weight)
        for name, start, weight in (("a", 0, 0.8), ("b", 1000, 0.2))
    ]
    opened = open_samples(DataConfig(train=corpora), S, 7, 5000, "train", int)
    assert opened is not None
    return opened


def read(loader: Loader, step: int) -> torch.Tensor:
    """A rank's tokens of a step, in order."""
    return torch.cat([batch.tokens for batch in loader.step(step)])


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 2), (2, 1), (8, 2)])
def test_a_step_has_the_same_samples_at_any_number_of_ranks(
    samples: Samples, ranks: int, micro_batch: int
) -> None:
    for step in (0, 1, 9):
        loaders = [
            Loader(samples, BatchSizes(GLOBAL_BATCH), micro_batch, d, ranks) for d in range(ranks)
        ]
        joined = torch.cat([read(loader, step) for loader in loaders])
        assert torch.equal(joined, samples.batch(step * GLOBAL_BATCH, GLOBAL_BATCH).tokens)
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize(("ranks", "least"), [(3, 2), (5, 1), (11, 0)])
def test_micro_batches_that_do_not_divide_are_filled_up_with_padding(
    samples: Samples, ranks: int, least: int
) -> None:
    loaders = [
        Loader(samples, BatchSizes(GLOBAL_BATCH), 2, d, ranks, is_elastic=True)
        for d in range(ranks)
    ]
    batches = [loader.step(1) for loader in loaders]
    assert {len(own) for own in batches} == {loaders[0].micro_batches} == {-(-8 // ranks)}
    real = [[b for b in own if b.padding is None] for own in batches]
    assert {len(own) for own in real} == {least, least + 1}
    joined = torch.cat([batch.tokens for own in real for batch in own])
    assert torch.equal(joined, samples.batch(GLOBAL_BATCH, GLOBAL_BATCH).tokens)
    padding = [b for own in batches for b in own if b.padding is not None]
    assert all(b.padding.all() and (b.targets < 0).all() for b in padding)
    for loader in loaders:
        loader.close()


def test_a_rank_gets_its_micro_batches_in_order(samples: Samples) -> None:
    loader = Loader(samples, BatchSizes(GLOBAL_BATCH), 2, dp_rank=1, dp_size=2)
    batches = loader.step(3)
    assert loader.micro_batches == len(batches) == 4
    assert [batch.first_sample for batch in batches] == [3 * 16 + 8 + 2 * i for i in range(4)]
    assert all(batch.tokens.shape == (2, S) for batch in batches)
    loader.close()


def test_a_batch_that_grows_reads_every_sample_once_and_resumes_exactly(samples: Samples) -> None:
    sizes = BatchSizes(16, BatchWarmupConfig(start=4, step_by=4, until=10))
    loaders = [Loader(samples, sizes, 2, rank, 2, skip=[[12, 14]]) for rank in range(2)]
    ranges = [loaders[0].sample_range(step) for step in range(14)]
    assert [stop - start for start, stop in ranges] == [4] * 4 + [8] * 3 + [12] * 3 + [16] * 4
    assert all(a[1] == b[0] for a, b in pairwise([*ranges[:12]]))
    assert ranges[12][0] == ranges[11][1] + 2 * 16
    for step in (0, 5, 9, 12):
        joined = torch.cat([read(loader, step) for loader in loaders])
        start, stop = ranges[step]
        assert torch.equal(joined, samples.batch(start, stop - start).tokens)
        assert loaders[0].data_step_of(start) == loaders[0].position(step)[0]
    resumed = Loader(samples, sizes, 4, skip=[[12, 14]])
    resumed.resume_at(6, loaders[0].position(6))
    assert [resumed.sample_range(step) for step in range(6, 14)] == ranges[6:]
    for loader in loaders:
        loader.close()
    with pytest.raises(UserError, match=r"train.batch_warmup.start: 4, need a multiple of 16"):
        Loader(samples, sizes, 4, 0, 4)


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        ([[2, 4]], [0, 1, 4, 5, 6, 7]),
        ([[0, 1]], [1, 2, 3, 4, 5, 6]),
        ([[5, 6], [1, 3]], [0, 3, 4, 6, 7, 8]),
        ([[1, 3], [2, 4], [4, 5]], [0, 5, 6, 7, 8, 9]),
        ([[1, 9], [2, 4]], [0, 9, 10, 11, 12, 13]),
    ],
)
def test_skipped_steps_are_left_out_and_later_ones_move_up(
    skip: list[list[int]], expected: list[int]
) -> None:
    assert [data_step(step, skip) for step in range(6)] == expected


@pytest.mark.parametrize("skip", [[], [[2, 5]], [[2, 5], [11, 13]], [[9, 11]]])
def test_a_resumed_loader_with_other_skips_leaves_out_and_repeats_nothing_else(
    samples: Samples, skip: list[list[int]]
) -> None:
    """Ranges before the checkpoint may be added and removed, because their steps have been read."""
    before = Loader(samples, BatchSizes(GLOBAL_BATCH), 4, skip=[[2, 5]])
    assert before.position(7)[0] == 10
    after = Loader(samples, BatchSizes(GLOBAL_BATCH), 4, skip=skip)
    after.resume_at(7, before.position(7))
    expected = [own for own in range(10, 18) if not any(a <= own < b for a, b in skip)][:5]
    found = [after.position(step) for step in range(7, 12)]
    assert found == [(own, own * GLOBAL_BATCH) for own in expected]


def test_batches_that_do_not_divide_are_refused(samples: Samples) -> None:
    says = r"train.global_batch: 16, need a multiple of 12 \(train.micro_batch 3 x 4"
    with pytest.raises(UserError, match=says):
        Loader(samples, BatchSizes(16), 3, 0, 4)


class Watched(Samples):
    """Samples that record which thread read them, and fail on demand."""

    def __init__(self, samples: Samples) -> None:
        self.__dict__.update(samples.__dict__)
        self.reads: list[tuple[int, bool]] = []
        self.fails_from: int | None = None

    def batch(self, first: int, count: int) -> Batch:
        self.reads.append((first, threading.current_thread() is threading.main_thread()))
        if self.fails_from is not None and first >= self.fails_from:
            raise UserError(f"sample {first} is bad")
        return super().batch(first, count)


def test_the_next_step_is_read_in_the_background(samples: Samples) -> None:
    recording = Watched(samples)
    loader = Loader(recording, BatchSizes(2), 2)
    loader.step(0)
    loader.step(1)
    loader.close()
    assert recording.reads[:2] == [(0, True), (2, False)]
    assert all(not in_main for _, in_main in recording.reads[1:])


def test_an_error_in_the_background_is_raised_by_its_step(samples: Samples) -> None:
    recording = Watched(samples)
    recording.fails_from = 2
    loader = Loader(recording, BatchSizes(2), 2)
    loader.step(0)
    with pytest.raises(UserError, match="sample 2 is bad"):
        loader.step(1)
    loader.close()


def test_a_run_with_more_steps_than_the_epochs_of_its_corpora_is_refused(
    config_file: Path, tmp_path: Path
) -> None:
    """At its start, and not behind the last sample. The prefetch of a step that will not come is
    no error."""
    write_counting(tmp_path / "c", 100 * 16 + 1)
    corpora = f"data.train=[{{path: {tmp_path}/c, epochs: 1.5}}]"

    def opened(steps: int) -> Loader:
        chosen = (corpora, "data.split=[1,0]", "model.vocab_size=2000", f"train.steps={steps}")
        loader = open_loader(runs.load(config_file, *chosen), "train", 0, 1, ids=2000)
        assert loader is not None
        return loader

    with pytest.raises(UserError, match=r"epochs: 150 samples, need at least 160, for"):
        opened(10)
    loader = opened(9)
    assert sum(len(batch.tokens) for batch in loader.step(8)) == 16
    loader.close()
