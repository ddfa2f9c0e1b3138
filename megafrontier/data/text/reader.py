"""Pieces become texts: UTF-8, JSON lines and rows, with what is wrong named by file and place."""

import codecs
import json
from collections.abc import Iterator
from typing import Any

from megafrontier.data.text.sources import TextRange


class BadText(Exception):
    """A line, row or text that is no text; the message names its file and place."""


def read_texts(piece: TextRange, key: str) -> Iterator[str | BadText]:
    """The texts of a piece in order: one of kind text, one a line or row of the others. What
    cannot be read comes as a BadText in its place; blank lines do not count."""
    if isinstance(piece.payload, list):
        for number, row in enumerate(piece.payload, piece.position):
            yield _checked(row, f"{piece.name}: row {number}: column {key!r}")
    elif piece.kind == "text":
        text = _decode(piece.payload, f"{piece.name}: byte", piece.position)
        if isinstance(text, str) and piece.position == 0:
            text = text.removeprefix("\ufeff")
        yield text
    else:
        lines = piece.payload
        if piece.position == 1:
            lines = lines.removeprefix(codecs.BOM_UTF8)
        for number, line in enumerate(lines.split(b"\n"), piece.position):
            if line.strip():
                yield _parse_line(line, key, f"{piece.name}:{number}")


def _decode(data: bytes, place: str, position: int) -> str | BadText:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = position + error.start
        return BadText(f"{place} {at}: invalid UTF-8 (0x{data[error.start]:02x}: {error.reason})")


def _parse_line(line: bytes, key: str, place: str) -> str | BadText:
    text = _decode(line, f"{place}: byte", 0)
    if isinstance(text, BadText):
        return text
    try:
        record = json.loads(text, parse_int=_shortened)
    except (ValueError, RecursionError) as error:
        return BadText(f"{place}: not valid JSON: {error}")
    if not isinstance(record, dict) or key not in record:
        known = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        return BadText(f"{place}: no {key!r} in it, only: {known[:200]}; see --json-key")
    return _checked(record[key], f"{place}: {key!r}")


def _shortened(digits: str) -> int:
    """A number of another field, which nobody asks for; Python refuses one of 4,301 digits."""
    return int(digits[:99])


def _checked(value: Any, place: str) -> str | BadText:
    if isinstance(value, bytes) and isinstance(bad := _decode(value, f"{place}: byte", 0), BadText):
        return bad
    if not isinstance(value, str):
        return BadText(f"{place} is {type(value).__name__}, need a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return BadText(f"{place} holds half a surrogate pair at character {error.start}")
    return value
