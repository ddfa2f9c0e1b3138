"""Which checkpoints a folder holds, and which of them is the newest.

A checkpoint has the name `step-00000100`; unfinished work has other names (`checkpoint.folder`).
Nothing here needs torch, because configs name checkpoints.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from megafrontier.common.errors import StorageFailed, UserError, as_fatal_error
from megafrontier.common.files import search_folder_hint

T = TypeVar("T")

MANIFEST = "checkpoint.json"
"""The file of a checkpoint that says what the others hold."""
MANIFEST_LIMIT = 2**28
"""Bytes of that file."""
NAME = re.compile(r"step-(\d{8,})")


def checkpoints_of(run_directory: str | Path) -> Path:
    """The folder of a run's checkpoints."""
    return Path(run_directory) / "checkpoints"


def step_folder(root: Path, step: int) -> Path:
    """The path of the checkpoint of a step."""
    return root / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name, None for any other name."""
    match = NAME.fullmatch(path.name)
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
    return [path for path in candidates(root) if _has_mode(path / MANIFEST, stat.S_ISREG)][::-1]


def find(path: Path) -> list[Path]:
    """The checkpoints, oldest first, of a run directory, a checkpoints folder or a checkpoint.
    Raises UserError if there is none, StorageFailed."""
    try:
        if not is_folder(path):
            fits = "need a run, its checkpoints or one checkpoint"
            raise UserError(f"{path}: no such folder{search_folder_hint(path)}, {fits}")
        if step_of(path) is not None or _has_mode(path / MANIFEST, stat.S_ISREG):
            return [path]
        found = list(candidates(checkpoints_of(path))) or list(candidates(path))
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
