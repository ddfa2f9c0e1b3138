"""Files and folders that are either as they were or as they are to be."""

import glob
import itertools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_NUMBERS = itertools.count()
SILENT_SECONDS = 86400.0
"""Without a new file in the folder; no export writes one for so long."""


def looked_in(path: str | Path) -> str:
    """` in FOLDER`, to be said of a relative path that is not there: a config may have been written
    for another folder than this process's. Nothing of other paths."""
    with suppress(FileNotFoundError):  # somebody has deleted it
        return "" if os.path.isabs(path) else f" in {os.getcwd()}"
    return ""


def try_room(folder: str | None, size: int) -> None:
    """Write so many bytes into a folder, or where temporary files go, and leave nothing. Raises
    OSError where that cannot be."""
    with tempfile.TemporaryFile(dir=folder) as trial:
        trial.write(bytes(size))


def write_whole(path: Path, text: str) -> None:
    """Write a file by rename, so that a kill leaves the old one or the new one; where `path` is a
    link, what it leads to. Raises OSError."""
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        sync_file(file)
    temporary.replace(path)


def sync_file(file: IO[Any]) -> None:
    """Bring what has been written to an open file to the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Bring a folder's names to the disk: without it, a rename may be lost in a power failure.
    Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def in_work(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, of which `out` is to be made; it is deleted at the end. It is
    this process's own, for no lock is one on every storage; what killed processes left goes first.
    Raises OSError."""
    host = socket.gethostname()
    folder = out.with_name(f".{out.name}.{host}.{os.getpid()}-{next(_NUMBERS)}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{glob.escape(out.name)}.*.partial"):
        if _is_left(left, f".{out.name}.{host}"):
            shutil.rmtree(left, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path, ours: str) -> bool:
    """Whether its process is gone: one of this host, whose folders' names begin with `ours`, by its
    number, another by its silence."""
    name, pid, _ = folder.name.rsplit(".", 2)
    with suppress(OSError, ValueError):
        if name == ours and not Path(f"/proc/{int(pid.split('-')[0])}").exists():
            return True
        return time.time() - folder.stat().st_mtime > SILENT_SECONDS
    return False
