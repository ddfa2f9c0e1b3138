"""The order of samples: one permutation per epoch, and exact shares of a blend."""

import numpy as np
import pytest

from megafrontier.data.sampling.order import Blend, make_blend, make_key, permute


def order(size: int, seed: int = 1, corpus: int = 0, epoch: int = 0) -> list[int]:
    """All windows of an epoch in order."""
    keys = make_key(seed, corpus, np.full(size, epoch, np.uint64))
    return permute(np.arange(size, dtype=np.uint64), size, keys).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 255, 256, 257, 1000, 4099])
def test_every_epoch_visits_every_window_once(size: int) -> None:
    for epoch in range(3):
        assert sorted(order(size, epoch=epoch)) == list(range(size))


def test_seed_corpus_and_epoch_each_change_the_order() -> None:
    orders = [order(500), order(500, seed=2), order(500, corpus=1), order(500, epoch=1)]
    assert len({tuple(o) for o in orders}) == 4
    assert order(500) == order(500)


def test_the_order_does_not_change_between_versions() -> None:
    # Runs that resume with a newer release must find the same samples.
    assert order(10) == [0, 8, 9, 7, 2, 4, 6, 3, 5, 1]


def test_the_order_looks_random() -> None:
    size = 10_000
    places = np.array(order(size), float)
    identity = np.arange(size)
    assert abs(np.corrcoef(places, identity)[0, 1]) < 0.04
    assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 0.04
    # Chance gives one fixed point, and 500 of the first half in every tenth.
    assert np.sum(places == identity) < 8
    halves = np.histogram(places[: size // 2], bins=10, range=(0, size))[0]
    assert halves.min() > 420
    assert halves.max() < 580


WEIGHTS = [[1.0], [1, 1], [0.7, 0.3], [0.5, 0.3, 0.2], [0.001, 5, 3, 1, 0.25], [1.0] * 20]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_corpus_counts_up_and_keeps_its_share(weights: list[float]) -> None:
    blend = Blend(weights)
    counts = [0] * len(weights)
    bound = 0.5 if len(weights) <= 2 else 1.5
    for sample in range(3000):
        corpus, number = blend.locate(sample)
        assert number == counts[corpus]
        counts[corpus] += 1
        shares = [(sample + 1) * weight / sum(weights) for weight in weights]
        assert max(abs(c - s) for c, s in zip(counts, shares, strict=True)) <= bound + 1e-9


def test_shares_are_exact_at_any_distance() -> None:
    blend = Blend([0.7, 0.3])
    corpus, number = blend.locate(10**15)
    assert abs(number - 10**15 * (7, 3)[corpus] // 10) <= 1


def test_a_curriculum_changes_the_blend_and_each_corpus_counts_on() -> None:
    schedule = [[[0, 1.0]], [[0, 1], [10, 0], [25, 3]], [[0, 0], [10, 2]]]
    blend = make_blend(schedule, lambda step: 4 * step)
    located = [blend.locate(sample) for sample in range(200)]
    shares = {(0, 40): (20, 20, 0), (40, 100): (20, 0, 40), (100, 200): (17, 50, 33)}
    for (start, stop), expected in shares.items():
        found = [sum(c == corpus for c, _ in located[start:stop]) for corpus in range(3)]
        assert found == list(expected)
    for corpus in range(3):
        numbers = [number for c, number in located if c == corpus]
        assert numbers == list(range(len(numbers)))
    constant = make_blend([[[0, 0.7]], [[0, 0.3]]], int)
    assert isinstance(constant, Blend)
