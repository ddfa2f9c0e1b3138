"""Timed exchanges tell the rank with a bad link from its neighbours."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megafrontier.common.errors import Unconnected
from megafrontier.launch.health.links import connect, measure, ring_peers
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.parallel.world import World
from tests.ranks import make_levels, run_ranks


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 9])
def test_every_peer_meets_both_neighbours_one_a_round(size):
    met = [ring_peers(index, size) for index in range(size)]
    for index, peers in enumerate(met):
        assert {p for p in peers if p is not None} == {(index - 1) % size, (index + 1) % size}
        for number, peer in enumerate(peers):
            assert peer is None or met[peer][number] == index


def test_each_level_with_peers_has_a_bandwidth():
    found = run_ranks((2, 1, 3), lambda h: [measure(h, level, 2**16) for level in range(3)])
    for pair, node, world in found:
        assert 0 < pair < 1000
        assert 0 < world < 1000
        assert node == float("inf")


@pytest.mark.parametrize(
    ("last", "reported"),
    [
        ("\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 90000\n",
         ": Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 90000"),
        ("\nLast error:\n", ""),
        ("\nException raised from connect (most recent call first):\nframe #0: f", ""),
    ],
    ids=["said", "empty", "without"],
)  # fmt: skip
def test_the_cause_of_a_failed_communicator_is_reported(last, reported):
    """The first line of the error is the same for all causes."""
    first = "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.28.9"

    def refuse(_device):
        raise dist.DistBackendError(f"{first}\nncclInvalidUsage: This usually reflects …{last}")

    backend = SimpleNamespace(eager_connect_single_device=refuse)
    group = SimpleNamespace(_get_backend=lambda device: backend)
    world = World(1, 2, torch.device("cuda", 0), (group,))
    one = Hierarchy(make_levels((2,)), ((0, 1),), (group,), world)
    with pytest.raises(Unconnected) as caught:
        connect([one], 0)
    assert str(caught.value) == f"rank 1: communicator of world: {first}{reported}"
