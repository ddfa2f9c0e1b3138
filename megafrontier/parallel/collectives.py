"""The collectives of flat buffers that the engine uses, under one name for every torch release.

torch 2.13 renamed `all_gather_into_tensor` to `all_gather_single`; the old name warns there and
older releases know no other.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def find_all_gather(distributed: Any) -> Callable[..., Any]:
    """torch.distributed's gather of flat buffers, by the name that this release has."""
    new = getattr(distributed, "all_gather_single", None)
    return new or distributed.all_gather_into_tensor


_all_gather = find_all_gather(dist)


def all_gather(out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `out` [size · n] with every peer's `shard` [n] in rank order.

    `shard` may be this rank's own part of `out`.
    """
    _all_gather(out, shard, group=group)


def all_gather_stacked(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every peer's tensor [...] as [peers, ...], in one buffer: there may be thousands of them."""
    out = values.new_empty(dist.get_world_size(group), *values.shape)
    all_gather(out.view(-1), values.contiguous().view(-1), group)
    return out


def all_to_all(
    out: torch.Tensor,
    pieces: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: list[int] | None = None,
) -> None:
    """Send piece i of `pieces` to peer i; `out` gets one from each, in rank order.

    Pieces are of equal size, or of `sizes` elements, alike on both ends: 0 for none.
    """
    dist.all_to_all_single(out, pieces, sizes, sizes, group=group)
