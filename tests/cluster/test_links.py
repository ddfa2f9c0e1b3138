"""Timed exchanges tell a bad link's owner from its neighbours."""

import pytest

from megafrontier.cluster.links import measure, neighbours
from tests.ranks import run_ranks


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 9])
def test_everybody_meets_both_neighbours_and_in_each_round_one_at_a_time(size):
    met = [neighbours(index, size) for index in range(size)]
    for index, peers in enumerate(met):
        assert {p for p in peers if p is not None} == {(index - 1) % size, (index + 1) % size}
        for number, peer in enumerate(peers):
            assert peer is None or met[peer][number] == index


def test_each_level_with_peers_has_a_rate():
    found = run_ranks((2, 1, 3), lambda h: [measure(h, level, 2**16) for level in range(3)])
    for pair, node, world in found:
        assert 0 < pair < 1000
        assert 0 < world < 1000
        assert node == float("inf")
