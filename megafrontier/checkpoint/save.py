"""Save a checkpoint: every writer its own file, then one rename.

Note [Atomic save]
The order of the steps makes a crash harmless: shard files, agreement of all ranks that these are on
the disk, manifest, rename. Before the rename nothing has the name of a checkpoint. After it,
everything that the name promises is on the disk.
"""

import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from megafrontier.checkpoint import folder
from megafrontier.checkpoint.format import AttachedFile, CheckpointWriteError, Manifest, crc32_hex
from megafrontier.checkpoint.host_copy import HostCopy
from megafrontier.checkpoint.sets import (
    FILES_PER_FOLDER,
    ShardSet,
    decode_set,
    describe_set,
)
from megafrontier.checkpoint.shard_file import (
    ReadSlice,
    Shards,
    Slice,
    slice_of,
    slices_of,
    write_shard,
)
from megafrontier.common.checkpoints import MANIFEST, step_folder, step_of
from megafrontier.common.errors import StorageFailed, UserError, as_fatal_error
from megafrontier.common.files import sync_file, sync_folder
from megafrontier.parallel.fault_injection import fault_point
from megafrontier.parallel.world import World

Attach = Callable[[Path], None]
SETS = "sets"
"""The folder in which rank 0 finds the sets, each from the rank that writes its first shard."""


