"""The files and tables that the inputs of a command name."""

import codecs
import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megafrontier.common.errors import UserError
from megafrontier.data.text.files import chunks
from megafrontier.data.text.tables import has_dataset_card, is_dataset_folder, load_dataset

Kind = Literal["text", "lines", "rows"]
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
"""Suffixes of plain text in a folder. A file that is named itself may have any suffix."""
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "lines"),
    ".parquet": "rows",
}
_FOLDER_SUFFIXES = _KINDS.keys() - {".json"}  # which may as well describe the texts
_PACKED_SUFFIXES = (".gz", ".zst")
_UNREAD_PACKING = (".bz2", ".xz", ".zip", ".tar", ".tgz", ".7z", ".lz4", ".br")
_UNREAD_TABLES = (".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xls", ".xlsx", ".pdf")
_DATASET_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """One file, or one dataset."""

    name: str
    kind: Kind
    """How it is read: as one text, as JSON lines, or as rows of a table."""
    file_bytes: int
    """Size on disk, for the progress bar."""
    table: Any = None
    """The `datasets.Dataset`; None for a file."""


def find_sources(inputs: Sequence[str], split: str | None = None) -> list[Source]:
    """Return every file and dataset that the inputs name, those of one input sorted by name.

    An input is a file, a folder, a glob pattern, a folder with a dataset (written by `save_to_disk`
    or with a dataset card), or a dataset's NAME or NAME:CONFIG. `split` is the split of a dataset
    (default: train). Raises UserError for an input that is none of these or holds no text, and for
    a `split` without a dataset; OSError for a folder or file that cannot be read.
    """
    found = [source for name in inputs for source in _find(name, split)]
    if split is not None and all(source.table is None for source in found):
        raise UserError(f"--split: {split}, need a dataset that has it among the inputs")
    return found


def select_part(sources: Sequence[Source], part: int, parts: int) -> Sequence[Source]:
    """Return part `part` (from 1) of `parts` of the sources: a range of about equal bytes.

    A file that is larger than a part may leave others empty. Raises UserError if there are fewer
    sources than parts.
    """
    last = max(parts, 1)
    if not 1 <= part <= parts:
        raise UserError(f"--part {part}/{parts}: need 1/{last} to {last}/{last}")
    if len(sources) < parts:
        raise UserError(
            f"--part {part}/{parts}: the inputs hold {len(sources)} files, none of which is cut; "
            f"need at most {len(sources)} parts"
        )
    sizes = [source.file_bytes + 1 for source in sources]
    chosen, before = [], 0
    for source, size in zip(sources, sizes, strict=True):
        if (2 * before + size) * parts // (2 * sum(sizes)) == part - 1:  # where its middle lies
            chosen.append(source)
        before += size
    return chosen


def _find(name: str, split: str | None) -> list[Source]:
    path = Path(name)
    if not name:  # Path("") is the current folder
        raise UserError("input '': empty, need a file, a folder or a pattern")
    if path.is_dir():
        return _find_in_folder(path, split)
    if path.exists():
        return [_named_source(path)]
    if glob.has_magic(name):
        paths = [Path(match) for match in _expand(name) if not os.path.isdir(match)]
        if not paths:
            raise UserError(f"input {name!r}: no file matches; need .txt, .jsonl, .parquet, …")
        return [_named_source(path) for path in paths]
    if not _DATASET_NAME.fullmatch(name) or _suffix(path) in _KINDS:
        raise UserError(f"input {name!r}: no such file or folder")
    return [_dataset_source(name, split)]


def _expand(pattern: str) -> list[str]:
    """The paths that match, sorted. Links may give a folder several names: the shortest counts."""
    once: dict[tuple[str, str], str] = {}
    for match in sorted(glob.glob(pattern, recursive=True), key=lambda m: (m.count("/"), m)):
        folder, name = os.path.split(match)
        once.setdefault((os.path.realpath(folder), name), match)
    return sorted(once.values())


def _find_in_folder(folder: Path, split: str | None) -> list[Source]:
    if is_dataset_folder(folder) or has_dataset_card(folder):
        return [_dataset_source(str(folder), split)]
    found = _text_files_in(folder)
    if not found:
        known = ", ".join(TEXT_SUFFIXES)
        raise UserError(f"input {str(folder)!r}: no {known}, .jsonl or .parquet")
    return [_file_source(path) for path in found]


def _text_files_in(folder: Path) -> list[Path]:
    """The text files in a folder and in all folders below it or linked from it, by name.

    Each folder is visited once, even if links form a cycle. Raises OSError for a folder that cannot
    be read, and UserError for a link that leads nowhere, perhaps to a disk that is not mounted:
    text must not be left out unnoticed.
    """
    visited = {os.path.realpath(folder)}

    def is_new(path: str) -> bool:
        before = len(visited)
        visited.add(os.path.realpath(path))
        return len(visited) > before

    def fail(error: OSError) -> None:
        raise error

    found = []
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        shown = sorted(name for name in folders if not name.startswith("."))
        folders[:] = [name for name in shown if is_new(os.path.join(parent, name))]
        for path in (Path(parent, name) for name in sorted(names) if not name.startswith(".")):
            if not path.exists():
                raise UserError(f"{path}: leads nowhere, need a folder or file to read")
            is_unread = path.suffix.lower() in _UNREAD_PACKING
            if _suffix(Path(path.stem) if is_unread else path) in _FOLDER_SUFFIXES:
                found.append(path)
    return found


def _suffix(path: Path) -> str:
    """The suffix of the unpacked file, in lower case."""
    is_packed = path.suffix.lower() in _PACKED_SUFFIXES
    return Path(path.stem if is_packed else path.name).suffix.lower()


def _dataset_source(name: str, split: str | None) -> Source:
    table = load_dataset(name, split)
    return Source(name, "rows", int(table.data.nbytes), table)


def _file_source(path: Path) -> Source:
    if path.suffix.lower() in _UNREAD_PACKING:
        raise UserError(f"input {str(path)!r}: need it unpacked, or packed as .gz or .zst")
    return Source(str(path), _KINDS.get(_suffix(path), "text"), path.stat().st_size)


def _named_source(path: Path) -> Source:
    """A file that is named itself, or by a pattern, whatever its suffix."""
    if not path.is_file():
        raise UserError(f"input {str(path)!r}: no regular file, need one: it is read twice")
    source = _file_source(path)
    if _suffix(path) in _UNREAD_TABLES:
        need = "need one text a line in .jsonl, one a row in .parquet, or plain text"
        raise UserError(f"input {str(path)!r}: {_suffix(path)}, {need}")
    if source.kind == "text":
        with path.open("rb") as file:
            head = next(chunks(file), b"").removeprefix(codecs.BOM_UTF8)
        if head.lstrip().startswith(b'{"'):
            what = "looks like JSON lines, but would be read as one text; need the suffix .jsonl"
            raise UserError(f"input {str(path)!r}: {what}")
    return source
