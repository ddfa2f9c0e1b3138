"""The order of samples: one permutation per epoch, and exact shares of a blend."""

import numpy as np
import pytest

from megafrontier.common.errors import UserError
from megafrontier.data.sampling.order import Blend, Curriculum, make_blend, make_key, permute


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


def test_a_corpus_whose_budget_is_spent_leaves_its_share_to_the_others() -> None:
    fixed = [[[0, 0.5]], [[0, 0.3]], [[0, 0.2]]]
    blend = make_blend(fixed, int, [None, 30, 60])
    located = [blend.locate(sample) for sample in range(400)]
    assert located == [blend.locate(sample) for sample in reversed(range(400))][::-1]
    for corpus, count in enumerate((310, 30, 60)):
        numbers = [number for c, number in located if c == corpus]
        assert numbers == list(range(count))
    last = max(n for n, (c, _) in enumerate(located) if c == 1)
    assert 96 <= last <= 104, "the 30th of 3 in 10"
    after = [c for c, _ in located[last + 1 : last + 71]]
    assert after.count(0) == 50, "weights 0.5 and 0.2"
    assert located[: last + 1] == [make_blend(fixed, int).locate(n) for n in range(last + 1)]


def test_samples_end_when_all_budgets_are_spent() -> None:
    blend = make_blend([[[0, 1.0]], [[0, 1.0]]], int, [7, 40])
    assert isinstance(blend, Curriculum)
    assert blend.end == 47
    located = {blend.locate(sample) for sample in range(47)}
    assert located == {(0, n) for n in range(7)} | {(1, n) for n in range(40)}
    with pytest.raises(UserError, match="sample 47, the corpora give 47 by their epochs"):
        blend.locate(47)


def test_budgets_are_spent_across_the_phases_of_a_curriculum() -> None:
    changing = [[[0, 1.0], [10, 3.0]], [[0, 1.0]], [[0, 0.0], [10, 1.0]]]
    blend = make_blend(changing, lambda step: 4 * step, [None, 25, 8])
    located = [blend.locate(sample) for sample in range(200)]
    for corpus, count in enumerate((167, 25, 8)):
        assert [n for c, n in located if c == corpus] == list(range(count))
    assert [c for c, _ in located[:40]].count(1) == 20
