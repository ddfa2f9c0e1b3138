"""Who is killed is noticed by the ranks beside it on its host, who leaves in order is not."""

import os
import queue
import signal
import time

import pytest

from megafrontier.cluster.identity import Identity
from megafrontier.cluster.neighbours import Neighbours


def identity(rank, port):
    return Identity(rank, 8, rank, "slurm", f"tcp://frontier00001:{port}", "frontier00001")


@pytest.fixture
def others():
    """Processes of ranks 1 to 3 beside one another; number and process of each."""
    children = {}
    for rank in (1, 2, 3):
        reader, writer = os.pipe()
        children[rank] = os.fork()
        if children[rank] == 0:
            beside = Neighbours(identity(rank, os.getppid()))
            signal.signal(signal.SIGTERM, lambda *_, beside=beside: (beside.leave(), os._exit(0)))
            os.write(writer, b".")
            time.sleep(60)
            os._exit(1)
        os.read(reader, 1)
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
def test_a_neighbour_that_is_killed_is_noticed_at_once(others, rank, victim, how, noticed):
    heard = queue.Queue()
    me = Neighbours(identity(rank, os.getpid()))
    me.watch(heard.put)
    os.kill(others[victim], how)
    found = []
    try:
        while True:
            found.append(heard.get(timeout=5 if len(found) < len(noticed) else 0.3))
    except queue.Empty:
        pass
    me.leave()
    assert found == noticed


def test_a_run_beside_another_one_does_not_hear_of_it(others):
    heard = queue.Queue()
    Neighbours(identity(2, 1)).watch(heard.put)
    os.kill(others[1], signal.SIGKILL)
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.3)
