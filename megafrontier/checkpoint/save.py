"""Save a checkpoint: every writer its own file, then one rename.

Note [Atomic save]
The order of the steps makes a crash harmless: shard files, agreement of all ranks that these are on
the disk, manifest, rename. Before the rename nothing has the name of a checkpoint. After it,
everything that the name promises is on the disk.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from megafrontier.checkpoint import folder
from megafrontier.checkpoint.format import (
    FILE_NAME,
    FILES_PER_FOLDER,
    AttachedFile,
    CheckpointWriteError,
    Manifest,
    crc32_hex,
    shard_path,
)
from megafrontier.checkpoint.shard_file import write_shard
from megafrontier.common.errors import StorageFailed, UserError, as_fatal_error
from megafrontier.common.files import sync_file, sync_folder
from megafrontier.parallel.world import World

Shards = Mapping[str, Sequence[torch.Tensor]]
Attach = Callable[[Path], None]


def save(
    root: Path,
    manifest: Manifest,
    shards: Shards,
    index: int,
    is_writer: bool,
    world: World,
    attach: Attach | None = None,
) -> Path:
    """Write a checkpoint into `root`; all ranks call it. Returns the checkpoint's folder.

    `shards[state][u]` is shard number `index` of the flat buffer of unit u: 1-D, of numel /
    num_shards elements and the type of the state, on any device. For each index, one rank has
    `is_writer` set. `attach` is called on rank 0 and may put more files into the folder it gets.

    Checkpoints of this and later steps that are already there belong to a training that was given
    up, for instance by resuming from an earlier step. They are set aside. Otherwise the next start
    would resume from them, and `prune` would delete the new ones.

    Raises CheckpointWriteError on all ranks if one of them failed, for instance because the disk is
    full. Nothing is published then, and older checkpoints are untouched. Raises ValueError if the
    shards are not what the manifest says.
    """
    _check_shards(manifest, shards, index)
    manifest.encode()  # raises what JSON cannot hold, before anything is written
    unfinished = folder.partial_folder(root, manifest.step)
    final = folder.step_folder(root, manifest.step)
    is_first = world.rank == 0

    def run(is_mine: bool, act: Callable[[], None]) -> None:
        world.run_on_all(act if is_mine else lambda: None, partial(_as_error, root, world.rank))

    try:
        run(is_first, lambda: _start(root, unfinished))
        manifest = replace(manifest, id=world.broadcast_from_rank_0(lambda: secrets.token_hex(8)))
        run(is_writer, lambda: _write_own(unfinished, manifest, index, shards))
        run(is_first, lambda: _finish(unfinished, manifest, attach))
        run(is_first, lambda: _publish(unfinished, final))
    except (UserError, StorageFailed) as error:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        world.barrier()
        line = f"checkpoint not saved: {error}"
        raise CheckpointWriteError(line, isinstance(error, StorageFailed)) from error
    return final


def _check_shards(manifest: Manifest, shards: Shards, index: int) -> None:
    """Every rank checks its own shards, which needs no agreement."""
    for state, dtype in manifest.states.items():
        for unit, shard in zip(manifest.units, shards[state], strict=True):
            need = (dtype, (unit.numel // manifest.num_shards,))
            if (shard.dtype, tuple(shard.shape)) != need:
                found = (shard.dtype, tuple(shard.shape))
                raise ValueError(f"{state} of unit {unit.name}: shard {found}, need {need}")


def _as_error(root: Path, rank: int, error: Exception) -> UserError | StorageFailed:
    """The error that all ranks raise for an exception of one. This covers every exception, because
    a rank that left with its own would leave the others waiting."""
    if isinstance(error, OSError) and error.strerror:
        # The error of a full disk names no file.
        line = f"rank {rank}: {error.filename or root}: {error.strerror}"
        return as_fatal_error(error, line)
    return UserError(f"rank {rank}: {type(error).__name__}: {error}")


def _start(root: Path, unfinished: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    folder.clean_partials(root)
    folder.delete([unfinished])  # raises if it is still there
    (unfinished / "pieces").mkdir(parents=True)


def _write_own(unfinished: Path, manifest: Manifest, index: int, shards: Shards) -> None:
    path = unfinished / shard_path(index)
    path.parent.mkdir(exist_ok=True)
    write_shard(path, manifest, index, shards)


def _finish(unfinished: Path, manifest: Manifest, attach: Attach | None) -> None:
    """Do everything but the rename: attached files, manifest, and all folders to the disk."""
    if attach is not None:
        attach(unfinished)
    _check_count(unfinished, manifest.num_shards)
    manifest = replace(
        manifest,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        files=[_sync_attached(path, unfinished) for path in _attached(unfinished)],
    )
    with open(unfinished / FILE_NAME, "xb") as file:
        file.write(manifest.encode())
        sync_file(file)
    for path, _, _ in os.walk(unfinished):
        sync_folder(Path(path))


def _check_count(unfinished: Path, num_shards: int) -> None:
    """Whether every shard had a writer. Only names are counted, because there may be thousands."""
    for first in range(0, num_shards, FILES_PER_FOLDER):
        path = (unfinished / shard_path(first)).parent
        need = min(FILES_PER_FOLDER, num_shards - first)
        found = len(os.listdir(path)) if path.is_dir() else 0
        if found != need:
            raise ValueError(f"{path.name}: {found} shard files, need {need}: no writer for some")


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
    root, step = final.parent, folder.step_of(final)
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
