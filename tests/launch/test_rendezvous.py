"""How ranks meet at a store, connect, fit their hosts, and leave."""

import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megafrontier.common.errors import PeersLost, UserError
from megafrontier.launch import rendezvous
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.launch.health.watchdog import Watchdog
from megafrontier.launch.local import fork_ranks
from megafrontier.launch.rendezvous import join
from megafrontier.parallel.env import Identity, identify
from megafrontier.parallel.mesh import MeshShape
from scripts.benchmarks.shared.measuring import free_port
from tests.processes import in_child
from tests.ranks import make_levels

CPU = torch.device("cpu")


@pytest.fixture
def limited(monkeypatch):
    """The limits of open files of a process, which a test sets; those of this one stay."""
    limits = {}

    def prlimit(process, _resource, values=None):
        before = limits[process]
        limits[process] = values or before
        return before

    monkeypatch.setattr(resource, "prlimit", prlimit)
    return limits


def first_of(ranks):
    return Identity(0, ranks, 0, "slurm", "tcp://nowhere:1", "frontier00001")


def test_the_owner_of_the_store_may_open_as_many_sockets_as_the_system_allows(limited):
    """48 nodes need more than the usual limit."""
    limited[os.getpid()] = 1024, 131072
    rendezvous.check_sockets(first_of(48 * 8))
    assert limited[os.getpid()] == (131072, 131072)


def test_too_few_open_files_for_all_ranks_are_refused_before_ranks_meet(limited, monkeypatch):
    limited[os.getpid()] = limited[os.getppid()] = 1024, 131072
    rendezvous.check_sockets(first_of(5450 * 8))
    why = r"ulimit -Hn: 131072 open files on frontier00001, need 3 for each rank, 226048 for 75264"
    with pytest.raises(UserError, match=f"^{why} ranks$"):
        rendezvous.check_sockets(first_of(9408 * 8))
    # The other ranks own no store.
    rendezvous.check_sockets(replace(first_of(9408 * 8), rank=1))
    limited[os.getpid()] = 1024, 1024
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun's own process does
    rendezvous.check_sockets(first_of(48 * 8))
    limited[os.getpid()] = 1024, resource.RLIM_INFINITY
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    rendezvous.check_sockets(first_of(9408 * 8))


def connections_to(port):
    """The number of this process's TCP connections to a port of any host."""
    inodes = set()
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            inodes.add(os.readlink(f"/proc/self/fd/{file}").removeprefix("socket:[").rstrip("]"))
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(f[9] in inodes and int(f[2].rpartition(":")[2], 16) == port for f in lines)


def test_a_rank_connects_to_the_store_as_often_as_the_check_of_the_limit_says(tmp_path):
    def body():
        identity = identify(os.environ)
        timeouts = Timeouts.of(2)
        with (
            closing(Watchdog(identity, tmp_path / "run", timeouts)) as watchdog,
            join(identity, MeshShape(make_levels((1, 2))), CPU, timeouts, watchdog.start) as mesh,
        ):
            port = int(identity.rendezvous.rpartition(":")[2])
            (tmp_path / str(identity.rank)).write_text(str(connections_to(port)))
            mesh.world.barrier()
        return 0

    assert fork_ranks(2, body) == 0
    assert (tmp_path / "1").read_text() == str(rendezvous.STORE_SOCKETS)


def within(seconds):
    return replace(Timeouts.of(2), arrive=seconds)


def test_a_run_with_the_address_of_another_does_not_disturb_it():
    place = f"tcp://127.0.0.1:{free_port()}"

    def meet(rank, start):
        identity = Identity(rank, 2, 0, "slurm", place, f"host{rank}", start)
        try:
            return rendezvous._meet(identity, within(3)).first_host
        except PeersLost as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(meet, *who) for who in ((0, "run"), (1, "another"), (1, "run"))]
    first, lost, second = (future.result() for future in found)
    assert first == second == "host0"
    assert lost.startswith(f"rank 0: no answer at {place}: ")


def test_a_port_in_use_is_reported_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            PeersLost, match=f"rank 0: cannot wait at {place}: .*another MASTER_PORT"
        ):
            rendezvous._meet(Identity(0, 2, 0, "slurm", place, "here"), within(5))


