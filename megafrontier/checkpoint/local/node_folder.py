"""The folder in which a node keeps the snapshots of a run, in its memory or on its own disk.

    BASE/megafrontier-UID/JOB-PLACE-RUN/HOST/
        lock                            each rank of the node holds it while it lives
        LAYOUT.layout                   what a checkpoint's manifest says of all steps
        LAYOUT.SET.INDEX.SLOT.shard     a shard file, of this node's ranks or of its partner's
        LAYOUT.SET.INDEX.SLOT.entry     says that the shard file is whole, and of which step

Note [Whose snapshots]
A start takes snapshots of the same user, Slurm job and run only. The user's folder must be a folder
of the user with mode 0700. PLACE is a hash of the run directory's path. RUN is a random name that
the run directory keeps, and that changes when the run goes back to an older checkpoint or begins
anew: what was ahead of it is never found again.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from megafrontier.checkpoint.format import CheckpointCorrupt, Manifest
from megafrontier.common.errors import UserError

MEMORY_SHARE = 0.4
"""Of a host's memory, for all snapshots in it. The rest is for what training has there: offloaded
states, the copy of a checkpoint that is being written, loaders and the page cache. The kernel
itself limits /dev/shm to one half."""
ENTRY, LAYOUT, SHARD = ".entry", ".layout", ".shard"
_PLACE = "snapshot"
"""The key of a manifest's `extra` with what an entry says of its shard file."""


@dataclass(frozen=True)
class RunKey:
    """Whose snapshots: those of the Slurm job `job` ("local" without one) and of the run named
    `run` whose directory's path has the hash `place` (Note [Whose snapshots])."""

    job: str
    place: str
    run: str

    @classmethod
    def of(cls, directory: Path, run: str, environment: Mapping[str, str]) -> "RunKey":
        path = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]
        return cls(environment.get("SLURM_JOB_ID") or "local", path, run)

    def __str__(self) -> str:
        return f"{self.job}-{self.place}-{self.run}"

    def is_abandoned(self, other: str) -> bool:
        """Whether the folder with the name `other`, of which no process is alive, may go. Another
        run of this Slurm job may be about to start again."""
        if other == str(self):
            return False
        job, _, rest = other.partition("-")
        return job != self.job or job == "local" or rest.startswith(f"{self.place}-")


def base_folders(chosen: str, environment: Mapping[str, str]) -> list[Path]:
    """The folders in which the snapshots may be, the one to be tried first first. `chosen`:
    `checkpoint.local.folder`."""
    if chosen != "auto":
        return [Path(chosen)]
    names = ("MEGAFRONTIER_SNAPSHOT_DISK", "SLURM_TMPDIR", "TMPDIR")
    disks = (environment.get(name, "") for name in names)
    return list(dict.fromkeys([Path("/dev/shm"), *(Path(disk) for disk in disks if disk)]))


def users_folder(base: Path) -> Path:
    """The folder of this user's snapshots, which is created. Raises UserError if it is another
    user's, or if others may enter it; OSError."""
    path = base / f"megafrontier-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not is_private or found.st_uid != os.geteuid():
        what = f"of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        raise UserError(f"{path}: {what}, need a folder of user {os.geteuid()} with mode 700")
    return path


def is_in_memory(path: Path) -> bool:
    """Whether a folder's file system is in the host's memory."""
    best, kind = -1, ""
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        for line in file:
            _, mount, found, *_ = line.split()
            if path.resolve().is_relative_to(mount) and len(mount) >= best:
                best, kind = len(mount), found
    return kind in ("tmpfs", "ramfs")


def room_problem(base: Path, needed: int, held: int) -> str | None:
    """Why there is no room in `base` for `needed` bytes of which `held` are there; None if there
    is. Raises OSError."""
    found = os.statvfs(base)
    free = found.f_bavail * found.f_frsize + held
    if free < needed:
        return f"{base}: {free / 2**30:.3g} GiB free, need {needed / 2**30:.3g}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if is_in_memory(base) and needed > MEMORY_SHARE * memory:
        most = f"{MEMORY_SHARE:.0%} of the host's {memory / 2**30:.3g} GiB"
        return f"{base}: in memory, where snapshots take at most {most}, need {needed / 2**30:.3g}"
    return None


@dataclass(frozen=True)
class SnapshotEntry:
    """A whole shard file of a snapshot. `manifest`: of the snapshot, without config and sets.
    `layout`: names the file with these. `path`: of the shard file."""

    manifest: Manifest
    layout: str
    set_name: str
    index: int
    path: Path

    @property
    def generation(self) -> tuple[int, str]:
        """The step and the id of the snapshot, of which the newest is the largest."""
        return self.manifest.step, self.manifest.id

    @property
    def writer(self) -> tuple[str, int]:
        """The set and the number of the shard."""
        return self.set_name, self.index


def stem_of(layout: str, set_name: str, index: int) -> str:
    """The start of the names of a shard's files."""
    return f"{layout}.{set_name}.{index}"


def encode_entry(manifest: Manifest, layout: str, set_name: str, index: int, size: int) -> bytes:
    """An entry's file. `manifest`: of the snapshot, whose sets are not written. `size`: of the
    shard file."""
    about: dict[str, Any] = {"layout": layout, "set": set_name, "index": index, "size": size}
    extra = {**manifest.extra, _PLACE: about}
    return replace(manifest, config={}, sets=(), extra=extra).encode()


