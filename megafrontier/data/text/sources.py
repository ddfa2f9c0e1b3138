"""The files and tables that the inputs of a command name."""

import codecs
import glob
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from megafrontier.common.errors import UserError
from megafrontier.data.text.files import Stream
from megafrontier.data.text.listing import (
    LINE_SUFFIXES,
    TEXT_SUFFIXES,
    UNSUPPORTED_PACKING,
    expand_pattern,
    is_file,
    suffix,
    text_files_in,
)
from megafrontier.data.text.tables import has_dataset_card, is_dataset_folder, load_dataset

Kind = Literal["text", "lines", "rows"]
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
    **dict.fromkeys(LINE_SUFFIXES, "lines"),
    ".json": "lines",
    ".parquet": "rows",
}
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
        return [_check_file(path)]
    if glob.has_magic(name):
        paths = [Path(match) for match in expand_pattern(name) if is_file(match)]
        if not paths:
            raise UserError(f"input {name!r}: no file matches; need .txt, .jsonl, .parquet, …")
        return [_check_file(path, is_named=False) for path in paths]
    if not _DATASET_NAME.fullmatch(name) or suffix(path) in _KINDS:
        raise UserError(f"input {name!r}: no such file or folder")
    return [_dataset_source(name, split)]


def _find_in_folder(folder: Path, split: str | None) -> list[Source]:
    if is_dataset_folder(folder) or has_dataset_card(folder):
        return [_dataset_source(str(folder), split)]
    found = list(text_files_in(folder))
    if not found:
        known = ", ".join(TEXT_SUFFIXES)
        raise UserError(f"input {str(folder)!r}: no {known}, .jsonl or .parquet")
    return [_file_source(path) for path in found]


def _dataset_source(name: str, split: str | None) -> Source:
    table = load_dataset(name, split)
    return Source(name, "rows", int(table.data.nbytes), table)


def _file_source(path: Path) -> Source:
    if path.suffix.lower() in UNSUPPORTED_PACKING:
        raise UserError(f"input {str(path)!r}: need it unpacked, or packed as .gz or .zst")
    return Source(str(path), _KINDS.get(suffix(path), "text"), path.stat().st_size)


def _check_file(path: Path, is_named: bool = True) -> Source:
    if not path.is_file():
        raise UserError(f"input {str(path)!r}: a pipe or device, need a file: it is read twice")
    source = _file_source(path)
    if suffix(path) in _UNREAD_TABLES:
        need = "need one text a line in .jsonl, one a row in .parquet, or plain text"
        raise UserError(f"input {str(path)!r}: {suffix(path)}, {need}")
    if suffix(path) == ".json" and not _is_json_lines(path):
        raise UserError(f"input {str(path)!r}: no JSON lines, need one object a line")
    # A pattern may match thousands of files: open only those whose suffix says nothing.
    is_opened = suffix(path) not in _KINDS or (is_named and _KINDS[suffix(path)] == "text")
    if is_opened and _is_json_lines(path):
        raise UserError(
            f"input {str(path)!r}: looks like JSON lines, but would be read as one text; need the "
            "suffix .jsonl"
        )
    return source


def _is_json_lines(path: Path) -> bool:
    """Return whether the first line that is not blank is a JSON object. Long ones are guessed."""
    head, *more = [*islice(Stream(path).chunks(), 2)] or [b""]
    line, end, _ = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if more and not end:
        return line.startswith(b'{"')
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
