"""How ranks meet: in which store, and what the process that has it must be able to hold."""

import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megafrontier.common.errors import PeersLost, UserError
from megafrontier.launch import rendezvous
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.parallel.env import Identity


@pytest.fixture
def limits(monkeypatch):
    """The limits of open files that are set, of which process, under a hard one of 10,000."""
    found = []

    def prlimit(process, _kind, *limits):
        found.extend((process, *limit) for limit in limits)
        return (1024, 10_000)

    monkeypatch.setattr(resource, "prlimit", prlimit)
    return found


def test_rank_0_may_open_as_many_sockets_as_ranks_connect(limits):
    """48 nodes need more than the common soft limit."""
    rendezvous._allow_sockets(rendezvous._SOCKETS * 384, is_first=True)
    assert limits == [(os.getpid(), 3 * 384 + rendezvous._OTHER_FILES, 10_000)]


def test_where_torchrun_has_the_store_its_limit_is_raised(limits, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    rendezvous._allow_sockets(rendezvous._SOCKETS * 384, is_first=True)
    assert limits == [(os.getppid(), 3 * 384 + rendezvous._OTHER_FILES, 10_000)]


def test_the_limits_of_other_ranks_stay(limits):
    rendezvous._allow_sockets(rendezvous._SOCKETS * 384, is_first=False)
    assert limits == []


def test_a_limit_that_is_enough_stays(limits):
    rendezvous._allow_sockets(rendezvous._SOCKETS * 8, is_first=True)
    assert limits == []


@pytest.mark.parametrize("is_first", [True, False])
def test_a_hard_limit_below_is_named_by_all_ranks(limits, is_first):
    """Rank 0 needs them; the others, who would wait for it in vain, have the same limit."""
    with pytest.raises(UserError, match=r"ulimit -n: at most 10000 open files .*, need 29312 for"):
        rendezvous._allow_sockets(rendezvous._SOCKETS * 9600, is_first)


@pytest.fixture
def agent(monkeypatch):
    """torchrun's store, which outlives what it starts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def within(seconds):
    return replace(Timeouts.of(2), arrive=seconds)


def meet(*ranks):
    """What each of these ranks comes to: whom it missed, or how it failed."""

    def one(identity):
        try:
            return rendezvous._open_store(identity, within(20)).meet(3)
        except (PeersLost, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def started(rank, start="run", restarts=0, is_counted=True):
    return Identity(rank, 2, 0, "torchrun", "env://", f"host{rank}", start, restarts, is_counted)


def test_a_rank_that_comes_to_another_runs_store_leaves_and_the_run_does_not_hear_of_it(agent):
    *here, lost = meet(started(0), started(1), started(1, "another"))
    assert here == [[], []]
    assert isinstance(lost, PeersLost)
    assert "meets another run (run); need another MASTER_PORT" in str(lost)


def test_a_port_that_another_process_has_is_told_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            PeersLost, match=f"rank 0: cannot wait at {place}: .*another MASTER_PORT"
        ):
            rendezvous._meet(Identity(0, 2, 0, "slurm", place, "here"), within(5))


def test_a_rank_waits_for_rank_0_no_longer_than_it_was_told(monkeypatch):
    """torch tries to connect a second time, and as long again."""
    is_over = threading.Event()

    def answer_late(place, timeout):
        is_over.wait(20)
        raise RuntimeError("late")

    monkeypatch.setattr(rendezvous, "rendezvous", answer_late)
    who = Identity(1, 2, 1, "slurm", "tcp://nowhere:1", "here")
    with pytest.raises(
        PeersLost, match=r"rank 0: no answer at tcp://nowhere:1: no store within 0.1 s"
    ):
        rendezvous._meet(who, within(0.1))
    is_over.set()


def test_ranks_meet_whose_agents_of_torchrun_have_counted_different_restarts(agent):
    """An agent whose ranks are well starts them anew where another's were lost, and does not count
    that."""
    for restarts in (0, 1):
        again = started(0, is_counted=False), started(1, restarts=restarts, is_counted=False)
        assert meet(*again) == [[], []]


def test_groups_that_cannot_be_given_up_do_not_keep_a_rank_that_failed(monkeypatch):
    end, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(rendezvous, "GIVE_UP_GROUPS", 0.1)
    monkeypatch.setattr(
        dist.distributed_c10d, "_abort_process_group", lambda: (end.wait(), ended.set())
    )
    rendezvous.give_up(torch.device("cuda"))
    assert not ended.is_set()
    end.set()
    assert ended.wait(10), "it had begun"
