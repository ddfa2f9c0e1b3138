"""Which ranks of a site hold which part of the weights, and at which address they answer.

Sites may have different numbers of data-parallel ranks. Their splits are the same, so a unit has
the same flat buffer everywhere, except for the padding at its end, and each rank has one range.
"""

import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megafrontier.partition.layout import Layout
from megafrontier.partition.unit import Unit

MOST_HOLDINGS = 4
"""Kinds of parameters, by the ranks that share them, of one rank."""


@dataclass(frozen=True)
class Holding:
    """This rank's part of some units: shard `index` of `shards` of each.

    key: says which units, and which part of a split.
    """

    key: int
    index: int
    shards: int


@dataclass(frozen=True)
class RankEntry:
    """A rank's address and what it holds."""

    host: str
    port: int
    holdings: tuple[Holding, ...]

    def as_row(self) -> torch.Tensor:
        """float64 [2 + 3 · MOST_HOLDINGS], which holds all numbers exactly."""
        address = int.from_bytes(socket.inet_aton(self.host), "big")
        numbers = [address, self.port]
        for holding in self.holdings:
            numbers += [holding.key, holding.index, holding.shards]
        numbers += [0] * (2 + 3 * MOST_HOLDINGS - len(numbers))
        return torch.tensor(numbers, dtype=torch.float64)

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "RankEntry":
        """From the values of `as_row`."""
        address, port, *rest = (int(number) for number in row)
        holdings = [Holding(*rest[at : at + 3]) for at in range(0, len(rest), 3) if rest[at + 2]]
        return cls(socket.inet_ntoa(address.to_bytes(4, "big")), port, tuple(holdings))


def entries_of(rows: bytes) -> list[RankEntry]:
    """The entries of several rows."""
    width = 2 + 3 * MOST_HOLDINGS
    values = torch.frombuffer(bytearray(rows), dtype=torch.float64) if rows else torch.empty(0)
    return [RankEntry.from_row(row) for row in values.view(-1, width).tolist()]


def own_holdings(units: Sequence[Unit]) -> dict[Holding, list[int]]:
    """What this rank holds and answers for, and the indices of the units of each."""
    groups: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        groups.setdefault(id(unit.hierarchy), []).append(index)
    found = {}
    for members in groups.values():
        texts = [_describe(units[index]) for index in members]
        key = zlib.crc32("\n".join(texts).encode())
        first = units[members[0]]
        index, shards = first.hierarchy.shard_index(first.placement.optimizer)
        found[Holding(key, index, shards)] = members
    return found


def _describe(unit: Unit) -> str:
    boxes = ((e.name, unit.specs[e.name].name, unit.specs[e.name].box) for e in unit.layout.entries)
    return f"{unit.name}: {sorted(boxes)}"


def range_of(unit: Unit, holding: Holding) -> tuple[int, int]:
    """[start, stop) in the flat buffer of a unit of what a rank of any site holds."""
    return _layout(unit, holding.shards).bounds(holding.index, holding.shards)


def met_by(unit: Unit, own: Holding, shards: int) -> range:
    """Which of the `shards` of another site hold elements that this rank holds."""
    start, stop = range_of(unit, own)
    length = _layout(unit, shards).numel // shards
    return range(start // length, min(-(-stop // length), shards))


def _layout(unit: Unit, shards: int) -> Layout:
    shapes = ((entry.name, entry.shape) for entry in unit.layout.entries)
    return Layout.build(unit.name, shapes, shards)


def copy_overlap(target: Tensor, target_start: int, source: Tensor, source_start: int) -> None:
    """Copy what two ranges of one buffer have in common. Both tensors are [..., n], from their
    starts on."""
    start = max(target_start, source_start)
    stop = min(target_start + target.shape[-1], source_start + source.shape[-1])
    if start < stop:
        into = slice(start - target_start, stop - target_start)
        target[..., into] = source[..., start - source_start : stop - source_start]


def own_host(towards: tuple[str, int]) -> str:
    """The address that this host has towards another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(towards)
        host: str = probe.getsockname()[0]
    return host
