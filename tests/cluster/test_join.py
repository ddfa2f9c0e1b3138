"""How ranks meet: what rank 0's process must be able to hold."""

import resource
import threading

import pytest
import torch
import torch.distributed as dist

from megafrontier.cluster import join
from megafrontier.errors import UserError


@pytest.fixture
def limits(monkeypatch):
    """The limits of open files that are set, under a hard one of 10,000."""
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 10_000))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: found.append(limits))
    return found


def test_rank_0_may_open_as_many_sockets_as_ranks_connect(limits):
    """48 nodes need more than the common soft limit."""
    join._allow_sockets(join.SOCKETS * 384, is_first=True)
    assert limits == [(3 * 384 + join.SPARE_FILES, 10_000)]


def test_the_limits_of_other_ranks_stay(limits):
    join._allow_sockets(join.SOCKETS * 384, is_first=False)
    assert limits == []


def test_a_limit_that_is_enough_stays(limits):
    join._allow_sockets(join.SOCKETS * 8, is_first=True)
    assert limits == []


@pytest.mark.parametrize("is_first", [True, False])
def test_a_hard_limit_below_is_named_by_all_ranks(limits, is_first):
    """Rank 0 needs them; the others, who would wait for it in vain, have the same limit."""
    with pytest.raises(UserError, match=r"ulimit -n: at most 10000 open files .*, need 29312 for"):
        join._allow_sockets(join.SOCKETS * 9600, is_first)


def test_groups_that_cannot_be_given_up_do_not_keep_a_rank_that_failed(monkeypatch):
    end, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(join, "ABORT_SECONDS", 0.1)
    monkeypatch.setattr(
        dist.distributed_c10d, "_abort_process_group", lambda: (end.wait(), ended.set())
    )
    join.give_up(torch.device("cuda"))
    assert not ended.is_set()
    end.set()
    assert ended.wait(10), "it had begun"
