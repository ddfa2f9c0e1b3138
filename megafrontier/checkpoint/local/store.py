"""The snapshots of a run, as each of its ranks sees them.

Note [Snapshots]
A snapshot is a checkpoint whose shard files stay near the ranks: each rank's in its node's memory
or on its node's disk, and a copy on a partner node. Which shards there are is agreed once, at the
start (`meeting`). A snapshot then needs no collective call: threads write and send it, and the
message of a step's loss says when all ranks have it whole (training/callbacks/snapshots.py).

The next start looks for the newest snapshot of which every shard is on some node (`search`). Each
rank reads the shards that it needs, from its node or over the network, and checks all it reads.
"""

import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.format import CheckpointCorrupt, Manifest
from megafrontier.checkpoint.load import Checkpoint, Load, find_damage
from megafrontier.checkpoint.local.meeting import layout_of, meet
from megafrontier.checkpoint.local.node_folder import (
    NodeFolder,
    RunKey,
    base_folders,
    decode_entry,
    open_folders,
    remove_abandoned,
    stem_of,
)
from megafrontier.checkpoint.local.peers import (
    IncomingShard,
    PeerServer,
    ShardReceiver,
    send_shard,
)
from megafrontier.checkpoint.local.pending import PendingSnapshot
from megafrontier.checkpoint.local.search import Held, OwnEntries, search
from megafrontier.checkpoint.local.slots import Slots
from megafrontier.checkpoint.local.snapshot import Snapshot, Sources, Writer
from megafrontier.checkpoint.save import OwnShard
from megafrontier.checkpoint.sets import ShardSet
from megafrontier.checkpoint.shard_file import file_size
from megafrontier.common.addresses import own_address
from megafrontier.common.errors import FatalError
from megafrontier.common.files import write_atomically
from megafrontier.config import SnapshotConfig
from megafrontier.parallel.env import Identity
from megafrontier.parallel.world import World

RUN_ID = "run-id"
"""A file of the run directory (Note [Whose snapshots] in node_folder.py)."""
_GROWTH = 64
"""Bytes by which a shard file may grow, because its header names the step."""
_CLEANED_COMMITS = 2
"""After so many snapshots, files of a start before this one on other nodes are gone."""


