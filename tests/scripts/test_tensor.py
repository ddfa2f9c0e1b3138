"""The table of tensor parallelism over a slow link."""

from scripts.benchmarks.slow_network.job import Answer
from scripts.benchmarks.slow_network.tensor import CONTENDERS, Found, table


def answer(begin: float, end: float, hidden: float) -> Answer:
    kinds = {"activations": {"bytes": 8.0, "seconds": 2.0, "hidden": hidden}}
    return Answer([begin], [end], 0.0, 0.0, 1, 1, 2, 6_000_000, 1, 0, 0, None, {}, 1, 5.0, kinds)


def test_the_table_says_which_bars_are_reached_from_the_slowest_rank_of_each_step() -> None:
    found = {}
    for contender, seconds in zip(CONTENDERS, (3.0, 2.0, 1.0, 1.2), strict=True):
        found[contender.name] = Found()
        found[contender.name].take([answer(1.0, 1.5 + seconds, 1.4), answer(1.5, 1.6, 0.0)])
    text = table(2, found)
    assert "| overlapped | 2.000 (2.000 – 2.000) | 3.00 | 70% |" in text
    assert "| overlapped over not overlapped | 1.500 | ≥ 1.15 | reached |" in text
    assert "| share of activations' seconds that is hidden | 0.700 | ≥ 0.6 | reached |" in text
    assert "| overlapped over torch | 0.600 | ≥ 1 | missed |" in text
    assert "| overlapped, int8, over torch | 1.200 | ≥ 1.3 | missed |" in text
