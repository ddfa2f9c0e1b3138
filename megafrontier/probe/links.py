"""Measure links: between ranks at growing distances, and the collectives that the engine uses.

Ranks are numbered in levels of prime sizes, those within a host first. On the level with stride d
a rank meets the one at distance d, so there are only as many measurements as the logarithm of the
number of ranks, and no rank opens more links than that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from megafrontier.common.buffers import empty
from megafrontier.launch.health.links import ring_peers
from megafrontier.parallel.groups import all_gather, all_to_all
from megafrontier.parallel.hierarchy import Hierarchy, Levels
from megafrontier.probe.device import average, fastest

SMALL, LARGE = 2**10, 2**22
"""Bytes of the messages that give latency and bandwidth."""


def prime_levels(ranks: int, per_host: int) -> Levels:
    """Levels of prime sizes that hold `ranks` ranks, those of a host first, by the stride between
    two neighbours."""
    sizes = [*_primes(per_host), *_primes(ranks // per_host)]
    names, stride = [], 1
    for size in sizes:
        names.append(f"stride-{stride}")
        stride *= size
    return Levels(tuple(names), tuple(sizes))


def _primes(number: int) -> list[int]:
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


@dataclass(frozen=True)
class Link:
    """A rank's link over a level, in SI units."""

    bytes_per_second: float
    latency_seconds: float


def measure_pairs(hierarchy: Hierarchy, large: int = LARGE) -> list[Link]:
    """This rank's link over each level, with all ranks side by side. All ranks call it."""
    found = []
    for level in range(len(hierarchy.levels.sizes)):
        small, whole = (_pair_seconds(hierarchy, level, size) for size in (SMALL, large))
        found.append(Link(large / max(whole - small, 1e-9), small))
    return found


def _pair_seconds(hierarchy: Hierarchy, level: int, size_bytes: int) -> float:
    """Of an exchange with a neighbour, the mean of both."""
    peers, group = hierarchy.peers[level], hierarchy.groups[level]
    hierarchy.world.barrier()
    met = ring_peers(hierarchy.coordinates[level], len(peers))
    seconds = [
        average(partial(_swap, peers[i], size_bytes, group, hierarchy.device), hierarchy.device)
        for i in met
        if i is not None
    ]
    return sum(seconds) / len(seconds)


def measure_alone(hierarchy: Hierarchy, level: int, size_bytes: int = LARGE) -> float | None:
    """Bytes a second over a level between the first rank and its neighbour, while all others are
    idle; None on those. All ranks call it."""
    world, group = hierarchy.world, hierarchy.groups[level]
    world.barrier()
    first, second = hierarchy.peers[level][:2]
    is_first_pair = all(c == 0 for i, c in enumerate(hierarchy.coordinates) if i != level)
    found = None
    if is_first_pair and world.rank in (first, second):
        other = second if world.rank == first else first
        found = size_bytes / fastest(
            partial(_swap, other, size_bytes, group, hierarchy.device), hierarchy.device
        )
    world.barrier()
    return found


def measure_collectives(hierarchy: Hierarchy, large: int = LARGE) -> list[dict[str, Link]]:
    """By level, what an all-gather and an all-to-all send a second, with all groups side by side.
    All ranks call it."""
    found = []
    for group, size in zip(hierarchy.groups, hierarchy.levels.sizes, strict=True):
        rates: dict[str, Link] = {}
        for name in _COLLECTIVES:
            hierarchy.world.barrier()
            if group is not None:
                first, second = (
                    _collective_seconds(name, group, size, max(whole // size, 8), hierarchy.device)
                    for whole in (SMALL, large)
                )
                sent = (size - 1) * (large // size)
                rate = sent / max(second - first, 1e-9)
                rates[name] = Link(rate, first / (size - 1))
        found.append(rates)
    return found


def _collective_seconds(
    name: str, group: dist.ProcessGroup, size: int, length: int, device: torch.device
) -> float:
    """Of a collective in which each rank has `length` bytes for each of `size` ranks."""
    out = empty(size * length, torch.uint8, device)
    own = empty(length if name == "all_gather" else size * length, torch.uint8, device)
    return average(partial(_COLLECTIVES[name], out, own, group), device)


_COLLECTIVES: dict[str, Callable[..., None]] = {"all_gather": all_gather, "all_to_all": all_to_all}


def _swap(
    peer: int, size_bytes: int, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    send, receive = (empty(size_bytes, torch.uint8, device) for _ in range(2))
    ops = [dist.P2POp(dist.isend, send, peer, group), dist.P2POp(dist.irecv, receive, peer, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def median_link(links: Sequence[Link]) -> Link:
    """The usual one of several ranks."""
    return Link(
        median(link.bytes_per_second for link in links),
        median(link.latency_seconds for link in links),
    )