class SnapshotStore:
    """This rank's snapshots, and those of others that its node keeps."""

    def __init__(
        self,
        config: SnapshotConfig,
        directory: Path,
        world: World,
        identity: Identity,
        shards: Sequence[OwnShard],
        fixed: Mapping[str, Any],
        is_new: Callable[[], bool],
        info: Callable[[str], None],
    ) -> None:
        """Meet the other ranks; all ranks call it.

        directory: of the run. shards: what this rank has of each set. fixed: the fields of a
        manifest that no step changes, as rank 0 has them. is_new: whether older snapshots of the
        run must not be used, asked on rank 0.

        Raises on all ranks: UserError if `checkpoint.local.folder` cannot be used, StorageFailed.
        """
        self._world, self._info, self._host = world, info, identity.host_number
        begin = partial(_begin, directory, is_new, fixed)
        about = world.run_on_all(begin if world.rank == 0 else lambda: None)
        receiver = ShardReceiver(self._receive, self._receive_entry, self._find)
        address = own_address(identity.rendezvous, os.environ)
        self._server = world.run_on_all(partial(PeerServer, receiver, address))
        writers = [part for part in shards if part.is_writer]
        size = sum(_most_bytes(part.shard_set, part.index) for part in writers)
        own = identity.host_number, address, self._server.port
        self._ranks, sets, said = meet(world, own, shards, size, about)
        self._start: str = said["start"]
        self._token: str = said["token"]
        manifest = layout_of(sets, said["fixed"])
        self._sets = {shard_set.name: shard_set for shard_set in manifest.sets}
        self._is_first_on_host = world.rank % self._ranks.per_host == 0
        self._partner = self._ranks.partner(world.rank) if config.copies else None
        key = RunKey.of(directory, said["run"], os.environ)
        self._open(config, key, identity.host, manifest.encode())
        self._slots: dict[Writer, Slots] = {}
        self._received: dict[Writer, Slots] = {}
        self._lock = threading.Lock()
        self._commits = 0
        self._is_closed = False
        self._kept = ""
        """The id of the newest snapshot that all ranks have whole."""
        self._server.accept(self._token)
        world.barrier()  # from here on, others answer

    def _open(self, config: SnapshotConfig, key: RunKey, host: str, layout: bytes) -> None:
        """Open the folders of this node, and choose one of those with room."""
        needed = self._ranks.bytes_on(self._host, config.copies)
        bases = base_folders(config.folder, os.environ)
        if self._is_first_on_host:
            for base in bases:
                remove_abandoned(base, key)
        self._world.barrier()  # before anybody looks for room
        found = self._world.run_on_all(
            partial(open_folders, bases, key, host, needed, config.folder != "auto")
        )
        self._folders, chosen, problems = found
        where = f"rank {self._world.rank} on {host}: {'; '.join(problems)}"
        without = self._world.first_error(where if chosen is None else None)
        around = self._world.first_error(where if problems else None)
        if without is not None:
            self._info(
                f"warning: checkpoint.local: no snapshots, because there is no room: {without}"
            )
        elif around is not None:
            self._info(f"warning: checkpoint.local: not the first folder: {around}")
        self.folder: NodeFolder | None = chosen if without is None else None
        """Where this node keeps snapshots; None without room on some node."""
        self._layout = self._world.run_on_all(
            lambda: self.folder.write_layout(layout) if self.folder else ""
        )

    # Writing

    def start(
        self,
        step: int,
        tokens: int,
        extra: Mapping[str, Any],
        shards: Sequence[OwnShard],
        early: Collection[str],
    ) -> PendingSnapshot:
        """Begin a snapshot, which a thread copies, checks and sends; all ranks call it while none
        is pending. The fields are those of a manifest. `early`: as of `PendingSnapshot`."""
        assert self.folder is not None
        # Later steps may change what callbacks have given.
        fixed = deepcopy(extra)
        manifest = Manifest(step, tokens, extra=fixed, id=_id_of(self._start, step))
        slots = {}
        for part in (part for part in shards if part.is_writer):
            writer = (part.shard_set.name, part.index)
            slots[part.shard_set.name] = self._slots_of(self._slots, writer)
        send = None if self._partner is None else partial(self._send, (step, manifest.id))
        return PendingSnapshot(manifest, self._layout, shards, slots, self._kept, early, send)

    def _slots_of(self, known: dict[Writer, Slots], writer: Writer) -> Slots:
        with self._lock:
            if writer not in known:
                assert self.folder is not None
                known[writer] = Slots(self.folder.path, stem_of(self._layout, *writer))
            return known[writer]

    def _send(
        self, generation: tuple[int, str], set_name: str, index: int, entry: bytes, path: Path
    ) -> str | None:
        assert self._partner is not None
        sizes = len(entry), path.stat().st_size
        shard = IncomingShard(set_name, index, generation, self._kept, *sizes)
        return send_shard(self._partner, self._token, shard, entry, path)

    def commit(self, pending: PendingSnapshot) -> None:
        """All ranks have a snapshot whole. The one before may be overwritten from now on."""
        previous, self._kept = self._kept, pending.id
        self._commits += 1
        if self._is_first_on_host and self._commits <= _CLEANED_COMMITS:
            for folder in self._folders:
                folder.remove_others({pending.id, previous}, self._layout)

    def drop(self, pending: PendingSnapshot) -> None:
        """Forget a snapshot that will never be whole."""
        with self._lock:
            slots = [*self._slots.values(), *self._received.values()]
        for one in slots:
            one.drop(pending.id)

    # Requests of other nodes, in threads of the server

    def _receive(self, incoming: IncomingShard) -> torch.Tensor:
        shard_set = self._sets.get(incoming.set_name)
        if self.folder is None or shard_set is None or incoming.number >= shard_set.num_shards:
            raise ValueError("no shard of this start")
        if not 0 < incoming.size <= _most_bytes(shard_set, incoming.number):
            raise ValueError(f"{incoming.size} bytes, another size than the shard has")
        writer = (incoming.set_name, incoming.number)
        slots = self._slots_of(self._received, writer)
        return slots.begin(incoming.size, incoming.kept, incoming.generation)

    def _receive_entry(self, incoming: IncomingShard, text: bytes) -> None:
        entry, _ = decode_entry(text, Path(f"{incoming.set_name} {incoming.number}"))
        if entry.generation != incoming.generation or entry.layout != self._layout:
            raise ValueError("an entry of another snapshot")
        writer = (incoming.set_name, incoming.number)
        self._slots_of(self._received, writer).publish(incoming.generation, text)

    def _find(self, name: str) -> Path | None:
        """The file of a shard of this node, by `ID/STEM`."""
        id_, _, stem = name.partition("/")
        entries = (entry for folder in self._folders for entry in folder.entries())
        return next(
            (
                e.path
                for e in entries
                if e.manifest.id == id_ and e.path.name.startswith(f"{stem}.")
            ),
            None,
        )

    # Reading

    def open_newest(self, load: Load, stored_step: int) -> Snapshot | None:
        """Load the newest whole snapshot, if it is not older than the newest checkpoint in the
        storage, of step `stored_step` (0 without one); all ranks call it and get the same one. None
        without one. What is damaged, incomplete or does not fit is named in the log, and gone
        around.
        """
        own = OwnEntries.of(self._folders)
        refused: set[int] = set()
        found: Snapshot | None = None
        while found is None:
            key, held = search(self._world, self._ranks, own, refused, stored_step)
            if key < 0:
                break
            refused.add(key)
            if held is None:
                self._info("a snapshot refused: its description is not sound")
            else:
                found = self._load(held, own, key, load, stored_step)
        return found

    def keep(self, used: Checkpoint | None) -> None:
        """Delete all snapshots of the run but that one, if the run goes on from a snapshot. Each
        rank calls it before its first step."""
        self._kept = used.manifest.id if isinstance(used, Snapshot) else ""
        if self._is_first_on_host:
            for folder in self._folders:
                folder.remove_others({self._kept} - {""})

    def _load(
        self, held: Held, own: OwnEntries, key: int, load: Load, stored_step: int
    ) -> Snapshot | None:
        what = f"snapshot of step {held.manifest.step} refused"
        if held.missing:
            count = len(held.holders)
            self._info(f"{what}: {held.missing} of its {count} shards are on no node")
            return None
        peers = self._ranks.peers
        holders = {w: [peers[rank] for rank in ranks] for w, ranks in held.holders.items()}
        local = {entry.writer: entry.path for entry in own.of_generation(key)}
        folder = self._folders[0].path if self.folder is None else self.folder.path
        sources = Sources(local, holders, self._host, self._token, held.layout, folder)
        snapshot = Snapshot(held.manifest, sources, stored_step)

        def act() -> None:
            try:
                load(snapshot)
            except CheckpointCorrupt:
                raise
            except FatalError as error:  # of another model, for example
                raise CheckpointCorrupt(str(error)) from error

        problem = find_damage(act, self._world)
        if problem is None:
            found = next(iter(snapshot.problems), None)
            problem = self._world.first_error(found)
            if problem is not None:
                self._info(f"warning: snapshot: {problem}; read from another node")
            snapshot.count_all(self._world)
            return snapshot
        self._info(f"{what}: {problem}")
        return None

    def close(self, is_over: bool) -> None:
        """Stop the server. `is_over`: delete the run's snapshots on the nodes of this start; no
        rank uses them any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._server.close()
        for folder in self._folders:
            if is_over and self._is_first_on_host:
                folder.remove()
            folder.close()


def _begin(directory: Path, is_new: Callable[[], bool], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """What rank 0 tells the others. Raises OSError if the run's name cannot be kept."""
    path = directory / RUN_ID
    if is_new() or not path.exists():
        write_atomically(path, secrets.token_hex(8))
    run = path.read_text(encoding="utf-8").strip()
    tokens = {"start": secrets.token_hex(8), "token": secrets.token_hex(16)}
    return {"run": run, "fixed": dict(fixed), **tokens}


def _most_bytes(shard_set: ShardSet, index: int) -> int:
    """Bytes of a shard's file, at any step."""
    return file_size(Manifest(0, 0, id=_id_of("", 0)), shard_set, index) + _GROWTH


def _id_of(start: str, step: int) -> str:
    """The id of the snapshot of a step in a start, as long as that of a checkpoint."""
    return hashlib.sha256(f"{start}/{step}".encode()).hexdigest()[:16]
