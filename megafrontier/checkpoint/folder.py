"""The folder of a run's checkpoints: the names of unfinished work, and which are kept.

A checkpoint appears under its name `step-00000100` by one rename and disappears by one. Hidden
names are unfinished work: `.step-00000100.partial` is being written, `.step-00000100.removed` being
deleted. `step-00000100.superseded` is of a training that was given up. It is never resumed from,
counted or deleted; only the user does that.
"""

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from megafrontier.common.checkpoints import (
    NAME,
    candidates,
    list_checkpoints,
    step_folder,
    step_of,
)
from megafrontier.common.files import sync_folder

_SUPERSEDED = re.compile(rf"{NAME.pattern}\.superseded(-\d+)?")
_PARTIAL = re.compile(r"\.step-\d{8,}\.partial")
_REMOVED = re.compile(r"\.step-\d{8,}\.removed")


def partial_folder(root: Path, step: int) -> Path:
    """The path of the checkpoint of a step while it is being written."""
    return root / f".step-{step:08d}.partial"


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
