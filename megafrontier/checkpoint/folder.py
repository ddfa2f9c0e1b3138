"""The folder of a run's checkpoints: their names, which there are, and which are kept.

A checkpoint appears under its name `step-00000100` by one rename and disappears by one. Hidden
names are unfinished work: `.step-00000100.partial` is being written, `.step-00000100.removed` being
deleted. `step-00000100.superseded` is of a training that was given up. It is never resumed from,
counted or deleted; only the user does that.
"""

import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from megafrontier.checkpoint.format import FILE_NAME
from megafrontier.common.errors import StorageFailed, UserError, as_fatal_error
from megafrontier.common.files import search_folder_hint, sync_folder

T = TypeVar("T")

_NAME = re.compile(r"step-(\d{8,})")
_SUPERSEDED = re.compile(rf"{_NAME.pattern}\.superseded(-\d+)?")
_PARTIAL = re.compile(r"\.step-\d{8,}\.partial")
_REMOVED = re.compile(r"\.step-\d{8,}\.removed")


def step_folder(root: Path, step: int) -> Path:
    """The path of the checkpoint of a step."""
    return root / f"step-{step:08d}"


def partial_folder(root: Path, step: int) -> Path:
    """The path of the checkpoint of a step while it is being written."""
    return root / f".step-{step:08d}.partial"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name, None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def candidates(root: Path) -> Iterator[Path]:
    """Folders with a checkpoint's name, newest step first, whole or not. Raises OSError, unlike
    `Path.is_dir`, because a storage that does not answer does not mean that nothing is there."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = [(step_of(root / name), root / name) for name in os.listdir(root)]
        named = sorted((step, path) for step, path in found if step is not None)
        yield from (path for _, path in reversed(named) if is_folder(path))


def is_folder(path: Path) -> bool:
    """Whether there is a folder at `path`. Raises OSError if the storage does not answer."""
    return _has_mode(path, stat.S_ISDIR)


def _has_mode(path: Path, check: Callable[[int], bool]) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        return check(path.stat().st_mode)
    return False


def list_checkpoints(root: Path) -> list[Path]:
    """The published checkpoints (those with a manifest), oldest step first. Raises OSError.

    Not every byte needs to be right: `verify` checks that.
    """
    return [path for path in candidates(root) if _has_mode(path / FILE_NAME, stat.S_ISREG)][::-1]


def find(path: Path) -> list[Path]:
    """The checkpoints, oldest first, of a run directory, a checkpoints folder or a checkpoint.
    Raises UserError if there is none, StorageFailed."""
    try:
        if not is_folder(path):
            fits = "need a run, its checkpoints or one checkpoint"
            raise UserError(f"{path}: no such folder{search_folder_hint(path)}, {fits}")
        if step_of(path) is not None or _has_mode(path / FILE_NAME, stat.S_ISREG):
            return [path]
        found = list(candidates(path / "checkpoints")) or list(candidates(path))
    except OSError as error:
        raise as_fatal_error(error, f"{path}: {error.strerror}, need a folder to read") from error
    if not found:
        raise UserError(f"{path}: {_no_checkpoints(path)}")
    return found[::-1]


def _no_checkpoints(path: Path) -> str:
    """What an error says of a folder without checkpoints."""
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        command = f"megafrontier import {path} --out DIR"
        return f"a Hugging Face model, need a checkpoint: import it first, `{command}`"
    return "no checkpoints, need a folder with step-00000100 or the like"


def newest(path: Path) -> Path:
    """The newest checkpoint that `find` finds. Raises as `find`."""
    return find(path)[-1]


def of_newest(
    path: Path,
    use: Callable[[Path], T],
    broadcast: Callable[[Callable[[], str]], str] = lambda look: look(),
) -> T:
    """Return `use` of the newest checkpoint that `find` finds at `path`. If a running training
    prunes it meanwhile, `use` is called again with the one that is newest then.

    Ranks may call it together. `use` must then raise on all or no ranks, and `broadcast` gives all
    ranks what rank 0 sees. Raises as `find`, and what `use` raises for a checkpoint that is still
    there.
    """
    while True:
        chosen = Path(broadcast(lambda: str(newest(path))))
        try:
            return use(chosen)
        except (UserError, StorageFailed, OSError):
            if broadcast(lambda: str(_is_pruned(chosen))) != "True":  # noqa: B023 (called here)
                raise


def of_each(path: Path, look: Callable[[Path], T]) -> list[T]:
    """`look` of each checkpoint that `find` finds at `path`, oldest first, except those that a
    running training prunes meanwhile. Raises as `find`."""
    rows = [(one, look(one)) for one in find(path)]
    return [row for one, row in rows if one == path or not _is_pruned(one)]


def _is_pruned(path: Path) -> bool:
    with suppress(OSError):
        return not is_folder(path)
    return False


def prune(root: Path, keep: int, keep_every: int) -> list[Path]:
    """Hide all published checkpoints but the newest `keep` (0: all) and those of every
    `keep_every`-th step (0: none). Only one rank calls it.

    Returns the hidden folders, to be passed to `delete`. A kill in between leaves no half-deleted
    checkpoint under its name. Raises OSError.
    """
    if keep == 0:
        return []
    hidden = []
    for path in list_checkpoints(root)[:-keep]:
        step = step_of(path)
        assert step is not None
        if keep_every == 0 or step % keep_every != 0:
            hidden.append(path.with_name(f".{path.name}.removed"))
            path.rename(hidden[-1])
    sync_folder(root)
    return hidden


def delete(paths: Iterable[Path]) -> None:
    """Delete folders with their content, and links. Missing ones are skipped. Raises OSError."""
    for path in paths:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


def clean_partials(root: Path) -> None:
    """Delete what killed saves left. Only one rank calls it, while no rank saves into `root`. What
    cannot be deleted blocks only a save of the same step."""
    _clean(_named(root, _PARTIAL))


def clean_hidden(root: Path) -> None:
    """Delete what killed saves and deletions left. Only one rank calls it, while no rank saves into
    `root` or deletes there."""
    _clean([*_named(root, _PARTIAL), *_named(root, _REMOVED)])


def _clean(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            delete([path])


def _named(root: Path, pattern: re.Pattern[str]) -> list[Path]:
    names = os.listdir(root) if root.is_dir() else []
    return [root / name for name in sorted(names) if pattern.fullmatch(name)]


def set_aside(path: Path) -> Path:
    """Rename a checkpoint to the first free `NAME.superseded`. Returns the new path."""
    aside = path.with_name(f"{path.name}.superseded")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"{path.name}.superseded-{count}")
    path.rename(aside)
    return aside


def delete_old(root: Path, keep: int, keep_every: int, warn: Callable[[str], None]) -> None:
    """Delete the checkpoints that `prune` chooses. Only one rank calls it. A failure is a line for
    `warn`, because the newest checkpoints are there all the same."""
    try:
        delete(prune(root, keep, keep_every))
    except OSError as error:
        warn(f"warning: old checkpoints not deleted: {error}")


class Deletions:
    """The deletions of one rank's old checkpoints, in threads one after another. What a kill leaves
    of them, a later one deletes."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problems: SimpleQueue[OSError] = SimpleQueue()

    def start(self, root: Path, keep: int, keep_every: int) -> None:
        """Hide the checkpoints that `prune` chooses, and begin to delete all hidden ones. Raises
        OSError."""
        prune(root, keep, keep_every)
        if hidden := _named(root, _REMOVED):
            # A daemon, because a run that ends must not wait for storage that hangs.
            arguments = hidden, self._thread
            self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
            self._thread.start()

    def _run(self, paths: list[Path], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            delete(paths)
        except OSError as error:
            self._problems.put(error)

    def wait(self) -> None:
        """Return when all deletions that have begun are done."""
        if self._thread is not None:
            self._thread.join()

    def problems(self) -> list[OSError]:
        """Why deletions have failed since the last call."""
        return [self._problems.get() for _ in range(self._problems.qsize())]


def set_later_aside(root: Path, step: int) -> None:
    """Set aside all checkpoints after `step`. Only one rank calls it. Raises OSError."""
    for path in list(candidates(root)):
        if (step_of(path) or 0) > step:
            set_aside(path)


def is_set_aside(path: Path) -> bool:
    """Whether the path has a name that `set_aside` gives."""
    return _SUPERSEDED.fullmatch(path.name) is not None


def restore(path: Path, step: int) -> Path:
    """Give a checkpoint that was set aside its name again. A checkpoint that has this name now is
    set aside. Only one rank calls it. Returns the new path. Raises OSError."""
    named = step_folder(path.parent, step)
    if named.exists():
        set_aside(named)
    path.rename(named)
    sync_folder(path.parent)
    return named
