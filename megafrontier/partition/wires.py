"""Wires: how a slice of weights or gradients is encoded to cross one level, and decoded after.

A wire is a format; the moves over levels (`moves.py`) choose one for each level and direction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megafrontier.cluster.collectives import all_gather, all_to_all
from megafrontier.cluster.levels import Levels
from megafrontier.errors import UserError

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Wire(Protocol):
    """One format. Both moves return the bytes this rank sent."""

    def gather(self, shard: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> int:
        """Fill `out` [size · n] from every peer's `shard` [n], which may lie inside `out`.

        Every rank of the group ends with the same bits, the owner of a piece too.
        """
        ...

    def reduce(self, full: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> int:
        """Sum every peer's piece of `full` [size · n] into `out` [n], in fp32, in rank order."""
        ...


@dataclass(frozen=True)
class CastWire:
    """Send elements as `dtype`; exact where that is the buffer's own type."""

    dtype: torch.dtype

    def gather(self, shard: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> int:
        if out.dtype == self.dtype:
            all_gather(out, shard, group)
        else:
            received = torch.empty(out.numel(), dtype=self.dtype, device=out.device)
            all_gather(received, shard.to(self.dtype), group)
            out.copy_(received)
        return (out.numel() - shard.numel()) * self.dtype.itemsize

    def reduce(self, full: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> int:
        # All-to-all and a local sum: one rounding per level instead of one per hop of a ring,
        # an order of summation that is the same in every run, and on gloo half the bytes.
        sent = full.to(self.dtype)
        received = torch.empty_like(sent)
        all_to_all(received, sent, group)
        torch.sum(received.view(-1, out.numel()), dim=0, dtype=torch.float32, out=out)
        return (full.numel() - out.numel()) * self.dtype.itemsize


@dataclass(frozen=True)
class Wires:
    """The wire of each level, fastest first, for weights (gather) and gradients (reduce)."""

    gather: tuple[Wire, ...]
    reduce: tuple[Wire, ...]

    @classmethod
    def build(
        cls,
        levels: Levels,
        default: str,
        gather: Mapping[str, str] | None = None,
        reduce: Mapping[str, str] | None = None,
    ) -> "Wires":
        """Formats by level name over a default. Raises UserError for an unknown level."""
        return cls(
            tuple(_formats(levels, default, gather or {}, "gather")),
            tuple(_formats(levels, default, reduce or {}, "reduce")),
        )


def _formats(levels: Levels, default: str, chosen: Mapping[str, str], move: str) -> Sequence[Wire]:
    for name in chosen:
        if name not in levels.names:
            raise UserError(
                f"partition.wires.{move}.{name}: no such level, need one of "
                f"{', '.join(levels.names)}"
            )
    return [CastWire(FORMATS[chosen.get(name, default)]) for name in levels.names]
