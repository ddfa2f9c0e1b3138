"""Files as streams of bytes: unpacked as they are read, cut at lines, in flat memory."""

import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megafrontier.common.errors import UserError

BLOCK_BYTES = 1 << 20
"""Text read, shipped and tokenised at a time; a longer line or document row is taken whole."""

_READ_BYTES = 1 << 18
_NEAR_END = 1 << 14
_BETWEEN_WORDS = re.compile(rb"[0-9A-Za-z\x80-\xff] (?=[A-Za-z\x80-\xff])")


class Stream:
    """A file's bytes, unpacked if its name ends in .gz or .zst.

    `position` is the byte of the file itself up to which it has been read. Raises UserError, naming
    the file and that byte, when it is missing, corrupt or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0

    def chunks(self) -> Iterator[bytes]:
        """The unpacked bytes, in chunks."""
        try:
            with self.path.open("rb") as file:
                yield from self._unpack(file)
        except OSError as error:
            raise UserError(f"{self.path}: cannot read: {error.strerror}") from error

    def blocks(self) -> Iterator[bytes]:
        """The unpacked bytes in blocks of whole lines, about BLOCK_BYTES each."""
        held: list[bytes] = []
        size = 0
        for chunk in self.chunks():
            cut = chunk.rfind(b"\n") + 1
            if cut and size + cut >= BLOCK_BYTES:
                yield b"".join([*held, chunk[:cut]])
                held, size, chunk = [], 0, chunk[cut:]
            held.append(chunk)
            size += len(chunk)
        if size:
            yield b"".join(held)

    def _unpack(self, file: BinaryIO) -> Iterator[bytes]:
        packing = self.path.suffix.lower()
        if packing == ".gz":
            # What a tape or a block device adds is no part of it, as for gzip itself.
            return self._members(file, lambda: zlib.decompressobj(wbits=31), zlib.error, b"\0")
        if packing == ".zst":
            import zstandard

            # Of `zstd --long=31`, too; the library's own limit is a window of 128 MiB.
            make = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
            return self._members(file, make, zstandard.ZstdError)
        return self._read(file)

    def _read(self, file: BinaryIO) -> Iterator[bytes]:
        while chunk := file.read(_READ_BYTES):
            self.position += len(chunk)
            yield chunk

    def _members(
        self,
        file: BinaryIO,
        make: Callable[[], Any],
        corrupt: type[Exception],
        padding: bytes = b"",
    ) -> Iterator[bytes]:
        """Unpack the members (gzip) or frames (zstd) that the file is a chain of, with any number
        of `padding` behind each.

        By hand because the libraries' own readers take a file cut off between two blocks of a
        zstd frame for a whole one.
        """
        member, inside, has_ended = make(), True, False  # an empty file lacks its first one
        for chunk in self._read(file):
            while chunk := chunk.lstrip(padding) if has_ended else chunk:
                try:
                    text = member.decompress(chunk)
                except corrupt as error:
                    at = self.position - len(chunk)
                    raise UserError(f"{self.path}: corrupt near byte {at}: {error}") from error
                if text:
                    yield text
                chunk, inside, has_ended = member.unused_data, not member.eof, member.eof
                if member.eof:
                    member = make()
        if inside:
            raise UserError(f"{self.path}: cut off at byte {self.position}, within packed data")


def cut_characters(block: bytes) -> int:
    """Where to cut a block of a long text: before its last space between two words, which no
    tokenizer's token goes across; without one behind its last line, before its last space, or else
    before its last UTF-8 character, so that no character is cut in two."""
    between = list(_BETWEEN_WORDS.finditer(block, max(0, len(block) - _NEAR_END)))
    if between:
        return between[-1].start() + 1
    line, space = block.rfind(b"\n") + 1, block.rfind(b" ")
    if line or space > 0:
        return line or space
    cut = len(block) - 1
    while cut > 0 and block[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut or len(block)
