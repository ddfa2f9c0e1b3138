"""The folder of a run's checkpoints: names, which are there, which are kept.

A checkpoint appears under its name `step-00000100` by one rename and disappears by one. Hidden
names are work in progress: `.step-00000100.partial` is being written, `.step-00000100.removed`
deleted. `step-00000100.superseded` was given up for another line of training and is nobody's but
the user's: never resumed from, counted or deleted.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from megafrontier.checkpoint.manifest import FILE_NAME
from megafrontier.common.errors import StorageFailed, UserError, as_fatal_error
from megafrontier.common.files import looked_in

Made = TypeVar("Made")

TRIES = 5
"""Newest checkpoints that are begun with in turn while a training prunes each."""
GONE = "gone"

_NAME = re.compile(r"step-(\d{8,})")
_SUPERSEDED = re.compile(rf"{_NAME.pattern}\.superseded(-\d+)?")
_HIDDEN = re.compile(r"\.step-\d{8,}\.(partial|removed)")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step-{step:08d}"


def partial_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies while it is being written."""
    return root / f".step-{step:08d}.partial"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name, None for every other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def candidates(root: Path) -> Iterator[Path]:
    """Folders with a checkpoint's name, newest step first, whole or not. Raises OSError: what the
    storage does not tell is not to be taken for absent, as Python's own `is_dir` does."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = [(step_of(root / name), root / name) for name in os.listdir(root)]
        named = sorted((step, path) for step, path in found if step is not None)
        yield from (path for _, path in reversed(named) if is_folder(path))


def is_folder(path: Path) -> bool:
    """Whether there is a folder at `path`. Raises OSError where the storage does not tell."""
    return _is(stat.S_ISDIR, path)


def _is(kind: Callable[[int], bool], path: Path) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        return kind(path.stat().st_mode)
    return False


def list_checkpoints(root: Path) -> list[Path]:
    """The published checkpoints, oldest step first: those whose manifest is there. Whether every
    byte is right, `verify` says. Raises OSError."""
    return [path for path in candidates(root) if _is(stat.S_ISREG, path / FILE_NAME)][::-1]


def find(path: Path) -> list[Path]:
    """The checkpoints, oldest first, that a run directory, a checkpoints folder or the path of
    one checkpoint stands for. Raises UserError when there is none."""
    try:
        if not is_folder(path):
            fits = "need a run, its checkpoints or one checkpoint"
            raise UserError(f"{path}: no such folder{looked_in(path)}, {fits}")
        if step_of(path) is not None or _is(stat.S_ISREG, path / FILE_NAME):
            return [path]
        found = list(candidates(path / "checkpoints")) or list(candidates(path))
    except OSError as error:
        raise as_fatal_error(error, f"{path}: {error.strerror}, need a folder to read") from error
    if not found:
        raise UserError(f"{path}: no checkpoints, need a folder with step-00000100 or the like")
    return found[::-1]


def newest(path: Path) -> Path:
    """The one that `find` gives last. Raises UserError when there is none."""
    return find(path)[-1]


def of_newest(
    path: Path,
    use: Callable[[Path], Made],
    seen: Callable[[Callable[[], str]], str] = lambda look: look(),
) -> Made:
    """What `use` makes of the newest checkpoint that `path` stands for. Where a training has pruned
    that meanwhile, `use` is called again with the one that is newest now.

    Several ranks call it alike: `use` raises alike on all of them, and `seen` gives all what one of
    them sees. Raises what `use` raises of a checkpoint that is still there, and UserError where
    there is none or TRIES are gone.
    """
    for _ in range(TRIES):
        chosen = Path(seen(lambda: str(newest(path))))
        try:
            return use(chosen)
        except (UserError, StorageFailed, OSError):
            if seen(partial(_state, chosen)) != GONE:
                raise
    raise _pruned(path, f"{TRIES} newest checkpoints")


def of_each(path: Path, look: Callable[[Path], Made]) -> Iterator[Made]:
    """What `look` makes of each checkpoint that `path` stands for, oldest first, but for those that
    a training has pruned meanwhile. Raises what `look` raises of the others, and UserError where
    there is none, at last."""
    is_any = False
    for one in find(path):
        try:
            found = look(one)
        except (UserError, StorageFailed, OSError):
            if one == path or _state(one) != GONE:
                raise
            continue
        if one == path or _state(one) != GONE:
            is_any = True
            yield found
    if not is_any:
        raise _pruned(path, "all of its checkpoints")


def _pruned(path: Path, which: str) -> UserError:
    need = "need the path of one that checkpoint.keep_every keeps"
    return UserError(f"{path}: {which} were pruned while they were read; {need}")


def _state(path: Path) -> str:
    with suppress(OSError):
        return "there" if is_folder(path) else GONE
    return "not told"


def prune(root: Path, keep: int, keep_every: int) -> list[Path]:
    """Take their names from all published checkpoints but the newest `keep` and those of every
    `keep_every`-th step; 0 newest keeps all, 0 steps keeps none for good. One rank calls it.

    Returns the hidden folders that are left of them, for `delete`: a kill in between leaves no half
    of a checkpoint under its name. Raises OSError.
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
    fsync_folder(root)
    return hidden


def delete(paths: Iterable[Path]) -> None:
    """Delete folders with all that is in them, and links, where they are there. Raises OSError."""
    for path in paths:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


def clean_partials(root: Path) -> list[Path]:
    """Delete what killed saves and deletions left behind. One rank calls it, while no other saves
    into `root`. Returns what was deleted; what cannot be is only in the way of a save of its own
    step."""
    if not root.is_dir():
        return []
    left = [path for path in root.iterdir() if _HIDDEN.fullmatch(path.name)]
    for path in left:
        with suppress(OSError):
            delete([path])
    return [path for path in left if not os.path.lexists(path)]


def set_aside(path: Path) -> Path:
    """Rename a checkpoint to the first free `NAME.superseded`. Returns the new path."""
    aside = path.with_name(f"{path.name}.superseded")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"{path.name}.superseded-{count}")
    path.rename(aside)
    return aside


def set_later_aside(root: Path, step: int) -> None:
    """Set aside all checkpoints after `step`. One rank calls it. Raises OSError."""
    for path in list(candidates(root)):
        if (step_of(path) or 0) > step:
            set_aside(path)


def is_set_aside(path: Path) -> bool:
    """Whether it has a name that `set_aside` gives."""
    return _SUPERSEDED.fullmatch(path.name) is not None


def take_back(path: Path, step: int) -> Path:
    """Give a checkpoint that was set aside its name again; what has that now is set aside. One rank
    calls it. Returns the new path. Raises OSError."""
    named = step_folder(path.parent, step)
    if named.exists():
        set_aside(named)
    path.rename(named)
    fsync_folder(path.parent)
    return named


def fsync_folder(path: Path) -> None:
    """Bring a folder's names to the disk: without it a rename may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