@dataclass(frozen=True)
class OwnShard:
    """What a rank has of a set: shard number `index` of every unit. `is_writer`: whether it writes
    that shard's file, which one rank does."""

    shard_set: ShardSet
    index: int
    is_writer: bool
    shards: Shards

    def read(self, part: Slice) -> torch.Tensor:
        """The values of a slice [count], on any device."""
        return slice_of(self.shards, part)

    def check(self) -> None:
        """Raise ValueError if the shards are not what the set says."""
        for number, unit in enumerate(self.shard_set.units):
            for state, dtype in unit.states.items():
                shard = self.shards[state][number]
                need = (dtype, (unit.layout.numel // self.shard_set.num_shards,))
                found = None if shard is None else (shard.dtype, tuple(shard.shape))
                if found != need:
                    name = unit.layout.name
                    raise ValueError(f"{state} of unit {name}: shard {found}, need {need}")


def save(
    root: Path,
    manifest: Manifest,
    own: Sequence[OwnShard],
    world: World,
    attach: Attach | None = None,
) -> Path:
    """Write a checkpoint into `root`; all ranks call it. Returns the checkpoint's folder.

    own: this rank's shards, one of each set that it has units of. Sets with the same name are the
    same on all ranks; the manifest needs none. `attach` is called on rank 0 and may put more files
    into the folder it gets.

    Checkpoints of this and later steps that are already there belong to a training that was given
    up, for instance by resuming from an earlier step. They are set aside. Otherwise the next start
    would resume from them, and `prune` would delete the new ones.

    Raises CheckpointWriteError on all ranks if one of them failed, for instance because the disk is
    full. Nothing is published then, and older checkpoints are untouched. Raises ValueError if the
    shards are not what their sets say.
    """
    return PendingSave(root, manifest, own, world, attach).finish()


class PendingSave:
    """A save that has begun. Nothing is published before `finish`.

    All ranks make it and finish it, in the same place of their program. In between a thread may
    write; it makes no collective call.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        own: Sequence[OwnShard],
        world: World,
        attach: Attach | None = None,
    ) -> None:
        """Begin as `save` does. The shards must not change before `finish` returns, unless
        `write_behind` has copied them."""
        # Every rank checks its own shards, which needs no agreement.
        for part in own:
            part.check()
        manifest.encode()  # raises what JSON cannot hold, before anything is written
        self._root, self._world, self._own = root, world, own
        self._unfinished = folder.partial_folder(root, manifest.step)
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None
        with self._undone_if_it_fails():
            self._run_on_rank_0(lambda: _start(root, self._unfinished, attach))
            id_ = world.broadcast_from_rank_0(lambda: secrets.token_hex(8))
        # The caller may change what it has given before the manifest is written.
        self._manifest = replace(manifest, id=id_, extra=deepcopy(manifest.extra))

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self._manifest.step

    @property
    def is_written(self) -> bool:
        """Whether this rank's thread has no more to write."""
        return self._thread is None or not self._thread.is_alive()

    def write_behind(self) -> None:
        """Copy this rank's shards to host memory and write the copies in a thread. The shards may
        change afterwards. Fails only in `finish`."""
        try:
            copies = [self._copy(part) if part.is_writer else None for part in self._own]
        except Exception as error:  # for all ranks, in `finish`
            self._problem, self._thread = error, threading.Thread()
            return
        # A daemon, because a run that fails must not wait for storage that hangs.
        self._thread = threading.Thread(target=self._write_copies, args=(copies,), daemon=True)
        self._thread.start()

    def _copy(self, part: OwnShard) -> HostCopy:
        slices = slices_of(part.shard_set, part.index, self._manifest.slice_elements)
        return HostCopy(part.shards, slices)

    def _write_copies(self, copies: list[HostCopy | None]) -> None:
        try:
            fault_point("save", step=self.step)
            for part, copy in zip(self._own, copies, strict=True):
                if copy is not None:
                    _write_own(self._unfinished, self._manifest, part, copy.take)
        except Exception as error:
            self._problem = error

    def finish(self) -> Path:
        """Wait until all ranks have written, and publish. Returns the checkpoint's folder. Raises
        CheckpointWriteError as `save` does."""
        final = step_folder(self._root, self.step)
        with self._undone_if_it_fails():
            self._run(self._finish_writing)
            self._run_on_rank_0(lambda: _finish(self._unfinished, self._manifest))
            self._run_on_rank_0(lambda: _publish(self._unfinished, final))
        return final

    def _finish_writing(self) -> None:
        if self._thread is None:
            for part in self._own:
                if part.is_writer:
                    _write_own(self._unfinished, self._manifest, part, part.read)
            return
        if self._thread.ident is not None:
            self._thread.join()
        if self._problem is not None:
            raise self._problem

    def _run(self, act: Callable[[], None]) -> None:
        self._world.run_on_all(act, partial(_as_error, self._root, self._world.rank))

    def _run_on_rank_0(self, act: Callable[[], None]) -> None:
        self._run(act if self._world.rank == 0 else lambda: None)

    @contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except (UserError, StorageFailed) as error:
            if self._world.rank == 0:
                shutil.rmtree(self._unfinished, ignore_errors=True)
            self._world.barrier()
            line = f"checkpoint not saved: {error}"
            raise CheckpointWriteError(line, isinstance(error, StorageFailed)) from error


def _as_error(root: Path, rank: int, error: Exception) -> UserError | StorageFailed:
    """The error that all ranks raise for an exception of one. This covers every exception, because
    a rank that left with its own would leave the others waiting."""
    if isinstance(error, UserError | StorageFailed):  # of what a shard is computed from
        return error
    if isinstance(error, OSError) and error.strerror:
        # The error of a full disk names no file.
        line = f"rank {rank}: {error.filename or root}: {error.strerror}"
        return as_fatal_error(error, line)
    return UserError(f"rank {rank}: {type(error).__name__}: {error}")


def _start(root: Path, unfinished: Path, attach: Attach | None) -> None:
    root.mkdir(parents=True, exist_ok=True)
    folder.clean_partials(root)
    folder.delete([unfinished])  # raises if it is still there
    for name in ("pieces", SETS):
        (unfinished / name).mkdir(parents=True)
    if attach is not None:
        attach(unfinished)


def _write_own(unfinished: Path, manifest: Manifest, part: OwnShard, read: ReadSlice) -> None:
    path = unfinished / part.shard_set.file(part.index)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shard(path, manifest, part.shard_set, part.index, read)
    if part.index == 0:
        _describe(unfinished, part.shard_set)


def _describe(unfinished: Path, shard_set: ShardSet) -> None:
    """Tell rank 0 about a set, of which it may have nothing itself."""
    text = json.dumps(describe_set(shard_set))
    (unfinished / SETS / f"{shard_set.name}.json").write_text(text, encoding="utf-8")


def _take_sets(unfinished: Path) -> Iterator[ShardSet]:
    """The sets that ranks have described."""
    for path in sorted((unfinished / SETS).iterdir()):
        yield decode_set(*json.loads(path.read_text(encoding="utf-8")))
    shutil.rmtree(unfinished / SETS)


def _finish(unfinished: Path, manifest: Manifest) -> None:
    """Do everything but the rename: sets, attached files, manifest, and all folders to the disk."""
    sets = list(_take_sets(unfinished))
    _check_count(unfinished, sets)
    manifest = replace(
        manifest,
        sets=sets,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        files=[_sync_attached(path, unfinished) for path in _attached(unfinished)],
    )
    with open(unfinished / MANIFEST, "xb") as file:
        file.write(manifest.encode())
        sync_file(file)
    for path, _, _ in os.walk(unfinished):
        sync_folder(Path(path))


def _check_count(unfinished: Path, sets: Sequence[ShardSet]) -> None:
    """Whether every shard had a writer. Only names are counted, because there may be thousands."""
    for shard_set in sets:
        for first in range(0, shard_set.num_shards, FILES_PER_FOLDER):
            path = (unfinished / shard_set.file(first)).parent
            need = min(FILES_PER_FOLDER, shard_set.num_shards - first)
            found = len(os.listdir(path)) if path.is_dir() else 0
            if found != need:
                name = path.relative_to(unfinished)
                raise ValueError(f"{name}: {found} shard files, need {need}: no writer for some")


def _attached(unfinished: Path) -> list[Path]:
    top = sorted(path for path in unfinished.iterdir() if path.name != "pieces")
    found = [path for start in top for path in (start, *sorted(start.rglob("*")))]
    return [path for path in found if path.is_file()]


def _sync_attached(path: Path, unfinished: Path) -> AttachedFile:
    with open(path, "rb") as file:
        data = file.read()
        os.fsync(file.fileno())
    return AttachedFile(path.relative_to(unfinished).as_posix(), len(data), crc32_hex(data))


def _publish(unfinished: Path, final: Path) -> None:
    root, step = final.parent, step_of(final)
    assert step is not None
    replaced = folder.set_aside(final) if final.exists() else None
    try:
        os.rename(unfinished, final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    folder.set_later_aside(root, step)
    sync_folder(root)
