"""Save: every writer its own file, then one rename.

The order is what makes a crash harmless: pieces, agreement that all of them are on the disk,
manifest, rename. Until the rename nothing has the name of a checkpoint; after it everything that
the name promises is on the disk.
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
from megafrontier.checkpoint.checksum import crc32_hex
from megafrontier.checkpoint.errors import CheckpointWriteError
from megafrontier.checkpoint.manifest import (
    FILE_NAME,
    PIECES_PER_FOLDER,
    Attached,
    Manifest,
    piece_file,
)
from megafrontier.checkpoint.piece import write_piece
from megafrontier.common.errors import StorageFailed, UserError, as_fatal_error
from megafrontier.parallel.world import World

Shards = Mapping[str, Sequence[torch.Tensor]]
Attach = Callable[[Path], None]


def save(
    root: Path,
    manifest: Manifest,
    shards: Shards,
    piece: int,
    writer: bool,
    world: World,
    attach: Attach | None = None,
) -> Path:
    """Write a checkpoint into `root`. All ranks call it alike; returns its folder.

    `shards[state][u]` is piece number `piece` of unit u's flat buffer: 1-D, numel / pieces
    elements of the state's type, on any device. Exactly one rank per piece has `writer` set.
    `attach`, called on rank 0, puts further files into the folder that it is given.

    Checkpoints of this or a later step that are already there belong to a line of training that
    was given up (a resume from an earlier step, or past a damaged one). They are set aside, or
    the next resume would follow them, and `prune` delete what was just saved.

    Raises CheckpointWriteError on all ranks when any could not do its part, such as on a full
    disk: then nothing is published and the older checkpoints are as they were. Raises ValueError
    when the shards are not what the manifest says.
    """
    _check_shards(manifest, shards, piece)
    manifest.encode()  # What JSON cannot hold is to be found before anything is written.
    unfinished = folder.partial_folder(root, manifest.step)
    final = folder.step_folder(root, manifest.step)
    is_first = world.rank == 0

    def run(is_mine: bool, act: Callable[[], None]) -> None:
        world.run_on_all(act if is_mine else lambda: None, partial(_as_error, root, world.rank))

    try:
        run(is_first, lambda: _start(root, unfinished))
        checkpoint_id = world.broadcast_from_rank_0(lambda: secrets.token_hex(8))
        manifest = replace(manifest, id=checkpoint_id)
        run(writer, lambda: _write_own(unfinished, manifest, piece, shards))
        run(is_first, lambda: _finish(unfinished, manifest, attach))
        run(is_first, lambda: _publish(unfinished, final))
    except (UserError, StorageFailed) as error:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        world.barrier()
        is_storages = isinstance(error, StorageFailed)
        raise CheckpointWriteError(f"checkpoint not saved: {error}", is_storages) from error
    return final


def _check_shards(manifest: Manifest, shards: Shards, piece: int) -> None:
    """Every rank can see for itself whether its shards are right: no agreement is needed."""
    if not 0 <= piece < manifest.pieces:
        raise ValueError(f"piece {piece}, need 0 to {manifest.pieces - 1}")
    if set(shards) != set(manifest.states):
        raise ValueError(f"shards of {sorted(shards)}, the manifest has {sorted(manifest.states)}")
    for state, dtype in manifest.states.items():
        for unit, shard in zip(manifest.units, shards[state], strict=True):
            need = (dtype, (unit.numel // manifest.pieces,))
            if (shard.dtype, tuple(shard.shape)) != need:
                found = (shard.dtype, tuple(shard.shape))
                raise ValueError(f"{state} of unit {unit.name}: shard {found}, need {need}")


def _as_error(root: Path, rank: int, error: Exception) -> UserError | StorageFailed:
    """The error that all ranks raise for one of `rank`. Every exception counts, because a rank
    that left with its own would leave the others waiting."""
    if isinstance(error, OSError) and error.strerror:
        # The error of a full disk names no file.
        line = f"rank {rank}: {error.filename or root}: {error.strerror}"
        return as_fatal_error(error, line)
    return UserError(f"rank {rank}: {type(error).__name__}: {error}")


def _start(root: Path, partial: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    folder.clean_partials(root)
    folder.delete([partial])  # or say why not
    (partial / "pieces").mkdir(parents=True)


def _write_own(partial: Path, manifest: Manifest, piece: int, shards: Shards) -> None:
    path = partial / piece_file(piece)
    path.parent.mkdir(exist_ok=True)
    write_piece(path, manifest, piece, shards)


def _finish(partial: Path, manifest: Manifest, attach: Attach | None) -> None:
    """Everything but the name: attached files, folders on the disk, manifest."""
    if attach is not None:
        attach(partial)
    _check_pieces(partial, manifest.pieces)
    manifest = replace(
        manifest,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        files=[_settle(path, partial) for path in _attached(partial)],
    )
    _write(partial / FILE_NAME, manifest.encode())
    for path, _, _ in os.walk(partial):  # asks nothing about single files: there may be thousands
        folder.fsync_folder(Path(path))


def _check_pieces(partial: Path, pieces: int) -> None:
    """Whether the writers were one for every piece; counted by folder, no file is looked at."""
    for first in range(0, pieces, PIECES_PER_FOLDER):
        path = (partial / piece_file(first)).parent
        need = min(PIECES_PER_FOLDER, pieces - first)
        found = len(os.listdir(path)) if path.is_dir() else 0
        if found != need:
            raise ValueError(f"{path.name}: {found} piece files, need {need}: no writer for some")


def _attached(partial: Path) -> list[Path]:
    top = sorted(path for path in partial.iterdir() if path.name != "pieces")
    found = [path for start in top for path in (start, *sorted(start.rglob("*")))]
    return [path for path in found if path.is_file()]


def _settle(path: Path, partial: Path) -> Attached:
    """Bring an attached file to the disk and note what it holds."""
    with open(path, "rb") as file:
        data = file.read()
        os.fsync(file.fileno())
    return Attached(path.relative_to(partial).as_posix(), len(data), crc32_hex(data))


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _publish(partial: Path, final: Path) -> None:
    root, step = final.parent, folder.step_of(final)
    assert step is not None
    replaced = folder.set_aside(final) if final.exists() else None
    try:
        os.rename(partial, final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    folder.set_later_aside(root, step)
    folder.fsync_folder(root)
