"""The groups of a rank share a gloo device, and work under torch's debugging."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megafrontier.parallel import groups
from tests.ranks import run_ranks

LEVELS = (2, 1, 2)


def threads_on_sockets(hierarchy):
    """The threads of this rank after a collective of each group, without the main thread and the
    two in which torch runs each group's collectives."""
    hierarchy.world.barrier()
    own = [group for group in hierarchy.groups if group is not None]
    for group in own:
        dist.all_reduce(torch.ones(1), group=group)
    all_groups = 1 + 2 * len(own)  # the group of all ranks, and as many of the world
    return len(list(Path("/proc/self/task").iterdir())) - 1 - 2 * all_groups


def test_all_groups_of_a_rank_share_one_gloo_device():
    """torch would start a thread for each group, which wakes 100 times a second."""
    store = 1  # rank 0 has the thread of the store as well
    assert run_ranks(LEVELS, threads_on_sockets) == [1 + store, 1, 1, 1]


@pytest.fixture
def watching():
    """As with `TORCH_DISTRIBUTED_DEBUG=DETAIL`, which torch reads only when it is imported."""
    kept = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    yield
    dist.set_debug_level(kept)


def test_groups_work_with_torchs_debug_level_detail(watching):
    sums = run_ranks(LEVELS, lambda hierarchy: hierarchy.world.sum(torch.ones(1).double()).item())
    assert sums == [4.0] * 4


def test_the_all_gather_of_old_and_of_new_torch_is_found():
    old = SimpleNamespace(all_gather_into_tensor="old")
    assert groups.find_all_gather(old) == "old"
    both = SimpleNamespace(all_gather_single="new", all_gather_into_tensor="old, which warns")
    assert groups.find_all_gather(both) == "new"
