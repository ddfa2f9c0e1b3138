"""What all ranks agree on: sums to the bit, the first error, and what each is doing."""

import errno
from functools import partial

import pytest
import torch

from megafrontier.common.errors import LOST, StorageFailed, UserError
from megafrontier.parallel.world import Operation, RankStatus, World
from tests.ranks import run_ranks

LONG = "é€😀 " * 700 + "the end"


def fail_on(rank):
    if rank == 2:
        raise OSError(errno.ESTALE, "Stale file handle", "/lustre/x")
    if rank == 3:
        raise UserError("later")


def ended(act):
    try:
        return act()
    except (UserError, StorageFailed) as error:
        return f"{error.code} {error}"


def agreements(hierarchy):
    """Everything that ranks agree on, for one set of ranks."""
    world, rank = hierarchy.world, hierarchy.rank
    values = torch.tensor([0.1 * (rank + 1), 1e16 if rank == 0 else -1.0, 1 / 3]).double()
    kept = values.clone()
    sums, maxima = torch.tensor([rank, 1.0]).double(), torch.tensor([rank % 3, -rank]).double()
    return {
        "sum": [x.hex() for x in world.sum(values).tolist()],
        "argument untouched": bool((values == kept).all()),
        "gather": world.gather(torch.tensor([rank, 0.5]).double()).tolist(),
        "maximum": world.maximum(torch.tensor([rank, -rank, 5])).tolist(),
        "sum and maximum": [found.tolist() for found in world.sum_and_maximum(sums, maxima)],
        "all": (world.all_true(True), world.all_true(rank != 3)),
        "no error": world.first_error(None),
        "one": world.first_error("only two" if rank == 2 else None),
        "several": world.first_error(f"rank {rank}" if rank > 0 else None),
        "long": world.first_error(LONG if rank == 2 else "no" * 9000 if rank > 2 else None),
        "empty": world.first_error("" if rank == 1 else None),
        "run on all": world.run_on_all(lambda: rank),
        "failed": ended(lambda: world.run_on_all(partial(fail_on, rank))),
        "broadcast": world.broadcast_from_rank_0(lambda: f"from {rank}"),
    }


@pytest.fixture(scope="module")
def agreed():
    return run_ranks((2, 2), agreements)


def test_a_sum_has_the_same_bits_on_every_rank(agreed):
    assert all(rank["sum"] == agreed[0]["sum"] for rank in agreed)
    assert float.fromhex(agreed[0]["sum"][0]) == pytest.approx(1.0)
    assert all(rank["argument untouched"] for rank in agreed)


def test_gathered_values_are_in_rank_order_on_every_rank(agreed):
    assert [rank["gather"] for rank in agreed] == [[[rank, 0.5] for rank in range(4)]] * 4


def test_a_maximum_is_the_largest_of_all_ranks(agreed):
    assert [rank["maximum"] for rank in agreed] == [[3, 0, 5]] * 4
    assert [rank["sum and maximum"] for rank in agreed] == [[[6, 4], [2, 0]]] * 4


def test_all_true_needs_every_rank(agreed):
    assert [rank["all"] for rank in agreed] == [(True, False)] * 4


def test_the_lowest_ranks_error_reaches_every_rank_complete(agreed):
    for rank in agreed:
        assert rank["no error"] is None
        assert rank["one"] == "only two"
        assert rank["several"] == "rank 1"
        assert rank["long"] == LONG
        assert rank["empty"] == ""


def test_all_ranks_raise_the_lowest_ranks_error_or_return_their_own_result(agreed):
    assert [found["run on all"] for found in agreed] == list(range(4))
    assert {found["failed"] for found in agreed} == {f"{LOST} /lustre/x: Stale file handle"}
    assert {found["broadcast"] for found in agreed} == {"from 0"}


def test_a_single_process_has_a_world_of_its_own():
    world = World.single()
    assert (world.rank, world.size) == (0, 1)
    assert world.sum(torch.ones(2)).tolist() == [1, 1]
    assert world.gather(torch.ones(2)).tolist() == [[1, 1]]
    assert world.first_error("mine") == "mine"
    assert (
        ended(lambda: world.run_on_all(partial(fail_on, 2)))
        == f"{LOST} /lustre/x: Stale file handle"
    )


def test_a_bug_of_one_rank_is_raised_by_it_as_it_is():
    with pytest.raises(ZeroDivisionError):
        World.single().run_on_all(lambda: 1 / 0)


def test_a_status_is_reset_unless_the_operation_fails():
    status = RankStatus()
    with status.doing("link world", 3):
        assert status.current == Operation("link world", 3)
    assert status.current == Operation()
    with pytest.raises(RuntimeError), status.doing("link world", 3):
        raise RuntimeError("reset by peer")
    assert status.current == Operation("link world", 3)
