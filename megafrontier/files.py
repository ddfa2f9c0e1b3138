"""Files and folders that are either as they were or as they are to be."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megafrontier.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Write a file by rename, so that a kill leaves the old one or the new one; where `path` is a
    link, what it leads to. Raises OSError."""
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def in_work(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, of which `out` is to be made; it is deleted at the end. Its
    name is always the same, so that what a killed process left goes with the next one.

    Raises UserError while another process works on `out`, OSError.
    """
    folder = out.with_name(f".{out.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, folder, out)
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        try:
            yield folder
        finally:
            if _is_at(descriptor, folder):  # and not another's, after it became `out`
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, out: Path) -> None:
    """The kernel forgets it when the process dies."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{out}: another process is writing it") from error
    except OSError:  # Lustre mounted without flock: two writers of one name go unnoticed there
        return
    if not _is_at(descriptor, folder):
        raise UserError(f"{out}: another process has just written it")


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
