"""What text there is and where: inputs become sources, sources become pieces to tokenise.

Only bytes are moved here; decoding and parsing them is the workers' part (`texts.py`).
"""

import codecs
import glob
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal

from megafrontier.common.errors import UserError
from megafrontier.data.hub import hub_lookup
from megafrontier.data.text.files import BLOCK_BYTES, Stream, cut_characters
from megafrontier.data.text.listing import (
    LINE_SUFFIXES,
    NO_PACKING,
    TEXT_SUFFIXES,
    is_file,
    matches,
    suffix,
    texts_in,
)
from megafrontier.data.text.tables import Rows, dataset_rows, parquet_rows

_KINDS: dict[str, Literal["text", "lines", "parquet"]] = {
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
    **dict.fromkeys(LINE_SUFFIXES, "lines"),
    ".json": "lines",
    ".parquet": "parquet",
}
_NO_TEXT = (".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xls", ".xlsx", ".pdf")
_DATASET_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """One file, or one table that the `datasets` library reads."""

    name: str
    kind: Literal["text", "lines", "parquet", "dataset"]
    file_bytes: int
    """Bytes on disk, for the progress bar."""
    table: Any = None
    """The `datasets.Dataset`, for kind dataset."""


@dataclass(frozen=True)
class TextRange:
    """Some text of one source, in the order of the source."""

    name: str
    kind: Literal["text", "lines", "rows"]
    position: int
    """Byte (text), line counted from 1 (lines) or row counted from 0 (rows) of its beginning."""
    payload: bytes | Rows
    last: bool = True
    """Whether the document ends with this piece; only a long text comes in several."""

    @property
    def is_rest(self) -> bool:
        """Whether the document has begun with an earlier piece."""
        return self.kind == "text" and self.position > 0


def find_sources(inputs: Sequence[str], split: str | None = None) -> list[Source]:
    """Every file and table that the inputs name, each input's in the order of their names.

    An input is a file, a folder, a glob, a folder written by `datasets`' save_to_disk or holding a
    script-free dataset, or a dataset's name, NAME or NAME:CONFIG, of which `split` is taken, train
    unless it is given. Raises UserError when an input is nothing of the sort or holds no text, and
    for a split of nothing.
    """
    found = [source for name in inputs for source in _find(name, split)]
    if split is not None and all(source.kind != "dataset" for source in found):
        raise UserError(f"--split: {split}, need a dataset that has it among the inputs")
    return found


def share(sources: Sequence[Source], part: int, parts: int) -> Sequence[Source]:
    """The `part`-th (from 1) of so many shares of the sources: consecutive ones, about the same
    bytes in each share, at least one source.

    Raises UserError when there are fewer sources than parts.
    """
    if not 1 <= part <= parts:
        last = max(parts, 1)
        raise UserError(f"--part {part}/{parts}: need 1/{last} to {last}/{last}")
    if len(sources) < parts:
        raise UserError(
            f"--part {part}/{parts}: the inputs hold {len(sources)} files, none of which is cut; "
            f"need at most {len(sources)} parts"
        )
    stop, left = 0, sum(source.file_bytes for source in sources)
    for number in range(1, part + 1):
        start, taken = stop, 0
        most = len(sources) - (parts - number)  # the later shares want one each
        while stop < most and (
            stop == start or taken + sources[stop].file_bytes / 2 <= left / (parts - number + 1)
        ):
            taken += sources[stop].file_bytes
            stop += 1
        left -= taken
    return sources[start : len(sources) if part == parts else stop]


def _find(name: str, split: str | None) -> list[Source]:
    path = Path(name)
    if not name:  # Path("") is the current folder
        raise UserError("input '': empty, need a file, a folder or a pattern")
    if path.is_dir():
        with _listing(name):
            return _find_folder(path, split)
    if path.exists():
        return [_find_file(path)]
    if glob.has_magic(name):
        with _listing(name):
            found = [source for match in matches(name) for source in _find_match(match)]
        if not found:
            raise UserError(f"input {name!r}: no file matches; need .txt, .jsonl, .parquet, …")
        return found
    if not _DATASET_NAME.fullmatch(name) or suffix(path) in _KINDS:
        raise UserError(f"input {name!r}: no such file or folder")
    dataset, _, config = name.partition(":")
    if dataset in _formats():
        raise UserError(
            f"input {name!r}: no such file or folder, and a format's name, no dataset's"
        )
    return [_dataset_source(name, "load_dataset", split, dataset, config or None)]