def decode_entry(text: bytes, path: Path) -> tuple[SnapshotEntry, int]:
    """The inverse of `encode_entry`: the entry of the shard file at `path`, and that file's size.
    Raises CheckpointCorrupt."""
    manifest = Manifest.decode(text, path)
    try:
        extra = dict(manifest.extra)
        about = extra.pop(_PLACE)
        where = str(about["layout"]), str(about["set"]), int(about["index"])
        return SnapshotEntry(replace(manifest, extra=extra), *where, path), int(about["size"])
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"{path}: not an entry of a snapshot: {error!r}") from error


class NodeFolder:
    """The folder of a run's snapshots on one node, locked as long as this process lives."""

    def __init__(self, base: Path, key: RunKey, host: str) -> None:
        """Create it. Raises UserError as `users_folder` does, OSError."""
        self.base = base
        users_folder(base)
        self.path = folder_of(base, key, host)
        while True:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Another process may have found it unlocked, and delete it now.
            with suppress(FileNotFoundError, BlockingIOError):
                self._lock = _lock(self.path / "lock", fcntl.LOCK_SH)
                break

    @property
    def held_bytes(self) -> int:
        """Bytes of all files of the run's snapshots on this node."""
        return sum(path.stat().st_size for path in self.path.glob(f"*{SHARD}"))

    def write_layout(self, text: bytes) -> str:
        """Keep what manifests of this start have in common. Returns its name. Raises OSError."""
        name = hashlib.sha256(text).hexdigest()[:16]
        if not (self.path / f"{name}{LAYOUT}").exists():
            write_whole(self.path / f"{name}{LAYOUT}", text)
        return name

    def read_layout(self, name: str) -> bytes:
        """What `write_layout` has kept under a name. Raises CheckpointCorrupt, OSError."""
        path = self.path / f"{name}{LAYOUT}"
        text = path.read_bytes()
        if hashlib.sha256(text).hexdigest()[:16] != name:
            raise CheckpointCorrupt(f"{path}: changed since it was written")
        return text

    def entries(self) -> Iterator[SnapshotEntry]:
        """The shard files that are there in full length. What cannot be read is left out."""
        for path in sorted(self.path.glob(f"*{ENTRY}")):
            with suppress(CheckpointCorrupt, OSError):
                shard = path.with_suffix(SHARD)
                entry, size = decode_entry(path.read_bytes(), shard)
                if shard.stat().st_size == size:
                    yield entry

    def remove_others(self, ids: set[str], layout: str = "") -> None:
        """Delete the shard files of snapshots other than these, and files without an entry, unless
        they are of `layout`, because they may be being written. One rank of a node calls it."""
        found = {entry.path.stem: entry.manifest.id for entry in self.entries()}
        for path in self.path.glob(f"*{SHARD}"):
            is_unfinished = path.stem not in found and path.stem.startswith(f"{layout}.")
            if not is_unfinished and found.get(path.stem) not in ids:
                path.with_suffix(ENTRY).unlink(missing_ok=True)
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def open_folders(
    bases: Sequence[Path], key: RunKey, host: str, needed: int, is_chosen: bool
) -> tuple[list[NodeFolder], NodeFolder | None, list[str]]:
    """The folders of a run on this node: those that are there and that of the first base with room
    for `needed` bytes; that one, or None; and what is wrong with bases before it.

    is_chosen: somebody has chosen the base. Raises UserError then if it cannot be used.
    """
    folders: list[NodeFolder] = []
    chosen: NodeFolder | None = None
    problems = []
    for base in bases:
        if chosen is not None and not folder_of(base, key, host).exists():
            continue
        try:
            if not is_chosen:
                base.mkdir(mode=0o700, parents=True, exist_ok=True)
            folders.append(NodeFolder(base, key, host))
            problem = room_problem(base, needed, folders[-1].held_bytes)
        except OSError as error:
            problem = f"{error.filename or base}: {error.strerror}"
        except UserError as error:
            problem = str(error)
        else:
            if problem is None:
                chosen = chosen or folders[-1]
            elif chosen is None:
                problems.append(problem)
            continue
        if is_chosen:
            raise UserError(f"checkpoint.local.folder: {problem}")
        if chosen is None:
            problems.append(problem)
    return folders, chosen, problems


def remove_abandoned(base: Path, key: RunKey) -> None:
    """Delete the folders of earlier jobs and of dead local processes of this user in `base`. One
    rank of a node calls it."""
    with suppress(OSError, UserError):
        folder = base / f"megafrontier-{os.geteuid()}"
        for path in users_folder(base).iterdir() if folder.exists() else ():
            if key.is_abandoned(path.name):
                _remove_unlocked(path)


def _remove_unlocked(folder: Path) -> None:
    """Delete the folder of a run, unless a process holds a lock in it."""
    locks: list[IO[bytes]] = []
    with suppress(OSError):
        locks += [_lock(path, fcntl.LOCK_EX) for path in folder.glob("*/lock")]
        shutil.rmtree(folder)
    for lock in locks:
        lock.close()


def folder_of(base: Path, key: RunKey, host: str) -> Path:
    """The folder of a run on a node."""
    return base / f"megafrontier-{os.geteuid()}" / str(key) / host


def write_whole(path: Path, data: bytes) -> None:
    """Write a file by rename. It need not survive the node. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_bytes(data)
    os.rename(temporary, path)


def _lock(path: Path, kind: int) -> IO[bytes]:
    """Open a file and lock it. Raises BlockingIOError if another process holds it, and
    FileNotFoundError if it was deleted meanwhile."""
    file = path.open("ab")
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        path.stat()
    except OSError:
        file.close()
        raise
    return file
