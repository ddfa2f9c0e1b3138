"""Ranks meet on levels, agree to the bit, and refuse levels that hosts cut through."""

import errno
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megafrontier.common.errors import LOST, StorageFailed, UserError
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.launch.local import fork_ranks
from megafrontier.launch.rendezvous import give_up, join
from megafrontier.parallel import groups
from megafrontier.parallel.env import Identity, identify
from megafrontier.parallel.hierarchy import Hierarchy
from tests.ranks import make_levels, run_ranks

CPU = torch.device("cpu")
LONG = "é€😀 " * 700 + "the end"


def fail_on(rank):
    if rank == 4:
        raise OSError(errno.ESTALE, "Stale file handle", "/lustre/x")
    if rank == 6:
        raise UserError("later")


def ended(act):
    try:
        return act()
    except (UserError, StorageFailed) as error:
        return f"{error.code} {error}"


def agreements(hierarchy):
    """Everything that ranks agree on, for one set of ranks."""
    world, rank = hierarchy.world, hierarchy.rank
    values = torch.tensor([0.1 * (rank + 1), 1e16 if rank == 0 else -1.0, 1 / 3])
    values = values.double()
    kept = values.clone()
    found = {
        "sum": [x.hex() for x in world.sum(values).tolist()],
        "argument untouched": bool((values == kept).all()),
        "gather": world.gather(torch.tensor([rank, 0.5]).double()).tolist(),
        "maximum": world.maximum(torch.tensor([rank, -rank, 5])).tolist(),
        "all": (world.all_true(True), world.all_true(rank != 5)),
        "no error": world.first_error(None),
        "one": world.first_error("only six" if rank == 6 else None),
        "several": world.first_error(f"rank {rank}" if rank in (3, 4, 7) else None),
        "long": world.first_error(LONG if rank == 7 else "no" * 9000 if rank > 7 else None),
        "empty": world.first_error("" if rank == 2 else None),
        "together": world.run_on_all(lambda: rank),
        "not together": ended(lambda: world.run_on_all(partial(fail_on, rank))),
        "sum and maximum": [
            found.tolist()
            for found in world.sum_and_maximum(
                torch.tensor([rank, 1.0]).double(), torch.tensor([rank % 5, -rank]).double()
            )
        ],
        "piece": [hierarchy.shard_index(depth) for depth in range(4)],
        "first replica": [hierarchy.is_first_replica(depth) for depth in range(4)],
    }
    return found


@pytest.fixture(scope="module")
def agreed():
    return run_ranks((2, 2, 2), agreements)


def test_a_sum_has_the_same_bits_on_every_rank(agreed):
    assert all(rank["sum"] == agreed[0]["sum"] for rank in agreed)
    assert float.fromhex(agreed[0]["sum"][0]) == pytest.approx(3.6)
    assert all(rank["argument untouched"] for rank in agreed)


def test_what_is_gathered_lies_in_rank_order_on_every_rank(agreed):
    assert [rank["gather"] for rank in agreed] == [[[rank, 0.5] for rank in range(8)]] * 8


def test_a_maximum_is_the_largest_of_all_ranks(agreed):
    assert [rank["maximum"] for rank in agreed] == [[7, 0, 5]] * 8


def test_all_true_needs_every_rank(agreed):
    assert [rank["all"] for rank in agreed] == [(True, False)] * 8


def test_the_lowest_ranks_error_reaches_every_rank_whole(agreed):
    for rank in agreed:
        assert rank["no error"] is None
        assert rank["one"] == "only six"
        assert rank["several"] == "rank 3"
        assert rank["long"] == LONG
        assert len(rank["long"]) > 2000
        assert rank["empty"] == ""


def test_what_one_rank_meets_all_raise_and_else_each_has_its_own(agreed):
    assert [found["together"] for found in agreed] == list(range(8))
    assert {found["not together"] for found in agreed} == {f"{LOST} /lustre/x: Stale file handle"}


def test_sums_and_maxima_come_in_one_message(agreed):
    assert [found["sum and maximum"] for found in agreed] == [[[28, 8], [4, 0]]] * 8


def test_pieces_are_numbered_fastest_level_first_and_each_has_one_first_replica(agreed):
    # rank 6 = pair 0, node 1, world 1
    assert agreed[6]["piece"] == [(0, 1), (0, 2), (1, 4), (3, 8)]
    for depth, pieces in enumerate((1, 2, 4, 8)):
        firsts = [r["piece"][depth] for r in agreed if r["first replica"][depth]]
        assert sorted(firsts) == [(number, pieces) for number in range(pieces)]


