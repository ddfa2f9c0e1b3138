"""Levels, the coordinates and peers of a rank, and its shards."""

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.config import LevelConfig
from megafrontier.parallel.hierarchy import Hierarchy, Levels
from megafrontier.parallel.mesh import DATA_PARALLEL, MeshShape
from megafrontier.parallel.world import World
from tests.ranks import run_ranks

FRONTIER = Levels(("pair", "node", "world"), (2, 4, 3))


def resolve(ranks, **sizes):
    return Levels.resolve({name: LevelConfig(size) for name, size in sizes.items()}, ranks)


def test_coordinates_are_counted_from_the_fastest_level():
    assert FRONTIER.coordinates(0) == (0, 0, 0)
    assert FRONTIER.coordinates(1) == (1, 0, 0)
    assert FRONTIER.coordinates(2) == (0, 1, 0)
    assert FRONTIER.coordinates(8) == (0, 0, 1)
    assert FRONTIER.coordinates(23) == (1, 3, 2)
    for rank in range(FRONTIER.ranks):
        assert FRONTIER.rank_at(FRONTIER.coordinates(rank)) == rank


def test_the_outermost_size_follows_from_the_ranks():
    assert resolve(24, pair=2, node=4, world=None) == FRONTIER
    assert resolve(8, pair=2, node=4, world=None).sizes == (2, 4, 1)
    assert resolve(1, world=None).sizes == (1,)
    assert resolve(8, pair=2, node=4).sizes == (2, 4)


def test_levels_shrink_for_few_ranks_and_claim_no_faster_links_than_these_have():
    found = [resolve(ranks, pair=2, node=4, world=None).sizes for ranks in range(1, 9)]
    assert found == [
        (1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 2, 1), (1, 5, 1), (2, 3, 1), (1, 7, 1), (2, 4, 1)
    ]  # fmt: skip
    assert resolve(4, pair=2, node=4).sizes == (2, 2)
    assert resolve(160, pair=2, node=4, group=32, world=None).sizes == (2, 4, 20, 1)
    assert resolve(12, pair=2, node=4, group=32).sizes == (2, 1, 6)


def test_depth_counts_levels_and_none_is_zero():
    assert [FRONTIER.depth(name) for name in ("none", "pair", "node", "world")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        (12, {"pair": 2, "node": 4, "world": None}, "pair 2 × node 4 × world .* 12 ranks, need at "
         "most 8, or a multiple of it; or another"),
        (16, {"pair": 2, "node": 4}, "cannot hold 16 ranks, need at most 8; or another machine"),
        (8, {"pair": None, "world": None}, r"machine\.levels\.pair\.size: open"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_multiply_to_the_ranks_are_refused(ranks, sizes, message):
    with pytest.raises(UserError, match=message):
        resolve(ranks, **sizes)


def test_an_unknown_level_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"partition\.weights: no level 'rack' .* none, pair, node"):
        FRONTIER.depth("rack", "partition.weights")


def test_shards_are_indexed_fastest_level_first_and_each_has_one_first_replica():
    shape, cpu = MeshShape(FRONTIER), torch.device("cpu")
    ranks = [
        Hierarchy(FRONTIER, shape.peers(rank, DATA_PARALLEL), (None,) * 3, World(rank, 24, cpu))
        for rank in range(FRONTIER.ranks)
    ]
    assert [hierarchy.rank for hierarchy in ranks] == list(range(24))
    # rank 14 = pair 0, node 3, world 1
    assert [ranks[14].shard_index(depth) for depth in range(4)] == [
        (0, 1),
        (0, 2),
        (3, 8),
        (10, 24),
    ]
    for depth, count in enumerate((1, 2, 8, 24)):
        firsts = [rank.shard_index(depth) for rank in ranks if rank.is_first_replica(depth)]
        assert sorted(firsts) == [(index, count) for index in range(count)]


def test_a_level_of_one_rank_has_no_group():
    def body(hierarchy):
        total = hierarchy.world.sum(torch.ones(1)).item()
        return [group is None for group in hierarchy.groups], total

    assert run_ranks((1, 2, 1), body) == [([True, False, True], 2.0)] * 2
