"""Stand-ins for a machine's programs."""

import os
from pathlib import Path


def with_tools(folder: Path, **texts: str) -> str:
    """A PATH on which these scripts, written into `folder`, come first."""
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