def test_a_level_of_one_rank_has_no_group():
    def body(hierarchy):
        return [group is None for group in hierarchy.groups], hierarchy.world.sum(
            torch.ones(1)
        ).item()

    assert run_ranks((1, 2, 1), body) == [([True, False, True], 2.0)] * 2


def test_the_groups_of_levels_have_the_timeout_that_was_asked_for(tmp_path, monkeypatch):
    """They do not inherit it: NCCL would end them after 10 minutes, whatever the config says."""
    found = []
    new_group = dist.new_group

    def noting(*arguments, **options):
        found.append(options["timeout"].total_seconds())
        return new_group(*arguments, **options)

    monkeypatch.setattr(dist, "new_group", noting)

    def body():
        identity = identify(os.environ)
        with join(identity, make_levels((2, 1, 2)), CPU, replace(Timeouts.of(4), collective=77)):
            (tmp_path / str(identity.rank)).write_text(str(found))
        return 0

    assert fork_ranks(4, body) == 0
    assert {path.read_text() for path in tmp_path.iterdir()} == {str([77.0] * 4)}


@pytest.mark.parametrize(("device", "way"), [("cpu", "destroyed"), ("cuda", "aborted")])
def test_a_rank_that_fails_does_not_wait_on_a_device_for_the_others(device, way, monkeypatch):
    """NCCL's orderly end waits for collectives that peers who are gone never finish."""
    ends = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ends.append("destroyed"))
    monkeypatch.setattr(
        dist.distributed_c10d, "_abort_process_group", lambda: ends.append("aborted")
    )
    give_up(torch.device(device))
    assert ends == [way]


def meet(hosts, sizes, folder):
    """What each rank is told that comes to these levels from these hosts; "" is welcome."""
    levels = make_levels(sizes)

    def body():
        identity = identify(os.environ)
        identity = replace(identity, host=hosts[identity.rank])
        told = ""
        try:
            with join(identity, levels, CPU):
                pass
        except UserError as error:
            told = str(error)
        (folder / str(identity.rank)).write_text(told)
        return 0

    assert fork_ranks(len(hosts), body) == 0
    return [(folder / str(rank)).read_text() for rank in range(len(hosts))]


@pytest.mark.parametrize(
    ("hosts", "sizes"),
    [
        ("aabb", (2, 2)),
        ("aaaa", (2, 2)),
        ("abcd", (2, 2)),
        ("aabb", (2, 1, 2)),
    ],
)
def test_levels_that_hosts_do_not_cut_are_accepted(hosts, sizes, tmp_path):
    assert set(meet(hosts, sizes, tmp_path)) == {""}


@pytest.mark.parametrize(
    ("hosts", "sizes", "reason"),
    [
        ("aabb", (4,), "world 4, but every host has 2 ranks, which cuts through a level"),
        ("aaab", (2, 2), "4 ranks, of which the first host has 3 in a row"),
        ("aabc", (2, 2), "the first host has 2 in a row and others another number"),
        ("abab", (2, 2), "need the same number of consecutive ranks on every host"),
        ("abba", (2, 2), "need the same number of consecutive ranks on every host"),
        ("aaabbb", (2, 3), "pair 2 × world 3, but every host has 3 ranks"),
    ],
)
def test_levels_that_hosts_cut_are_refused_on_every_rank(hosts, sizes, reason, tmp_path):
    (told,) = set(meet(hosts, sizes, tmp_path))
    assert told.startswith("machine.levels: ")
    assert reason in told


def test_another_number_of_ranks_than_the_levels_hold_is_refused_before_meeting():
    with (
        pytest.raises(UserError, match="hold 4 ranks, but 8 were started"),
        join(Identity(0, 8, 0, "local", "file:///nowhere/at/all"), make_levels((2, 2)), CPU),
    ):
        pass


def test_one_process_alone_starts_no_process_group():
    with join(Identity(0, 1, 0, "alone"), make_levels((1, 1)), CPU) as hierarchy:
        assert not dist.is_initialized()
        assert hierarchy.world.sum(torch.ones(2)).tolist() == [1, 1]
        assert hierarchy.world.first_error("mine") == "mine"
        assert isinstance(hierarchy, Hierarchy)


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
