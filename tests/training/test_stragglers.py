"""A rank that computes longer than the others is named with its host, though all steps of all ranks
take the same time."""

import os
import time

import pytest

from megafrontier.training import launch, loop
from tests.training import runs

CHOSEN = (
    "evaluate.batches=0", "machine=laptop", "log.stragglers_every=2", "log.straggler=3",
    "preflight.enabled=false", "train.global_batch=8",
)  # fmt: skip
FOUR = ("train.micro_batch=2",)


@pytest.fixture
def config_file(tmp_path):
    return runs.make_config_file(tmp_path)


@pytest.fixture
def slow(monkeypatch):
    """Let a rank dawdle in the steps that begin with these samples."""
    seed_dropout = loop.seed_dropout

    def choose(ranks, steps, seconds):
        def dawdle(seed, batch):
            mine = int(os.environ["MEGAFRONTIER_LOCAL"].split("/")[0])
            if mine in ranks and batch.first_sample // 8 + 1 in steps:
                time.sleep(seconds)
            seed_dropout(seed, batch)

        monkeypatch.setattr(loop, "seed_dropout", dawdle)

    return choose


def remarks(config_file) -> list[str]:
    log = (config_file.parent / "run" / "log.txt").read_text()
    return [line for line in log.splitlines() if line.startswith("warning: slow: ")]


@pytest.mark.parametrize("overlap", ["none", "safe"])
def test_a_slow_rank_is_named_once_with_its_host_until_it_has_recovered(config_file, slow, overlap):
    # Slow in the first two comparisons of five, and in the fourth.
    slow(range(4), range(1, 11), 0.1)
    slow([2], [1, 2, 3, 4, 7, 8], 0.6)
    runs.run(config_file, 4, *CHOSEN, *FOUR, "train.steps=10", f"partition.overlap={overlap}")
    found = remarks(config_file)
    host = launch.identify({}).host
    assert len(found) == 2, found
    assert all(line.startswith(f"warning: slow: rank 2 on {host}: ") for line in found)


def test_all_slow_ranks_are_listed(config_file, slow):
    slow(range(8), [1, 2], 0.1)
    slow([1, 3, 4], [1, 2], 1)
    runs.run(config_file, 8, *CHOSEN, "train.steps=2")
    (line,) = remarks(config_file)
    assert line.startswith("warning: slow: rank 1 on ")
    assert line.endswith(" (and rank 3, rank 4)")


def test_ranks_that_are_alike_are_not_named(config_file, slow):
    slow(range(4), range(1, 5), 0.2)
    runs.run(config_file, 4, *CHOSEN, *FOUR, "train.steps=4")
    assert remarks(config_file) == []
