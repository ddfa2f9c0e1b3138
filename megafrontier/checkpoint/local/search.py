"""Which snapshot a start goes on from: the newest one of which every shard is on some node."""

import json
import zlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megafrontier.checkpoint.format import CheckpointCorrupt, Manifest
from megafrontier.checkpoint.local.meeting import Ranks
from megafrontier.checkpoint.local.node_folder import (
    NodeFolder,
    SnapshotEntry,
    decode_entry,
    encode_entry,
    stem_of,
)
from megafrontier.checkpoint.local.slots import Generation
from megafrontier.checkpoint.local.snapshot import Writer
from megafrontier.common.errors import UserError
from megafrontier.parallel.world import World

_ID_BITS = 22


@dataclass(frozen=True)
class Held:
    """A snapshot and where it is: the ranks that hold each shard, two at most. `manifest`: with
    config and sets."""

    manifest: Manifest
    layout: str
    holders: dict[Writer, list[int]]

    @property
    def missing(self) -> int:
        """How many shards no node holds."""
        return sum(not ranks for ranks in self.holders.values())


@dataclass(frozen=True)
class OwnEntries:
    """The whole shard files of this rank's node, and the layouts that they need."""

    entries: Sequence[SnapshotEntry]
    layouts: dict[str, bytes]

    @classmethod
    def of(cls, folders: Iterable[NodeFolder]) -> "OwnEntries":
        entries: list[SnapshotEntry] = []
        layouts: dict[str, bytes] = {}
        for folder in folders:
            for entry in folder.entries():
                if entry.layout not in layouts:
                    with suppress(CheckpointCorrupt, OSError):
                        layouts[entry.layout] = folder.read_layout(entry.layout)
                entries.append(entry)
        return cls([entry for entry in entries if entry.layout in layouts], layouts)

    def of_generation(self, key: int) -> list[SnapshotEntry]:
        return [entry for entry in self.entries if _key(entry.generation) == key]

    def describe(self, key: int) -> str | None:
        """What a snapshot holds, as text; None if this node has nothing of it."""
        entries = self.of_generation(key)
        if not entries:
            return None
        first = entries[0]
        entry = encode_entry(first.manifest, first.layout, *first.writer, 0).decode()
        return json.dumps([first.layout, entry, self.layouts[first.layout].decode()])


def _key(generation: Generation) -> int:
    """A number of 63 bits that orders snapshots by step and tells apart those of one step."""
    step, id_ = generation
    return (step << _ID_BITS) | (zlib.crc32(id_.encode()) % 2**_ID_BITS)


def search(
    world: World,
    ranks: Ranks,
    own: OwnEntries,
    refused: Collection[int],
    stored_step: int,
) -> tuple[int, Held | None]:
    """The newest snapshot not before step `stored_step` that is not among the `refused` keys, whole
    or not; all ranks call it and get the same one. Returns its key, -1 without one, and where its
    shards are, None if it is not sound.

    One message says which shards are where, two ranks at most for each.
    """
    keys = {_key(entry.generation) for entry in own.entries} - set(refused)
    newest = max(keys, default=-1)
    key = int(world.maximum(torch.tensor([newest], device=world.device)).item())
    if key < 0 or key >> _ID_BITS < stored_step:
        return -1, None
    text = world.first_error(own.describe(key))
    assert text is not None
    layout, entry_text, layout_text = json.loads(text)
    try:
        entry, _ = decode_entry(entry_text.encode(), Path("entry"))
        manifest = merge(Manifest.decode(layout_text.encode(), Path("layout")), entry.manifest)
    except (UserError, ValueError):
        return key, None
    writers = [(s.name, index) for s in manifest.sets for index in range(s.num_shards)]
    here = {entry.writer for entry in own.of_generation(key) if entry.layout == layout}
    # Both the highest and the lowest rank: those of two nodes, if two hold a shard.
    count = ranks.per_host
    place = world.rank % count
    marks = torch.zeros(2, len(writers), dtype=torch.int32)
    for number, writer in enumerate(writers):
        # The ranks of a node answer for it in turn.
        if writer in here and zlib.crc32(stem_of(layout, *writer).encode()) % count == place:
            marks[0, number], marks[1, number] = world.rank + 1, world.size - world.rank
    high, low = world.maximum(marks.view(-1).to(world.device)).cpu().view(2, -1).tolist()
    holders = {
        writer: [high[i] - 1, world.size - low[i]] if high[i] else []
        for i, writer in enumerate(writers)
    }
    return key, Held(manifest, layout, holders)


def merge(layout: Manifest, entry: Manifest) -> Manifest:
    """The manifest of a snapshot: what all steps have in common, and what its entry says."""
    return replace(
        layout,
        step=entry.step,
        tokens=entry.tokens,
        id=entry.id,
        extra={**layout.extra, **entry.extra},
    )