@contextmanager
def _listing(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        found = f"input {name!r}: {error.filename}: {error.strerror}"
        raise UserError(f"{found}, need a folder or file to read") from error


def _formats() -> set[str]:
    """Names by which `load_dataset` would read whatever the current folder has of a format."""
    import datasets.packaged_modules as formats

    return {module.name for module in iter_modules(formats.__path__)}


def _find_match(match: str) -> list[Source]:
    """A match of a glob: folders are left to patterns that say so, with `**`."""
    return [_find_file(Path(match), is_named=False)] if is_file(match) else []


def _find_file(path: Path, is_named: bool = True) -> Source:
    if not path.is_file():
        raise UserError(f"input {str(path)!r}: a pipe or device, need a file: it is read twice")
    _refuse_packing(path)
    if suffix(path) in _NO_TEXT:
        need = "need one text a line in .jsonl, one a row in .parquet, or plain text"
        raise UserError(f"input {str(path)!r}: {suffix(path)}, {need}")
    if suffix(path) == ".json" and not _is_json_lines(path):
        raise UserError(f"input {str(path)!r}: no JSON lines, need one object a line")
    # Of a pattern's thousands of files those that say what they are are not all opened for it.
    is_asked = suffix(path) not in _KINDS or (is_named and _KINDS[suffix(path)] == "text")
    if is_asked and _is_json_lines(path):
        raise UserError(
            f"input {str(path)!r}: JSON lines by the look of it, which would be taken for one "
            "text; need the suffix .jsonl"
        )
    return _file_source(path)


def _refuse_packing(path: Path) -> None:
    if path.suffix.lower() in NO_PACKING:
        raise UserError(f"input {str(path)!r}: need it unpacked, or packed as .gz or .zst")


def _find_folder(folder: Path, split: str | None) -> list[Source]:
    name = str(folder)
    if _holds_saved_dataset(folder):
        return [_dataset_source(name, "load_from_disk", split, name)]
    if _describes_dataset(folder / "README.md"):
        return [_dataset_source(name, "load_dataset", split, name)]
    found = list(texts_in(folder))
    if not found:
        known = ", ".join(TEXT_SUFFIXES)
        raise UserError(f"input {name!r}: no {known}, .jsonl or .parquet")
    for path in found:
        _refuse_packing(path)
    return [_file_source(path) for path in found]


def _holds_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` wrote it with save_to_disk: one table, or one for each split."""
    table = ("state.json", "dataset_info.json")
    return (folder / "dataset_dict.json").is_file() or all((folder / n).is_file() for n in table)


def _describes_dataset(readme: Path) -> bool:
    """Whether a folder's README is a dataset card that says how to read the folder."""
    if not readme.is_file():
        return False
    head = readme.read_bytes()[:65536].split(b"\n---", 1)[0]
    return head.startswith(b"---") and bool(re.search(rb"^(configs|dataset_info):", head, re.M))


def _is_json_lines(path: Path) -> bool:
    """Whether the first line alone is an object."""
    parts: list[bytes] = []
    for chunk in Stream(path).chunks():
        # A byte order mark may come first, and in an object that is never ended a gigabyte.
        part = chunk if parts else chunk.removeprefix(codecs.BOM_UTF8).lstrip()
        if not parts and part and not part.startswith(b"{"):
            return False
        if part:
            parts.append(part)
        if parts and b"\n" in part:
            break
    try:
        first = b"".join(parts).split(b"\n", 1)[0]
        return isinstance(json.loads(first, parse_int=str), dict)  # of any number of digits
    except (ValueError, RecursionError):
        return False


def _file_source(path: Path) -> Source:
    return Source(str(path), _KINDS.get(suffix(path), "text"), path.stat().st_size)


def _dataset_source(name: str, loader: str, split: str | None, *arguments: str | None) -> Source:
    import datasets

    try:
        with hub_lookup(name):
            table = getattr(datasets, loader)(*arguments)
    except Exception as error:  # whatever a library that reads a dozen formats may raise
        raise UserError(
            f"input {name!r}: no file or folder of that name here, and no dataset either: {error}"
        ) from error
    if isinstance(table, dict):
        split = split or "train"
        if split not in table:
            raise UserError(f"input {name!r}: no split {split!r}; it has {', '.join(table)}")
        table = table[split]
    elif split not in (None, str(table.split)):
        raise UserError(f"input {name!r}: no split {split!r}; it is one table, need no --split")
    return Source(name, "dataset", int(table.data.nbytes), table)


class Reader:
    """Reads sources as batches of pieces, about BLOCK_BYTES each; `done_bytes` tells how far, in
    bytes on disk."""

    def __init__(self, sources: Sequence[Source], key: str) -> None:
        self.sources = sources
        self.key = key
        self.done_bytes = 0

    def batches(self) -> Iterator[list[TextRange]]:
        """All pieces in order, small ones together. Raises UserError as reading a source does."""
        batch: list[TextRange] = []
        size = 0
        for piece, piece_bytes in self._pieces():
            batch.append(piece)
            size += piece_bytes
            if size >= BLOCK_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _pieces(self) -> Iterator[tuple[TextRange, int]]:
        for source in self.sources:
            before = self.done_bytes
            for piece in self._read(source, before):
                yield piece, _payload_bytes(piece.payload)
            self.done_bytes = before + source.file_bytes

    def _read(self, source: Source, before: int) -> Iterator[TextRange]:
        if source.kind == "parquet":
            yield from self._read_rows(source, before, parquet_rows(source.name, self.key))
            return
        if source.kind == "dataset":
            rows = dataset_rows(source.name, source.table, self.key)
            yield from self._read_rows(source, before, rows)
            return
        stream = Stream(Path(source.name))
        read = _read_text if source.kind == "text" else _read_lines
        for piece in read(source.name, stream):
            self.done_bytes = before + stream.position
            yield piece

    def _read_rows(
        self, source: Source, before: int, tables: Iterator[Rows]
    ) -> Iterator[TextRange]:
        at = 0
        for rows in chain.from_iterable(map(_cut_rows, tables)):
            yield TextRange(source.name, "rows", at, rows)
            at += len(rows)
            self.done_bytes = min(
                before + source.file_bytes, self.done_bytes + _payload_bytes(rows)
            )


def _cut_rows(rows: Rows) -> Iterator[Rows]:
    """Runs of rows of about BLOCK_BYTES each; a longer one is alone."""
    held: Rows = []
    size = 0
    for row in rows:
        held.append(row)
        size += _payload_bytes([row])
        if size >= BLOCK_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


def _payload_bytes(payload: bytes | Rows) -> int:
    if isinstance(payload, bytes):
        return len(payload)
    return sum(len(row) for row in payload if isinstance(row, str | bytes))


def _read_lines(name: str, stream: Stream) -> Iterator[TextRange]:
    line = 1
    for block in stream.blocks():
        yield TextRange(name, "lines", line, block)
        line += block.count(b"\n")


def _read_text(name: str, stream: Stream) -> Iterator[TextRange]:
    """One document, in pieces if it is long. A piece is held back until it is known whether it is
    the last one."""
    held, at = b"", 0
    for chunk in stream.chunks():
        while len(held) > BLOCK_BYTES:
            cut = cut_characters(held[:BLOCK_BYTES])
            yield TextRange(name, "text", at, held[:cut], last=False)
            held, at = held[cut:], at + cut
        held += chunk
    if held:
        yield TextRange(name, "text", at, held)
