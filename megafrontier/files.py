"""Small files that are either as they were or as they are to be."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file by rename, so that a kill leaves the old one or the new one. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
