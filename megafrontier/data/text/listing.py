"""The files that a folder or a glob pattern stands for.

Every file is taken once, in the order of names, even if links to folders form a cycle. A folder
that cannot be read, or a link that leads nowhere (to a disk that is not mounted, for example), is
an error, so that no text is left out unnoticed.
"""

import fnmatch
import glob
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from mimetypes import MimeTypes
from pathlib import Path

from megafrontier.common.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
"""Suffixes of plain text in a folder. A file that is named itself may have any suffix."""

LINE_SUFFIXES = (".jsonl", ".ndjson")
PACKED_SUFFIXES = (".gz", ".zst")
UNSUPPORTED_PACKING = (".bz2", ".xz", ".zip", ".tar", ".tgz", ".7z", ".lz4", ".br")

_READ_SUFFIXES = (*TEXT_SUFFIXES, *LINE_SUFFIXES, ".parquet")
# A name with any other suffix may be a link to a folder of texts, such as v1.7 or wiki.en.
_OTHER_SUFFIXES = MimeTypes().types_map[True].keys() - {*_READ_SUFFIXES, ".json"}


def suffix(path: Path) -> str:
    """Return the suffix of the unpacked file, in lower case."""
    is_packed = path.suffix.lower() in PACKED_SUFFIXES
    return Path(path.stem if is_packed else path.name).suffix.lower()


def is_file(path: str | Path) -> bool:
    """Return whether `path` is a regular file.

    Raises UserError for a link to nowhere that may stand for texts.
    """
    return stat.S_ISREG(_mode(path))


def text_files_in(folder: Path) -> Iterator[Path]:
    """Yield the text files in a folder and in all folders below it or linked from it.

    Each folder is visited once. Raises as `is_file`, and OSError for one that cannot be read.
    """
    for parent in sorted(map(Path, _folders(str(folder))), key=lambda path: path.parts):
        for path in (parent / name for name in _shown_names(str(parent))):
            # A .json file is left out: it may as well describe the texts as be one of them.
            packed = path.suffix.lower() in UNSUPPORTED_PACKING
            kind = suffix(Path(path.stem) if packed else path)
            if kind not in _OTHER_SUFFIXES and is_file(path) and kind in _READ_SUFFIXES:
                yield path


def expand_pattern(pattern: str) -> list[str]:
    """Return the paths that match a glob pattern, sorted, each file once.

    If links give a folder several names, the shortest match is taken. `glob` itself would follow
    a cycle of links until the name is too long. Raises as `text_files_in`.
    """
    names = [name for name in pattern.split("/") if name]
    literal = list(takewhile(lambda name: not glob.has_magic(name), names))
    base = "/" * pattern.startswith("/") + "/".join(literal)
    matches = _expand(base, names[len(literal) :]) if os.path.isdir(base or ".") else ()
    once: dict[tuple[str, str], str] = {}
    for match in sorted(matches, key=lambda match: (match.count("/"), match)):
        folder, name = os.path.split(match)
        once.setdefault((os.path.realpath(folder), name), match)
    return sorted(once.values())


def _expand(folder: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the matches in `folder` of a pattern with the components `names`."""
    name, *rest = names
    if name == "**":
        for inner in _folders(folder):
            yield from _expand(inner, rest or ["*"])
        return
    for found in fnmatch.filter(_shown_names(folder, hidden=name.startswith(".")), name):
        path = os.path.join(folder, found)
        if not rest:
            yield path
        elif _is_folder(path):
            yield from _expand(path, rest)


def _folders(base: str) -> Iterator[str]:
    """Yield a folder and all folders below it or linked from it, each once, the nearest first."""
    visited: set[str] = set()
    queue = deque([base])
    while queue:
        folder = queue.popleft()
        real = os.path.realpath(folder or ".")
        if real not in visited:
            visited.add(real)
            yield folder
            with os.scandir(folder or ".") as entries:
                # Only links cost a stat: a folder may have a million files.
                found = [e for e in entries if e.is_symlink() or e.is_dir()]
            names = sorted(entry.name for entry in found if not entry.name.startswith("."))
            queue += filter(_is_folder, (os.path.join(folder, name) for name in names))


def _shown_names(folder: str, hidden: bool = False) -> list[str]:
    names = sorted(os.listdir(folder or "."))
    return [name for name in names if hidden or not name.startswith(".")]


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(_mode(path))


def _mode(path: str | Path) -> int:
    """The file mode; 0 for a link to nowhere whose name is not that of a text."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError as error:
        if suffix(Path(path)) in _OTHER_SUFFIXES:
            return 0
        raise UserError(f"{path}: leads nowhere, need a folder or file to read") from error
