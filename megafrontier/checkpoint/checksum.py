"""CRC-32 in eight hexadecimal digits, and texts that hold their own.

CRC-32 finds every change within any 32 bits in a row, so every flipped byte for certain, and
others with all but one chance in four thousand million.
"""

import zlib
from typing import Any

BLANK = "0" * 8
"""Stands where a checksum will be written: headers keep their length when it is."""


def crc32_hex(data: Any) -> str:
    """CRC-32 of bytes or of anything that shows its bytes (memoryview, uint8 array)."""
    return f"{zlib.crc32(data):08x}"


def seal(text: bytes, at: int) -> bytes:
    """`text` with the eight bytes from `at` replaced by the checksum of all the others (and of
    BLANK in their place)."""
    head, tail = text[:at], text[at + len(BLANK) :]
    return head + crc32_hex(head + BLANK.encode() + tail).encode() + tail


def is_sealed(text: bytes, at: int) -> bool:
    """Whether the checksum at `at` is that of the text, to the letter."""
    return seal(text, at) == text
