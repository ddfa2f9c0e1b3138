"""The neighbours of a rank on its host notice that it was killed."""

import os
import queue
import signal
import time

import pytest

from megafrontier.launch.health.peer_monitor import PeerMonitor
from megafrontier.parallel.env import Identity


def identity(rank, port):
    return Identity(rank, 8, rank, "slurm", f"tcp://frontier00001:{port}", "frontier00001")


def be_a_neighbour(who, writer):
    """Run a child that is a neighbour until it is killed, or leaves in order on SIGTERM."""
    try:
        beside = PeerMonitor(who)
        signal.signal(signal.SIGTERM, lambda *_: (beside.leave(), os._exit(0)))
        os.write(writer, b".")
        time.sleep(60)
    finally:
        os._exit(1)


@pytest.fixture
def others():
    """Process ids of ranks 1 and 3."""
    children = {}
    for rank in (1, 3):
        reader, writer = os.pipe()
        children[rank] = os.fork()
        if children[rank] == 0:
            be_a_neighbour(identity(rank, os.getppid()), writer)
        os.close(writer)
        assert os.read(reader, 1) == b"."
        os.close(reader)
    yield children
    for child in children.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("rank", "victim", "how", "noticed"),
    [
        (2, 1, signal.SIGKILL, [1]),
        (2, 3, signal.SIGKILL, [3]),
        (2, 3, signal.SIGTERM, []),
        (4, 1, signal.SIGKILL, []),
        (4, 3, signal.SIGKILL, [3]),
    ],
)
def test_a_killed_neighbour_is_noticed_at_once(others, rank, victim, how, noticed):
    heard = queue.Queue()
    me = PeerMonitor(identity(rank, os.getpid()))
    me.start(heard.put)
    os.kill(others[victim], how)
    found = []
    try:
        while True:
            found.append(heard.get(timeout=5 if len(found) < len(noticed) else 0.3))
    except queue.Empty:
        pass
    me.leave()
    assert found == noticed


def test_leaving_is_told_to_all_neighbours_though_one_left_before():
    heard = queue.Queue()
    first, middle, last = (PeerMonitor(identity(rank, os.getpid())) for rank in (4, 5, 6))
    first._connect(5).close()
    last.start(heard.put)
    middle.leave()
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.3)
    first.leave()
    last.leave()


def test_runs_on_one_host_do_not_monitor_each_other(others):
    heard = queue.Queue()
    PeerMonitor(identity(2, 1)).start(heard.put)
    os.kill(others[1], signal.SIGKILL)
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.3)
