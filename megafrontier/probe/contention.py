"""Measure what computing loses while a collective runs beside it (Note [Contention])."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from statistics import median

import torch
import torch.distributed as dist

from megafrontier.common.buffers import empty
from megafrontier.parallel.groups import find_all_gather
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.probe.device import average, fastest, synchronize
from megafrontier.probe.links import LARGE, Link

SECONDS = 0.02
"""Of the collectives beside which products are timed."""
SIDES = {"cuda": 4096, "cpu": 256}
"""Of square products: each takes a small part of `SECONDS`."""
BYTES = 2**14, 16 * LARGE
"""The fewest and the most of a message."""
TIMES = 3
_all_gather = find_all_gather(dist)


def measure_contention(hierarchy: Hierarchy, links: Sequence[Link]) -> list[float]:
    """By level, the seconds that this rank's products lose for each second of all-gathers beside
    them; 0 for a level of one rank. All ranks call it.

    links: of each level; messages are such that a collective takes about a third of `SECONDS`.
    """
    side = SIDES[hierarchy.device.type]
    dtype = torch.bfloat16 if hierarchy.device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=hierarchy.device).to(dtype) for _ in range(2))
    product = partial(torch.mm, a, b)
    found = []
    for group, size, link in zip(hierarchy.groups, hierarchy.levels.sizes, links, strict=True):
        sent = min(max(int(link.bytes_per_second * SECONDS / 3), BYTES[0]), BYTES[1])
        found.append(_loss(hierarchy, group, max(sent // max(size - 1, 1), 8), product))
    return found


def _loss(
    hierarchy: Hierarchy,
    group: dist.ProcessGroup | None,
    length: int,
    product: Callable[[], torch.Tensor],
) -> float:
    """Beside all-gathers of `length` bytes from each rank of `group`."""
    device, world = hierarchy.device, hierarchy.world
    world.barrier()
    if group is None:
        return 0.0
    shard = empty(length, torch.uint8, device)
    out = empty(dist.get_world_size(group) * length, torch.uint8, device)
    gather = partial(_all_gather, out, shard, group=group)
    own = torch.tensor([average(gather, device)], dtype=torch.float64, device=device)
    alone = float(world.maximum(own).item())
    collectives = ceil(SECONDS / alone)
    # Twice as long as the collectives, so that they are over first unless they are delayed.
    products = ceil(2 * collectives * alone / fastest(product, device))

    def run(count: int) -> float:
        """Seconds of the products, and of `count` collectives beside them."""
        world.barrier()
        begin = time.perf_counter()
        works = [gather(async_op=True) for _ in range(count)]
        for _ in range(products):
            product()
        for work in works:
            work.wait()
        synchronize(device)
        return time.perf_counter() - begin

    lost = median(run(collectives) - run(0) for _ in range(TIMES))
    return max(0.0, lost / (collectives * alone))
