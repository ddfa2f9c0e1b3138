"""The expected goodput is that of a simulation of random failures, and the intervals are best."""

import math
import random
from collections import deque

import pytest

from megafrontier.plan.intervals import FailureModel, SaveCost, young

HOUR = 3600.0
ERROR = 0.012
"""Of the goodput, absolute, at most: that of the formula and of the random numbers."""


def simulate(model, every, local_every=None, segments=100_000, seed=0):
    """The goodput of a run with random failures, event by event, after so many segments between two
    saves, or interrupted starts."""
    rng = random.Random(seed)
    local = model.local if local_every else None
    segment = local_every if local else every
    count = round(every / segment)
    now, number = 0.0, 0  # segments done
    near, stored = deque(maxlen=8), deque([(0.0, 0)], maxlen=8)  # saves: when complete, of which
    while segments > 0:
        segments -= 1
        failure = now + rng.expovariate(1 / model.mtbf)
        if now + model.start > failure:  # the start after the failure before is interrupted
            now = failure
        else:
            now += model.start
            while True:
                segments -= 1
                is_stored = (number + 1) % count == 0
                now += segment + (local.stall if local else 0) + model.storage.stall * is_stored
                if now > failure:
                    break
                number += 1
                if local:
                    near.append((now + local.behind, number))
                if is_stored:
                    stored.append((now + model.storage.behind, number))
            now = failure
        if local is None or rng.random() < model.storage_share:
            near.clear()
        number = max(of for complete, of in (*near, *stored) if complete <= now)
        for saves in (near, stored):  # those that were not complete are lost
            while saves and (saves[-1][0] > now):
                saves.pop()
    return number * segment / now


CASES = {
    "a node in 3 years, 48 nodes": (3 * 8760 / 48, 300, SaveCost(1, 40), None),
    "a node in 3 years, 9,408 nodes": (3 * 8760 / 9408, 300, SaveCost(2, 60), None),
    "a node in a month, 640 nodes": (730 / 640, 120, SaveCost(5, 0), None),
    "a node in a month, 640 nodes, snapshots": (730 / 640, 120, SaveCost(5, 60), SaveCost(0.3, 2)),
    "a node in 3 years, 9,408 nodes, snapshots": (
        3 * 8760 / 9408, 60, SaveCost(2, 60), SaveCost(0.1, 3),
    ),
    "saves of half of the time between failures": (0.2, 60, SaveCost(300), None),
}  # fmt: skip


@pytest.mark.parametrize(("hours", "start", "storage", "local"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("factor", [0.4, 1, 3])
def test_the_formula_is_the_goodput_of_simulated_failures(hours, start, storage, local, factor):
    """At the best intervals, and at shorter and longer ones."""
    model = FailureModel(hours * HOUR, start, storage, local)
    every, local_every, _ = model.best(least=1.0)
    every *= factor
    if local_every is not None:
        every = round(every / local_every) * local_every
    expected = model.goodput(every, local_every)
    assert simulate(model, every, local_every) == pytest.approx(expected, abs=ERROR)


@pytest.mark.parametrize(
    ("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)], ids=["24 h", "6 h", "15 min"]
)
def test_the_best_interval_of_one_kind_of_save_is_the_published_one(hours, minutes):
    """Of the figures 3 to 5 of Daly's paper: starts of 10 minutes, saves of 5."""
    every, _, _ = FailureModel(hours * HOUR, 600, SaveCost(300)).best(least=1.0)
    assert every == pytest.approx(60 * minutes, rel=0.02)


@pytest.mark.parametrize(("hours", "start", "storage", "local"), CASES.values(), ids=CASES)
def test_no_other_intervals_are_better(hours, start, storage, local):
    model = FailureModel(hours * HOUR, start, storage, local)
    every, local_every, best = model.best(least=1.0)
    for factor in (0.3, 0.6, 0.9, 1.1, 1.5, 4):
        assert model.goodput(max(storage.behind, factor * every), local_every) <= best + 1e-9
        if local_every is not None:
            assert model.goodput(every, factor * local_every) <= best + 1e-9


def test_snapshots_near_the_ranks_are_worth_what_they_cost():
    month = FailureModel(730 / 640 * HOUR, 120, SaveCost(5, 60))
    with_local = FailureModel(730 / 640 * HOUR, 120, SaveCost(5, 60), SaveCost(0.3, 2))
    assert with_local.best(1.0)[2] > month.best(1.0)[2] + 0.02


def test_the_ends_of_the_scale():
    assert FailureModel(1e12, 300, SaveCost(1)).best(1.0)[2] == pytest.approx(1, abs=1e-5)
    assert FailureModel(1.0, 1e5, SaveCost(1)).best(1.0)[2] == 0
    assert FailureModel(HOUR, 60, SaveCost(0)).best(20.0)[0] == pytest.approx(20)
    assert young(300, 24 * HOUR) == pytest.approx(math.sqrt(2 * 300 * 24 * HOUR))
    behind, _, _ = FailureModel(HOUR, 60, SaveCost(0.1, 500)).best(1.0)
    assert behind >= 500
