"""Reads sources in two steps: the main process reads ranges of bytes or rows, workers decode them.

Decoding and parsing take most of the time, so they are left to the workers.
"""

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from megafrontier.common.errors import UserError
from megafrontier.data.text import files
from megafrontier.data.text.sources import Kind, Source
from megafrontier.data.text.tables import Rows, read_rows, size_of


@dataclass(frozen=True)
class TextRange:
    """Consecutive bytes, lines or rows of one source."""

    name: str
    kind: Kind
    start: int
    """The first byte (text), line counted from 1 (lines), or row counted from 0 (rows)."""
    payload: bytes | Rows | None
    """None for a line that is too long."""
    is_last: bool = True
    """Whether the document ends with this range. Only a long text has several."""

    @property
    def is_continuation(self) -> bool:
        """Whether the document starts in an earlier range."""
        return self.kind == "text" and self.start > 0


@dataclass(frozen=True)
class BadText:
    """Takes the place of a text that cannot be read."""

    message: str
    """What is wrong, with the file and the place."""


class Reader:
    """Reads sources in batches of ranges, about BLOCK_BYTES each."""

    def __init__(self, sources: Sequence[Source], key: str, also: Sequence[str] = ()) -> None:
        """`key` is the field of JSON lines, or the column of tables, that holds the text. `also`
        are columns that are read if a table has them; the rows are then mappings."""
        self.sources = sources
        self.key = key
        self.also = also
        self.done_bytes = 0
        """Bytes on disk that have been read."""

    def batches(self) -> Iterator[list[TextRange]]:
        """Yield all ranges in order, small ones together. Raises UserError as reading does."""
        batch: list[TextRange] = []
        size = 0
        for text_range in chain.from_iterable(map(self._read, self.sources)):
            batch.append(text_range)
            payload = text_range.payload or b""
            size += len(payload) if isinstance(payload, bytes) else size_of(payload)
            if size >= files.BLOCK_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def texts(self) -> Iterator[str | BadText]:
        """Yield all texts in order, decoded in this process."""
        for text_range in chain.from_iterable(self.batches()):
            yield from read_texts(text_range, self.key)

    def _read(self, source: Source) -> Iterator[TextRange]:
        before, end = self.done_bytes, self.done_bytes + source.file_bytes
        if source.kind == "rows":
            for start, rows in read_rows(source.name, source.table, self.key, self.also):
                yield TextRange(source.name, "rows", start, rows)
                self.done_bytes = min(end, self.done_bytes + size_of(rows))
        else:
            split = files.split_lines if source.kind == "lines" else files.split_text
            with open(source.name, "rb") as file:
                for start, part, is_last in split(file):
                    self.done_bytes = before + file.tell()
                    yield TextRange(source.name, source.kind, start, part, is_last)
        self.done_bytes = end


Value = TypeVar("Value")


def read_texts(text_range: TextRange, key: str) -> Iterator[str | BadText]:
    """Yield the texts of a range in order; BadText for each that cannot be read.

    A range of kind text is one text, or part of one. Other ranges have one in each line or row.
    Blank lines are skipped.
    """
    name, start, payload = text_range.name, text_range.start, text_range.payload
    if text_range.kind == "text" and isinstance(payload, bytes):
        text = _decode(payload, f"{name}: byte", start)
        yield text.removeprefix("\ufeff") if isinstance(text, str) and start == 0 else text
    else:
        yield from read_values(text_range, key, check_text)


def read_values(
    text_range: TextRange,
    key: str,
    check: Callable[[Any, str], Value | BadText],
    is_record: bool = False,
) -> Iterator[Value | BadText]:
    """Yield `check(value, place)` of the value in each line or row of a range; BadText for each
    that cannot be read. With `is_record` the value is the whole line or row, a mapping that has
    `key`. Blank lines are skipped."""
    name, start, payload = text_range.name, text_range.start, text_range.payload
    if isinstance(payload, list):
        for number, row in enumerate(payload, start):
            yield check(row, f"{name}: row {number}: column {key!r}")
    elif payload is None:
        yield _too_long(f"{name}:{start}")
    else:
        lines = payload.removeprefix(codecs.BOM_UTF8) if start == 1 else payload
        for number, line in enumerate(lines.split(b"\n"), start):
            if line.strip():
                place = f"{name}:{number}"
                record = _parse_line(line, key, place)
                if isinstance(record, BadText):
                    yield record
                else:
                    yield check(record if is_record else record[key], f"{place}: {key!r}")


def _decode(data: bytes, place: str, start: int) -> str | BadText:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = start + error.start
        return BadText(f"{place} {at}: invalid UTF-8 (0x{data[error.start]:02x}: {error.reason})")


def _parse_line(line: bytes, key: str, place: str) -> dict[str, Any] | BadText:
    """A line of JSON that has the field `key`, or BadText."""
    if len(line) > files.LINE_BYTES:
        return _too_long(place)
    text = _decode(line, f"{place}: byte", 0)
    record = parse_json(text, place) if isinstance(text, str) else text
    if isinstance(record, BadText):
        return record
    if not isinstance(record, dict) or key not in record:
        known = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        return BadText(f"{place}: no {key!r} in it, only: {known[:200]}; see --json-key")
    return record


def _too_long(place: str) -> BadText:
    return BadText(f"{place}: a line of more than {files.LINE_BYTES} bytes, need shorter ones")


def parse_json(text: str, place: str) -> Any:
    """Return the value of a JSON text, or BadText."""
    try:
        return json.loads(text)
    except ValueError as error:
        return BadText(f"{place}: not valid JSON: {error}")
    except RecursionError:
        return BadText(f"{place}: JSON too deeply nested, need fewer levels")


def check_text(value: Any, place: str) -> str | BadText:
    """A value as text, or BadText if it is none."""
    if isinstance(value, bytes):  # of a table
        return _decode(value, f"{place}: byte", 0)
    if not isinstance(value, str):
        return BadText(f"{place} is {type(value).__name__}, need a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return BadText(f"{place} holds half a surrogate pair at character {error.start}")
    return value


def refuse_bad(bad: BadText) -> UserError:
    """Return the error that ends a command at a bad text."""
    return UserError(f"{bad.message}; --skip-bad leaves such texts out")
