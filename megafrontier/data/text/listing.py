"""Which paths a folder or a pattern stands for: each once, by name, and none left out unseen.

Whoever gives a folder of links to corpora wants all of them: one that leads nowhere, since a disk
is not mounted, say, is an error, as is a folder that may not be read.
"""

import errno
import glob
import os
import re
import stat
from collections import deque
from collections.abc import Iterator
from mimetypes import MimeTypes
from pathlib import Path
from typing import NoReturn

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
"""Plain text taken from a folder; a file that is named itself may have any suffix."""

LINE_SUFFIXES = (".jsonl", ".ndjson")
PACKED_SUFFIXES = (".gz", ".zst")
NO_PACKING = (".bz2", ".xz", ".zip", ".tar", ".tgz", ".7z", ".lz4", ".br")
"""What is not unpacked here, and so no text of it may be left out."""

_TAKEN = (*TEXT_SUFFIXES, *LINE_SUFFIXES, ".parquet")
"""Of a folder."""

_OTHERS = MimeTypes().types_map[True].keys() - {*_TAKEN, ".json"}
"""Of files of other kinds. Any other name may be that of a link to a folder of texts: one without
a suffix, or with what looks like one, as v1.7 and wiki.en."""


def suffix(path: Path) -> str:
    """The file's own when it is unpacked, in small letters."""
    is_packed = path.suffix.lower() in PACKED_SUFFIXES
    return Path(path.stem if is_packed else path.name).suffix.lower()


def is_file(path: str | Path) -> bool:
    """Whether it is a file. Raises OSError for what may not be looked at, and where a link that
    leads nowhere may be to texts."""
    return stat.S_ISREG(_mode(path))


def texts_in(folder: Path) -> Iterator[Path]:
    """Its texts, however packed, and those of the folders in it or linked from it, each folder
    once: links may go in circles. Raises OSError as `is_file`, and for a folder that cannot be
    listed."""
    seen = set()
    for parent, folders, files in os.walk(folder, onerror=_fail, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(filter(_is_shown, folders))
        for path in (Path(parent, file) for file in sorted(files) if _is_shown(file)):
            # A .json in a folder is as often about the texts as one of them.
            kind = suffix(Path(path.stem) if path.suffix.lower() in NO_PACKING else path)
            if kind not in _OTHERS and is_file(path) and kind in _TAKEN:
                yield path


def matches(pattern: str) -> list[str]:
    """The matches of a glob, by name, each folder's once: links to folders may go in circles.
    Raises OSError as `texts_in`."""
    once: dict[tuple[str, str], str] = {}
    for match in sorted(_expanded(pattern), key=lambda match: (match.count("/"), match)):
        folder, name = os.path.split(match)
        once.setdefault((os.path.realpath(folder), name), match)
    return sorted(once.values())


def _expanded(pattern: str) -> Iterator[str]:
    """As the `glob` module does it, which follows a link in a circle until its name is too long."""
    stars = re.search(r"(^|/)\*\*(/|$)", pattern)  # as one name; in another they are a star
    if stars is None:
        yield from _globbed(pattern)
        return
    head, rest = pattern[: stars.end(1)], pattern[stars.end() :] or "*"
    seen: set[str] = set()
    for base in sorted(_globbed(head)) if head else [""]:
        for folder in _folders(base, seen):
            yield from _expanded(os.path.join(glob.escape(folder), rest))


def _globbed(pattern: str) -> list[str]:
    """As `glob.glob`, which passes over a folder that cannot be listed."""
    head = os.path.dirname(pattern)
    for folder in filter(_is_folder, _globbed(head)) if glob.has_magic(head) else ():
        os.listdir(folder)
    return glob.glob(pattern)


def _folders(base: str, seen: set[str]) -> Iterator[str]:
    """A folder and those in it or linked from it, the nearest first, each once."""
    rest = deque([base])
    while rest:
        folder = rest.popleft()
        real = os.path.realpath(folder or ".")
        if real in seen or not _is_folder(real):
            continue
        seen.add(real)
        yield folder
        inside = (os.path.join(folder, name) for name in sorted(os.listdir(folder or ".")))
        rest += (path for path in inside if _is_shown(path) and _is_folder(path))


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(_mode(path))


def _mode(path: str | Path) -> int:
    """Of what is there; 0 for a link that leads to itself, or nowhere by the name of no text."""
    try:
        return os.stat(path).st_mode
    except OSError as error:
        is_nothing = error.errno == errno.ENOENT and suffix(Path(path)) in _OTHERS
        if is_nothing or error.errno == errno.ELOOP:
            return 0
        why = "leads nowhere" if error.errno == errno.ENOENT else error.strerror
        raise OSError(error.errno, why, str(path)) from error


def _is_shown(path: str) -> bool:
    return not os.path.basename(path).startswith(".")


def _fail(error: OSError) -> NoReturn:
    raise error
