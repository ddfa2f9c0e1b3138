"""The files of a shard's two newest snapshots on one node, written in place as mapped memory.

Note [Two generations]
A shard has two files on a node. A new snapshot goes into the one that does not hold the newest
snapshot that all ranks have whole. Before the first byte changes, the file's entry is deleted;
after the last one it is written by rename. So after a kill at any moment the newest whole snapshot
is there, and no entry names a file that is half-written. The files stay mapped and are written
again and again: new memory would cost more than the copy.
"""

import mmap
import os
from contextlib import suppress
from errno import ENOENT
from pathlib import Path

import torch

from megafrontier.checkpoint.format import CheckpointCorrupt
from megafrontier.checkpoint.local.node_folder import (
    ENTRY,
    SHARD,
    decode_entry,
    write_whole,
)

Generation = tuple[int, str]
"""Step and id of a snapshot."""
NO_GENERATION: Generation = (-1, "")


class MappedFile:
    """A file as memory of this process, which is allocated when it grows. A write to memory that a
    full file system cannot allocate would be a SIGBUS."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: torch.Tensor | None = None
        self._inode = 0

    def resize(self, size: int) -> torch.Tensor:
        """The file's bytes [size]. Raises OSError if there is no room."""
        if self._memory is None or len(self._memory) != size or not self.is_there:
            self._memory = None
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(file, size)
                os.posix_fallocate(file, 0, size)
                self._inode = os.fstat(file).st_ino
                self._memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
            except OSError as error:  # which names no file
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            finally:
                os.close(file)
        return self._memory

    @property
    def is_there(self) -> bool:
        """Whether the memory is that of the file that has the name now."""
        with suppress(OSError):
            return os.stat(self._path).st_ino == self._inode
        return False


class Slots:
    """The two files of one shard in a node's folder (Note [Two generations])."""

    def __init__(self, folder: Path, stem: str) -> None:
        """`stem`: the start of the files' names."""
        self._paths = [folder / f"{stem}.{slot}{SHARD}" for slot in range(2)]
        self._files = [MappedFile(path) for path in self._paths]
        self._held = [_generation(path) for path in self._paths]
        self._chosen, self._written = 0, NO_GENERATION

    def begin(self, size: int, kept: str, generation: Generation) -> torch.Tensor:
        """Memory [size] for a new snapshot, in the file that does not hold the snapshot with the id
        `kept`. Raises OSError if there is no room."""
        self._written = generation
        free = [slot for slot in range(2) if not kept or self._held[slot][1] != kept]
        self._chosen = min(free, key=lambda slot: self._held[slot])
        self._held[self._chosen] = NO_GENERATION
        self._paths[self._chosen].with_suffix(ENTRY).unlink(missing_ok=True)
        return self._files[self._chosen].resize(size)

    def publish(self, generation: Generation, entry: bytes) -> Path:
        """Say that the memory of `begin` holds a snapshot whole. Returns the file's path. Raises
        OSError, also if another snapshot has begun since."""
        path = self._paths[self._chosen]
        if generation != self._written or not self._files[self._chosen].is_there:
            raise OSError(ENOENT, "replaced or deleted while it was written", str(path))
        write_whole(path.with_suffix(ENTRY), entry)
        self._held[self._chosen] = generation
        return path

    def drop(self, id_: str) -> None:
        """Forget the snapshot with this id, if the files hold it. The memory is kept."""
        for slot, path in enumerate(self._paths):
            if self._held[slot][1] == id_:
                self._held[slot] = NO_GENERATION
                with suppress(OSError):
                    path.with_suffix(ENTRY).unlink(missing_ok=True)


def _generation(shard: Path) -> Generation:
    with suppress(CheckpointCorrupt, OSError):
        entry, _ = decode_entry(shard.with_suffix(ENTRY).read_bytes(), shard)
        return entry.generation
    return NO_GENERATION
