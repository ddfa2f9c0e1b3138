"""The groups of a rank share one thread, and torch may watch them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megafrontier.parallel import groups
from tests.ranks import run_ranks

LEVELS = (2, 1, 2)


def threads_on_sockets(hierarchy):
    """How many threads this rank has, after a collective of each group, beside its own and the two
    in which torch runs each group's collectives."""
    hierarchy.world.all_true(True)
    own = [group for group in hierarchy.groups if group is not None]
    for group in own:
        dist.all_reduce(torch.ones(1), group=group)
    all_groups = 1 + 2 * len(own)  # the world, and as many for control
    return len(list(Path("/proc/self/task").iterdir())) - 1 - 2 * all_groups


def test_one_thread_a_rank_waits_on_the_sockets_of_all_its_groups():
    """torch would start one a group, and each wakes a hundred times a second."""
    assert run_ranks(LEVELS, threads_on_sockets) == [1] * 4


@pytest.fixture
def watching():
    """As `TORCH_DISTRIBUTED_DEBUG=DETAIL`, which torch has read by now."""
    kept = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    yield
    dist.set_debug_level(kept)


def test_groups_work_where_torch_watches_every_collective(watching):
    sums = run_ranks(LEVELS, lambda hierarchy: hierarchy.world.sum(torch.ones(1).double()).item())
    assert sums == [4.0] * 4


@pytest.mark.parametrize("known", ["all_gather_single", "all_gather_into_tensor"])
def test_the_gather_of_old_and_of_new_torch_is_found(monkeypatch, known):
    calls = []

    def gather(out, shard, group):
        calls.append((out, shard, group))

    names = SimpleNamespace(**{known: gather}, all_to_all_single=None)
    monkeypatch.setattr(groups, "_all_gather", groups.find_all_gather(names))
    groups.all_gather(torch.zeros(2), torch.zeros(1), "group")
    assert calls[0][2] == "group"


def test_where_torch_has_both_names_the_old_one_which_warns_is_not_called():
    names = SimpleNamespace(all_gather_single="new", all_gather_into_tensor="old")
    assert groups.find_all_gather(names) == "new"