def test_a_rank_waits_for_rank_0_no_longer_than_the_limit():
    """torch itself tries several times, each time for the whole limit."""

    def body():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            place = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            who = Identity(1, 2, 1, "slurm", place, "here")
            said = f"rank 0: no answer at {place}: no store within 0.1 s"
            with pytest.raises(PeersLost, match=said):
                rendezvous._meet(who, within(0.1))
        return True

    assert in_child(body) == 0


def test_groups_that_cannot_be_aborted_do_not_block_a_failed_rank(monkeypatch):
    end, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(rendezvous, "GIVE_UP_GROUPS", 0.1)
    monkeypatch.setattr(
        dist.distributed_c10d, "_abort_process_group", lambda: (end.wait(), ended.set())
    )
    rendezvous.give_up(torch.device("cuda"))
    assert not ended.is_set()
    end.set()
    assert ended.wait(10), "it had begun"


def test_the_groups_of_levels_have_the_timeout_of_collectives(tmp_path, monkeypatch):
    """Groups do not inherit it, and NCCL's default is 10 minutes."""
    found = []
    new_group = dist.new_group

    def noting(*arguments, **options):
        found.append(options["timeout"].total_seconds())
        return new_group(*arguments, **options)

    monkeypatch.setattr(dist, "new_group", noting)

    def body():
        identity = identify(os.environ)
        with join(
            identity, MeshShape(make_levels((2, 1, 2))), CPU, replace(Timeouts.of(4), collective=77)
        ):
            (tmp_path / str(identity.rank)).write_text(str(found))
        return 0

    assert fork_ranks(4, body) == 0
    assert {path.read_text() for path in tmp_path.iterdir()} == {str([77.0] * 4)}


@pytest.mark.parametrize(("device", "way"), [("cpu", "destroyed"), ("cuda", "aborted")])
def test_a_failed_rank_aborts_the_groups_of_a_device(device, way, monkeypatch):
    """NCCL's orderly end would wait for collectives that lost peers never finish."""
    ends = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ends.append("destroyed"))
    monkeypatch.setattr(
        dist.distributed_c10d, "_abort_process_group", lambda: ends.append("aborted")
    )
    rendezvous.give_up(torch.device(device))
    assert ends == [way]


@pytest.mark.parametrize(
    ("hosts", "sizes"), [("aabb", (2, 2)), ("aaaa", (2, 2)), ("abcd", (2, 2)), ("aabb", (2, 1, 2))]
)
def test_levels_that_fit_the_hosts_are_accepted(hosts, sizes):
    rendezvous.check_hosts(make_levels(sizes), list(hosts))


@pytest.mark.parametrize(
    ("hosts", "sizes", "said"),
    [
        ("aabb", (4,), "world 4, but hosts have 2, 2 ranks in a row; need the same number"),
        ("aaab", (2, 2), "pair 2 × world 2, but hosts have 3, 1 ranks in a row"),
        ("aabc", (2, 2), "hosts have 2, 1, 1 ranks"),
        ("abab", (2, 2), "hosts have 1, 1, 1, 1 ranks"),
        ("aaabbb", (2, 3), "hosts have 3, 3 ranks"),
    ],
)
def test_levels_that_do_not_fit_the_hosts_are_refused(hosts, sizes, said):
    with pytest.raises(UserError, match=rf"^machine\.levels: .*{said}"):
        rendezvous.check_hosts(make_levels(sizes), list(hosts))


def test_all_ranks_raise_alike_if_levels_do_not_fit_the_hosts(tmp_path):
    def body():
        identity = identify(os.environ)
        identity = replace(identity, host="aabc"[identity.rank])
        with (
            pytest.raises(UserError) as caught,
            join(identity, MeshShape(make_levels((2, 2))), CPU),
        ):
            pass
        (tmp_path / str(identity.rank)).write_text(str(caught.value))
        return 0

    assert fork_ranks(4, body) == 0
    (reported,) = {path.read_text() for path in tmp_path.iterdir()}
    assert "need the same number of consecutive ranks on every host" in reported


def test_another_number_of_ranks_than_in_the_levels_is_refused_before_meeting():
    identity = Identity(0, 8, 0, "local", "tcp://nowhere:1")
    with (
        pytest.raises(UserError, match="hold 4 ranks, but 8 were started"),
        join(identity, MeshShape(make_levels((2, 2))), CPU),
    ):
        pass


def test_a_single_process_creates_no_process_group():
    with join(Identity(0, 1, 0, "alone"), MeshShape(make_levels((1, 1))), CPU) as mesh:
        assert not dist.is_initialized()
        assert mesh.world.size == 1
