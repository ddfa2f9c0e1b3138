"""Text files and files of JSON lines: unpacked and split as they are read, in constant memory."""

import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from megafrontier.common.errors import UserError

BLOCK_BYTES = 1 << 20
"""Text that is read and tokenised at a time. A longer line or row is not split."""

LINE_BYTES = 1 << 28
"""Longest line of a file of JSON lines: such a line is held in memory whole."""

_READ_BYTES = 1 << 18
# Packed bytes that are unpacked at a time. Zstandard packs 128 KiB of one byte into 4 bytes, so
# that these are 32 MiB at most.
_PACKED_BYTES = 1 << 10
_SPLIT_WINDOW = 1 << 14  # bytes at the end of a block in which a place to split is searched
_BETWEEN_WORDS = re.compile(rb"[0-9A-Za-z\x80-\xff] (?=[A-Za-z\x80-\xff])")


def chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of an open file in chunks, unpacked if its name ends in .gz or .zst.

    Raises UserError, with the file and the byte, if it is corrupt or truncated.
    """
    packing = Path(file.name).suffix.lower()
    if packing == ".gz":
        yield from _members(file, partial(zlib.decompressobj, wbits=31), zlib.error)
    elif packing == ".zst":
        import zstandard

        # The default limit is a window of 128 MiB; `zstd --long=31` needs 2 GiB.
        make = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        yield from _members(file, make, zstandard.ZstdError)
    else:
        yield from _read(file, _READ_BYTES)


def _read(file: BinaryIO, size: int) -> Iterator[bytes]:
    while chunk := file.read(size):
        yield chunk


def _members(file: BinaryIO, make: Callable[[], Any], corrupt: type[Exception]) -> Iterator[bytes]:
    """Unpack consecutive members (gzip) or frames (zstd).

    We do not use the readers of the libraries: they accept a file that is truncated between two
    blocks of a zstd frame as complete.
    """
    member, inside = make(), True  # an empty file is truncated, too
    for chunk in _read(file, _PACKED_BYTES):
        while chunk:
            try:
                text = member.decompress(chunk)
            except corrupt as error:
                at = file.tell() - len(chunk)
                raise UserError(f"{file.name}: corrupt near byte {at}: {error}") from error
            if text:
                yield text
            chunk, inside = member.unused_data, not member.eof
            if member.eof:
                member = make()
    if inside:
        raise UserError(f"{file.name}: cut off at byte {file.tell()}, within packed data")


def split_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None, bool]]:
    """Yield (number of the first line, from 1; whole lines of about BLOCK_BYTES; True).

    The bytes of a line that is longer than LINE_BYTES by BLOCK_BYTES or more are not kept: None
    takes their place.
    """
    line, held, size, is_left_out = 1, list[bytes](), 0, False
    for chunk in chunks(file):
        if is_left_out:
            _, newline, chunk = chunk.partition(b"\n")
            if not newline:
                continue
            line, is_left_out = line + 1, False
        end = chunk.rfind(b"\n") + 1
        if end and size + end >= BLOCK_BYTES:
            block = b"".join([*held, chunk[:end]])
            yield line, block, True
            line += block.count(b"\n")
            held, size, chunk = [], 0, chunk[end:]
        held.append(chunk)
        size += len(chunk)
        if size >= LINE_BYTES + BLOCK_BYTES:
            # Fewer than BLOCK_BYTES of it are whole lines.
            block = b"".join(held)
            whole = block[: block.rfind(b"\n", 0, BLOCK_BYTES) + 1]
            if whole:
                yield line, whole, True
            line += whole.count(b"\n")
            yield line, None, True
            held, size, is_left_out = [], 0, True
    if size:
        yield line, b"".join(held), True


def split_text(file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (first byte, about BLOCK_BYTES of text, whether the text ends with them)."""
    held, start = b"", 0
    for chunk in chunks(file):
        # Hold a full block back until more bytes come: only then is it known not to be the last.
        while len(held) > BLOCK_BYTES:
            end = _split_point(held[:BLOCK_BYTES])
            yield start, held[:end], False
            held, start = held[end:], start + end
        held += chunk
    if held:
        yield start, held, True


def _split_point(block: bytes) -> int:
    """Return where to split a block of a long text.

    Best is before the last space between two words, because no tokenizer has a token across it.
    Otherwise split before the last UTF-8 character.
    """
    between = list(_BETWEEN_WORDS.finditer(block, max(0, len(block) - _SPLIT_WINDOW)))
    if between:
        return between[-1].start() + 1
    end = len(block) - 1
    while end > 0 and block[end] & 0xC0 == 0x80:
        end -= 1
    return end or len(block)
