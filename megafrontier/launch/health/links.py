"""How fast this rank's links are, level by level: short timed exchanges with its neighbours."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megafrontier.common.errors import Unconnected
from megafrontier.parallel.hierarchy import Hierarchy

REPEATS = 4
"""The best of them counts: the first opens the connection, and others may be disturbed."""


def neighbours(index: int, size: int) -> list[int | None]:
    """Whom peer `index` of `size` in a ring meets in each round; None: nobody.

    Everybody meets both its neighbours (of two peers, the other one), one at a time. So a peer
    whose own link is bad is slow with both, and a good one next to it with one only.
    """
    met: list[int | None] = [None] * (1 if size == 2 else 2 + size % 2)
    for edge, peer in ((index, index + 1), ((index - 1) % size, index - 1)):
        is_odd_one = size % 2 == 1 and edge == size - 1
        met[2 if is_odd_one else edge % min(2, len(met))] = peer % size
    return met


@contextmanager
def reaching(what: str) -> Iterator[None]:
    """That a rank does not reach others is no bug: Unconnected says so in one line."""
    try:
        yield
    except RuntimeError as error:  # torch's, of every backend
        raise Unconnected(f"{what}: {_in_a_line(str(error))}") from error


def _in_a_line(text: str) -> str:
    """The first line of an error, which of NCCL's and RCCL's says of what kind it is, and what is
    wrong, which stands further down there."""
    first = text.splitlines()[0]
    last = text.partition("\nLast error:\n")[2].strip().splitlines()
    return f"{first}: {last[0]}" if last else first


def connect(hierarchy: Hierarchy, level: int) -> None:
    """Have NCCL or RCCL make a level's communicators, which they would do at their first exchange,
    of whichever two: there all of the group wait for each other, and nobody may claim to wait for
    one peer. Links are not opened for it yet. All ranks call it. Raises Unconnected.

    With gloo a group is connected when it is made.
    """
    if hierarchy.device.type != "cuda":
        return
    name = hierarchy.levels.names[level]
    for group in (hierarchy.groups[level], hierarchy.world.groups[level]):
        if group is not None:
            with reaching(f"rank {hierarchy.world.rank}: communicator of {name}"):
                backend = group._get_backend(hierarchy.device)  # torch has no public name for it
                backend.eager_connect_single_device(hierarchy.device)


def measure(hierarchy: Hierarchy, level: int, size_bytes: int) -> float:
    """Gigabytes per second, one direction while the other is in use as well, of the better of this
    rank's links over `level`; infinite where the level has one rank. All ranks call it. Raises
    Unconnected."""
    group = hierarchy.groups[level]
    if group is None:
        return float("inf")
    peers = hierarchy.levels.peers(hierarchy.rank, level)
    out = torch.zeros(size_bytes, dtype=torch.uint8, device=hierarchy.device)
    into = torch.empty_like(out)
    met = neighbours(hierarchy.coordinates[level], len(peers))
    seconds = []
    for peer in (peers[index] for index in met if index is not None):
        name = f"link {hierarchy.levels.names[level]}"
        whom = f"rank {hierarchy.world.rank}: {name} to rank {peer}"
        with reaching(whom), hierarchy.world.status.doing(name, peer):
            seconds += [_exchange(peer, out, into, group) for _ in range(REPEATS)]
    return size_bytes / min(seconds) / 1e9


def _exchange(peer: int, out: torch.Tensor, into: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds to send `out` to a rank and to receive as much."""
    begin = time.perf_counter()
    both = [dist.P2POp(dist.isend, out, peer, group), dist.P2POp(dist.irecv, into, peer, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    if out.device.type == "cuda":
        torch.cuda.synchronize(out.device)
    return time.perf_counter() - begin
