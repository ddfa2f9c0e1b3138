"""Connect a rank to its peers level by level, and measure the links with short timed exchanges."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megafrontier.common.errors import Unconnected
from megafrontier.parallel.hierarchy import Hierarchy

REPEATS = 4
"""Exchanges with a peer. The fastest counts: the first one opens the connection, and others may be
disturbed."""


def ring_peers(index: int, size: int) -> list[int | None]:
    """The peers that peer `index` of a ring of `size` meets, one a round; None for no peer.

    Every peer meets both its neighbours (the other one, of two peers), one at a time. A peer whose
    own link is bad is then slow with both. A good peer next to it is slow only with that one.
    """
    met: list[int | None] = [None] * (1 if size == 2 else 2 + size % 2)
    for edge, peer in ((index, index + 1), ((index - 1) % size, index - 1)):
        is_odd_one = size % 2 == 1 and edge == size - 1
        met[2 if is_odd_one else edge % min(2, len(met))] = peer % size
    return met


@contextmanager
def explain_unconnected(what: str) -> Iterator[None]:
    """Raise Unconnected, with one line, for a RuntimeError of torch's backends in the body."""
    try:
        yield
    except RuntimeError as error:
        raise Unconnected(f"{what}: {_one_line(str(error))}") from error


def _one_line(text: str) -> str:
    """The first line of an error. NCCL and RCCL have only its kind there, and the cause after the
    line "Last error:"."""
    first = text.splitlines()[0]
    last = text.partition("\nLast error:\n")[2].strip().splitlines()
    return f"{first}: {last[0]}" if last else first


def connect(hierarchies: Sequence[Hierarchy], level: int) -> None:
    """Create the communicators of a level, of these hierarchies and of the world. All ranks must
    call this. Raises Unconnected.

    NCCL and RCCL would create a communicator in its first exchange, for which all ranks of the
    group wait; no rank could then say for which peer it waits. No links are opened here yet. gloo
    connects a group when it is created.
    """
    first = hierarchies[0]
    name, world, device = first.levels.names[level], first.world, first.device
    if device.type != "cuda":
        return
    groups = [found.groups[level] for found in hierarchies]  # some hierarchies share a group
    for number, group in enumerate([*groups, world.groups[level]]):
        if group is not None and all(group is not other for other in groups[:number]):
            with explain_unconnected(f"rank {world.rank}: communicator of {name}"):
                backend = group._get_backend(device)  # torch has no public name for it
                backend.eager_connect_single_device(device)


def measure(hierarchy: Hierarchy, level: int, size_bytes: int) -> float:
    """The bandwidth over `level` in GB/s, of the better of this rank's links, in one direction
    while both are in use. Infinite for a level of one rank.

    All ranks must call this. Raises Unconnected.
    """
    group = hierarchy.groups[level]
    if group is None:
        return float("inf")
    peers = hierarchy.peers[level]
    send = torch.zeros(size_bytes, dtype=torch.uint8, device=hierarchy.device)
    receive = torch.empty_like(send)
    met = ring_peers(hierarchy.coordinates[level], len(peers))
    name = f"link {hierarchy.levels.names[level]}"
    seconds = []
    for peer in (peers[index] for index in met if index is not None):
        what = f"rank {hierarchy.world.rank}: {name} to rank {peer}"
        with explain_unconnected(what), hierarchy.world.status.doing(name, peer):
            seconds += [exchange(peer, send, receive, group) for _ in range(REPEATS)]
    return size_bytes / min(seconds) / 1e9


def exchange(
    peer: int, send: torch.Tensor, receive: torch.Tensor, group: dist.ProcessGroup
) -> float:
    """The seconds it takes to send a tensor to a peer and to receive one of the same size."""
    begin = time.perf_counter()
    # The receive comes first. gloo tells the sender that this rank is ready, and after a send that
    # message would wait behind the data, so that one direction would follow the other.
    ops = [dist.P2POp(dist.irecv, receive, peer, group), dist.P2POp(dist.isend, send, peer, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if send.device.type == "cuda":
        torch.cuda.synchronize(send.device)
    return time.perf_counter() - begin
