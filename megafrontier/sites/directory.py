"""Which ranks of a site hold which part of the weights, and at which address they answer.

Sites may have different numbers of data-parallel ranks. Their splits are the same, so a unit has
the same flat buffer everywhere, except for the padding at its end, and each rank has one range.
"""

import socket
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import torch
from torch import Tensor

from megafrontier.common.addresses import address_of, address_words
from megafrontier.common.errors import UserError
from megafrontier.partition.layout import Layout
from megafrontier.partition.unit import Unit
from megafrontier.sites.transport import lookup

MOST_HOLDINGS = 4
"""Kinds of parameters, by the ranks that share them, of one rank."""
_WIDTH = 5 + 3 * MOST_HOLDINGS


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
        """float64 [_WIDTH], which holds all numbers exactly: the address as four words of 32 bits,
        the port and the holdings."""
        numbers = [*address_words(self.host), self.port]
        for holding in self.holdings:
            numbers += [holding.key, holding.index, holding.shards]
        numbers += [0] * (_WIDTH - len(numbers))
        return torch.tensor(numbers, dtype=torch.float64)

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "RankEntry":
        """From the values of `as_row`."""
        rest = [int(number) for number in row[5:]]
        holdings = [Holding(*rest[at : at + 3]) for at in range(0, len(rest), 3) if rest[at + 2]]
        return cls(address_of(row[:4]), int(row[4]), tuple(holdings))


def entries_of(rows: bytes) -> list[RankEntry]:
    """The entries of several rows."""
    values = torch.frombuffer(bytearray(rows), dtype=torch.float64) if rows else torch.empty(0)
    return [RankEntry.from_row(row) for row in values.view(-1, _WIDTH).tolist()]


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


def own_host(towards: Iterable[tuple[str, int]]) -> str:
    """The address that this host has towards the first of these that can be looked up. Raises
    UserError if none can."""
    why = "no address"
    for host, port in towards:
        try:
            family, address = lookup(host, port)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                own: str = probe.getsockname()[0]
                return own
        except (OSError, UnicodeError) as error:
            why = f"{host}: {error}"
    raise UserError(f"sites.addresses: {why}, need a host with an address")


def listening_host(own: tuple[str, int], towards: Sequence[tuple[str, int]]) -> str:
    """The host of `own`, the address that other sites connect to. If that is a loopback address
    only here, as many hosts give one to their own name, the address towards the other sites. Raises
    UserError."""
    route = own_host(towards)
    try:
        host: str = lookup(*own)[1][0]
    except (OSError, UnicodeError):
        return own[0]  # the server says that it cannot listen there
    return route if ip_address(host).is_loopback and not ip_address(route).is_loopback else host
