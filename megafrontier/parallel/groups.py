"""A process group for each level of a machine, and the collectives of flat buffers."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megafrontier.parallel.sockets import CONNECTIONS


def find_all_gather(distributed: Any) -> Callable[..., Any]:
    """`torch.distributed`'s all-gather of flat buffers.

    torch 2.13 renamed `all_gather_into_tensor` to `all_gather_single`. The old name warns there,
    and older releases lack the new one.
    """
    new = getattr(distributed, "all_gather_single", None)
    return new or distributed.all_gather_into_tensor


_all_gather = find_all_gather(dist)


def all_gather(out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather every peer's `shard` [n] into `out` [size · n] in rank order.

    `shard` may be this rank's own slice of `out`.
    """
    _all_gather(out, shard, group=group)


def all_gather_stacked(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather every peer's tensor [...] as [peers, ...]."""
    out = values.new_empty(dist.get_world_size(group), *values.shape)
    all_gather(out.view(-1), values.contiguous().view(-1), group)
    return out


def all_to_all(
    out: torch.Tensor,
    chunks: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: list[int] | None = None,
    sent_sizes: list[int] | None = None,
) -> None:
    """Send chunk i of `chunks` to peer i, and receive one chunk from each peer into `out`, in rank
    order.

    Chunks have equal sizes, or `sizes` along the first dimension (0 for no chunk). Those that are
    sent have the same sizes, or `sent_sizes`.
    """
    dist.all_to_all_single(out, chunks, sizes, sent_sizes or sizes, group=group)


def make_groups(
    peers: Sequence[Sequence[int]],
    device: torch.device,
    timeout: timedelta,
    has_small_messages: bool = False,
) -> tuple[dist.ProcessGroup | None, ...]:
    """Create this rank's group at each level. None for a level without peers.

    `peers[level]` are the ranks of the group. All of them must call this, after
    `torch.distributed.init_process_group`. `timeout` applies to every collective: groups do not
    inherit the world's timeout, and NCCL's default is 10 minutes. With `has_small_messages`, a
    communicator on a GPU gets the fewest buffers.
    """
    has_one_channel = has_small_messages and device.type == "cuda"
    # Each rank creates only its own groups. Creating all of them would be O(world) work on each.
    with CONNECTIONS.opening():
        return tuple(
            dist.new_group(
                list(ranks),
                timeout=timeout,
                backend=_BACKENDS.get(device.type, _gloo)(),
                # New options for each group, because torch keeps the object.
                pg_options=_one_channel(timeout) if has_one_channel else None,
                use_local_synchronization=True,
            )
            if len(ranks) > 1
            else None
            for ranks in peers
        )


_BACKENDS: dict[str, Callable[[], str | None]] = {
    "cuda": lambda: None,
    "meta": lambda: "cpu:fake,meta:fake",  # torch 2.10 has collectives of CPU tensors alone
}
"""The backend of a type of device, if not gloo; None: torch's default."""


@cache
def _gloo() -> str:
    """The name of a gloo backend whose groups share the device of the world's group."""
    dist.Backend.register_backend("gloo_on_one_device", _gloo_group, devices=["cpu"])
    return "gloo_on_one_device"


def _gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    # torch would create a gloo device for each group, and each device is a thread that wakes 100
    # times a second. A rank has two groups a level: with 16 ranks on 2 cores, these threads took
    # 5 % of the CPU time.
    world: Any = dist.group.WORLD
    gloo = world._get_backend(torch.device("cpu"))
    # In torch 2.10 the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL has no options of its own.
    first = getattr(gloo, "wrapped_pg", gloo).options
    options = type(first)()  # torch has no public name for this class
    options._devices, options._threads, options._timeout = first._devices, first._threads, timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _one_channel(timeout: timedelta) -> Any:
    """Options of an NCCL or RCCL communicator with one channel. Each channel has its own buffers,
    and by default there are as many as large messages need, half a gigabyte in all."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.min_ctas = options.config.max_ctas = 1
    return options
