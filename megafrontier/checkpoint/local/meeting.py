"""What all ranks learn of each other before the first snapshot: once a start, in two messages."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.local.peers import Peer
from megafrontier.checkpoint.save import OwnShard
from megafrontier.checkpoint.sets import decode_set, describe_set
from megafrontier.common.addresses import ADDRESS_WORDS, address_of, address_words
from megafrontier.parallel.world import World


@dataclass(frozen=True)
class Ranks:
    """All ranks, in rank order, the same number in a row on each node. `shard_bytes`: those that
    each writes of a snapshot."""

    peers: Sequence[Peer]
    shard_bytes: Sequence[int]

    @cached_property
    def hosts(self) -> list[int]:
        """The numbers of the nodes, in rank order."""
        return list(dict.fromkeys(peer.host for peer in self.peers))

    @property
    def per_host(self) -> int:
        """The number of ranks on a node."""
        return len(self.peers) // len(self.hosts)

    def partner(self, rank: int) -> Peer | None:
        """The rank that keeps copies of a rank's shards; None with a single node. It is half of the
        nodes away, because neighbours share a chassis, a switch and its faults."""
        hosts, here = self.hosts, self.peers[rank].host
        if len(hosts) == 1:
            return None
        there = hosts[(hosts.index(here) + len(hosts) // 2) % len(hosts)]
        at = [peer.rank for peer in self.peers if peer.host == here].index(rank)
        return [peer for peer in self.peers if peer.host == there][at]

    def bytes_on(self, host: int, copies: int) -> int:
        """Bytes on a node of two snapshots: of its ranks, and of those whose copies it keeps."""
        hosts = self.hosts
        sources = {host}
        if copies and len(hosts) > 1:
            sources.add(hosts[(hosts.index(host) - len(hosts) // 2) % len(hosts)])
        pairs = zip(self.peers, self.shard_bytes, strict=True)
        return 2 * sum(size for peer, size in pairs if peer.host in sources)


def meet(
    world: World,
    own: tuple[int, str, int],
    shards: Sequence[OwnShard],
    shard_bytes: int,
    about: Mapping[str, Any] | None,
) -> tuple[Ranks, Sequence[Any], Mapping[str, Any]]:
    """Exchange addresses, sets and what rank 0 says to all (`about`; None on the others).

    own: this rank's number of its node, address and port. Returns all ranks, the sets of all shards
    as JSON (sorted by name) and rank 0's `about`.
    """
    sets = [describe_set(part.shard_set) for part in shards if part.is_writer and part.index == 0]
    is_speaking = bool(sets) or about is not None  # thousands of ranks have nothing to say
    said = json.dumps({"sets": sets, "about": about}).encode()
    text = zlib.compress(said) if is_speaking else b""
    host, address, port = own
    row = [host, *address_words(address), port, shard_bytes, len(text)]
    rows = world.gather(torch.tensor(row, dtype=torch.float64, device=world.device)).cpu()
    lengths = rows[:, -1].long()
    begin = int(lengths[: world.rank].sum())
    data = torch.zeros(int(lengths.sum()), dtype=torch.uint8, device=world.device)
    mine = torch.tensor(list(text), dtype=torch.uint8)
    data[begin : begin + len(text)] = mine.to(world.device)
    found = world.maximum(data).cpu().split(lengths.tolist())
    texts = [json.loads(zlib.decompress(part.numpy().tobytes())) for part in found if len(part)]
    # Replicas of a place of the mesh describe the same set.
    named = {one[0]["name"]: one for part in texts for one in part["sets"]}
    return _ranks(rows), [named[name] for name in sorted(named)], texts[0]["about"]


def _ranks(rows: torch.Tensor) -> Ranks:
    peers, sizes = [], []
    for rank, row in enumerate(rows.tolist()):
        address, (port, size, _) = row[1 : 1 + ADDRESS_WORDS], row[1 + ADDRESS_WORDS :]
        peers.append(Peer(rank, int(row[0]), address_of(address), int(port)))
        sizes.append(int(size))
    return Ranks(peers, sizes)


def layout_of(sets: Sequence[Any], about: Mapping[str, Any]) -> Manifest:
    """A manifest without a step: the sets that `meet` returns, and the fields that no step
    changes."""
    decoded = [decode_set(*one) for one in sets]
    return Manifest(
        0, 0, config=about["config"], rng=about["rng"], extra=about["extra"], sets=decoded
    )
