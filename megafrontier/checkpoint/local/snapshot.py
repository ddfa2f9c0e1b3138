"""Read a snapshot: a checkpoint whose files lie on the nodes that have written or copied them."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megafrontier.checkpoint.format import CheckpointCorrupt, CheckpointUnreadable, Manifest
from megafrontier.checkpoint.load import Checkpoint
from megafrontier.checkpoint.local.node_folder import stem_of
from megafrontier.checkpoint.local.peers import Peer, fetch_file
from megafrontier.checkpoint.requests import Request
from megafrontier.checkpoint.shard_file import ShardFile
from megafrontier.parallel.world import World

Writer = tuple[str, int]
"""A shard: the name of its set, and its number in it."""


@dataclass(frozen=True)
class Sources:
    """Where the shards of a snapshot are: files of this node by writer, and the ranks whose nodes
    hold them. `layout` is the snapshot's; `folder` takes what is fetched."""

    local: Mapping[Writer, Path]
    holders: Mapping[Writer, Sequence[Peer]]
    host: int
    token: str
    layout: str
    folder: Path

    def remote(self, writer: Writer) -> Iterator[Peer]:
        """Ranks of other nodes that hold a shard, each node once."""
        hosts = {peer.host: peer for peer in self.holders[writer] if peer.host != self.host}
        yield from hosts.values()


class Snapshot(Checkpoint):
    """A snapshot of which every shard is somewhere. Rank by rank, what is damaged in one place is
    read in another."""

    def __init__(self, manifest: Manifest, sources: Sources, stored_step: int) -> None:
        """`stored_step`: of the checkpoint in the storage that is the newest one before."""
        self.stored_step = stored_step
        super().__init__(Path(f"snapshot of step {manifest.step}"), manifest)
        self._sources = sources
        self.local_bytes = self.fetched_bytes = 0
        """Of the files that this rank has read from its node, and from others; after `count_all`
        of those that all ranks have."""
        self.problems: list[str] = []
        """What was damaged or could not be fetched, though it may have been elsewhere."""

    @property
    def origin(self) -> str:
        sizes = (f"{size / 1e6:.4g} MB" for size in (self.local_bytes, self.fetched_bytes))
        return "{} ({} from own nodes, {} from other nodes, 0 from storage)".format(
            self.path, *sizes
        )

    def count_all(self, world: World) -> None:
        """Add up the bytes of all ranks, which all call it."""
        counts = torch.tensor([self.local_bytes, self.fetched_bytes], dtype=torch.float64)
        total = world.sum(counts.to(world.device)).tolist()
        self.local_bytes, self.fetched_bytes = (int(size) for size in total)

    def _read_file(self, number: int, index: int, requests: Sequence[Request]) -> None:
        shard_set = self.manifest.sets[number]
        writer, missing = (shard_set.name, index), [request.missing for request in requests]
        problems: list[str] = []
        for place in self._places(writer):
            try:
                with self._fetched(place, writer) as path:
                    name = (path.parent, self.manifest, shard_set, index, path.name)
                    with closing(ShardFile(*name)) as file:
                        self._read_slices(file, number, requests)
                    self._count(place, path)
                return
            except (CheckpointCorrupt, CheckpointUnreadable, OSError) as error:
                problems.append(str(error))
                self.problems.append(str(error))
                for request, count in zip(requests, missing, strict=True):
                    request.missing = count
        where = f"shard {index} of set {shard_set.name or 'of all'}"
        raise CheckpointCorrupt(f"{self.path}: {where}: {'; '.join(problems) or 'nowhere'}")

    def _places(self, writer: Writer) -> Iterator[Path | Peer]:
        if writer in self._sources.local:
            yield self._sources.local[writer]
        yield from self._sources.remote(writer)

    @contextmanager
    def _fetched(self, place: Path | Peer, writer: Writer) -> Iterator[Path]:
        """The path of a file, which is fetched if it is not of this node. Raises OSError."""
        if isinstance(place, Path):
            yield place
            return
        target = self._sources.folder / f"{secrets.token_hex(4)}.fetched"
        try:
            name = f"{self.manifest.id}/{stem_of(self._sources.layout, *writer)}"
            fetch_file(place, self._sources.token, name, target)
            yield target
        finally:
            target.unlink(missing_ok=True)

    def _count(self, place: Path | Peer, path: Path) -> None:
        if isinstance(place, Path):
            self.local_bytes += path.stat().st_size
        else:
            self.fetched_bytes += path.stat().st_size
