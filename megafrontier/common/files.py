"""Write files and folders so that a crash leaves the old state or the new one."""

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
_STALE_SECONDS = 86400.0
"""A work folder of another host without a new file for this long was left by a killed process. No
export takes that long for one file."""


def search_folder_hint(path: str | Path) -> str:
    """` in FOLDER` for an error about a relative `path`, "" for an absolute one: the config may
    have been written for another working directory."""
    with suppress(FileNotFoundError):  # the working directory was deleted
        return "" if os.path.isabs(path) else f" in {os.getcwd()}"
    return ""


def try_writing(folder: str | None, size: int) -> None:
    """Write a temporary file of `size` bytes into `folder` (None: where temporary files go). Raises
    OSError if that fails."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(size))


def write_atomically(path: Path, text: str) -> None:
    """Write a file, or the target of a symbolic link, by rename. Raises OSError."""
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        sync_file(file)
    temporary.replace(path)


def sync_file(file: IO[Any]) -> None:
    """Flush an open file to the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's names to the disk, so that a rename survives a power failure. Raises
    OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """Create an empty folder beside `out`, from which the body makes `out`; it is deleted after the
    body. Deletes what killed processes left there. Raises OSError.

    The folder's name has this process's host and id, because locks do not work on every storage.
    """
    host = socket.gethostname()
    folder = out.with_name(f".{out.name}.{host}.{os.getpid()}-{next(_NUMBERS)}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{glob.escape(out.name)}.*.partial"):
        if _is_stale(left, f".{out.name}.{host}"):
            shutil.rmtree(left, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_stale(folder: Path, ours: str) -> bool:
    """Whether the process that created a work folder is gone. On this host (names that begin with
    `ours`) the process id tells, on other hosts the folder's age."""
    name, pid, _ = folder.name.rsplit(".", 2)
    with suppress(OSError, ValueError):
        if name == ours and not Path(f"/proc/{int(pid.split('-')[0])}").exists():
            return True
        return time.time() - folder.stat().st_mtime > _STALE_SECONDS
    return False
