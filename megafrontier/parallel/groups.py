"""A process group for each level of a machine."""

from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megafrontier.parallel.levels import Levels


@cache
def _gloo() -> str:
    """The name of torch's gloo, of which all groups of a rank share the first one's device; a torch
    for GPUs may have none."""
    dist.Backend.register_backend("gloo_on_one_device", _gloo_group, devices=["cpu"])
    return "gloo_on_one_device"


def _gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    # torch would make a device for each group. A device is a thread that wakes 100 times a second,
    # and a rank has two groups a level: of 16 ranks on 2 cores theirs took a twentieth of both.
    world: Any = dist.group.WORLD
    gloo = world._get_backend(torch.device("cpu"))
    # In torch 2.10 what watches it (`TORCH_DISTRIBUTED_DEBUG=DETAIL`) has no options of its own.
    first = getattr(gloo, "wrapped_pg", gloo).options
    options = type(first)()  # torch has no public name for it
    options._devices, options._threads, options._timeout = first._devices, first._threads, timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _one_channel(timeout: timedelta) -> Any:
    """Options of a communicator with the fewest buffers: NCCL and RCCL give each channel its own,
    and by default take as many channels as large messages want, half a gigabyte in all."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.min_ctas = options.config.max_ctas = 1
    return options


def make_groups(
    levels: Levels,
    rank: int,
    device: torch.device,
    timeout: timedelta,
    has_small_messages: bool = False,
) -> tuple[dist.ProcessGroup | None, ...]:
    """This rank's group at each level, new ones at each call; None where it has no peers.

    All peers must call, after `torch.distributed.init_process_group`. `timeout` is that of every
    collective: the groups would not inherit the world's, and NCCL's own is 10 minutes. With
    `has_small_messages` a communicator on a device is made for these alone.
    """
    has_one_channel = has_small_messages and device.type == "cuda"
    # Each rank creates only its own groups: creating everybody's would be O(world) work a rank.
    return tuple(
        dist.new_group(
            levels.peers(rank, level),
            timeout=timeout,
            backend=None if device.type == "cuda" else _gloo(),
            pg_options=_one_channel(timeout) if has_one_channel else None,  # torch keeps each
            use_local_synchronization=True,
        )
        if size > 1
        else None
        for level, size in enumerate(levels.sizes)
    )
