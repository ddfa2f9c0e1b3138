"""Measure links: between ranks at growing distances, and the collectives that the engine uses.

Ranks are numbered in levels of prime sizes, those within a host first. On the level with stride d
a rank meets the one at distance d, so there are only as many measurements as the logarithm of the
number of ranks, and no rank opens more links than that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

import torch
import torch.distributed as dist

from megafrontier.common.buffers import empty
from megafrontier.launch.health.links import exchange, ring_peers
from megafrontier.parallel.groups import all_gather, all_to_all
from megafrontier.parallel.hierarchy import Hierarchy, Levels
from megafrontier.probe.device import REPEATS, average

SMALL, LARGE = 2**10, 2**22
"""Bytes of the messages that give latency and bandwidth."""


def prime_levels(ranks: int, per_host: int) -> Levels:
    """Levels of prime sizes that hold `ranks` ranks, those of a host first, by the stride between
    two neighbours."""
    sizes = *_primes(per_host), *_primes(ranks // per_host)
    strides = Levels(("",) * len(sizes), sizes).strides
    return Levels(tuple(f"stride-{stride}" for stride in strides), sizes)


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
    peers, met = hierarchy.peers[level], []
    hierarchy.world.barrier()
    for index in ring_peers(hierarchy.coordinates[level], len(peers)):
        if index is not None:
            seconds = _exchanges(hierarchy, level, peers[index], size_bytes)
            met.append(fmean(seconds[1:]))  # the first one opens the connection
    return fmean(met)


def measure_alone(hierarchy: Hierarchy, level: int, size_bytes: int = LARGE) -> float | None:
    """Bytes a second over a level between the first rank and its neighbour, while all others are
    idle; None on those. All ranks call it."""
    rank, world = hierarchy.world.rank, hierarchy.world
    world.barrier()
    pair = hierarchy.peers[level][:2]
    is_first_pair = all(c == 0 for i, c in enumerate(hierarchy.coordinates) if i != level)
    found = None
    if is_first_pair and rank in pair:
        other = pair[1] if rank == pair[0] else pair[0]
        found = size_bytes / min(_exchanges(hierarchy, level, other, size_bytes))
    world.barrier()
    return found


def _exchanges(hierarchy: Hierarchy, level: int, peer: int, size_bytes: int) -> list[float]:
    """Seconds of each of several exchanges with a peer over a level."""
    group = hierarchy.groups[level]
    assert group is not None
    send, receive = (empty(size_bytes, torch.uint8, hierarchy.device) for _ in range(2))
    return [exchange(peer, send, receive, group) for _ in range(REPEATS + 1)]


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


def median_link(links: Sequence[Link]) -> Link:
    """The usual one of several ranks."""
    return Link(
        median(link.bytes_per_second for link in links),
        median(link.latency_seconds for link in links),
    )
