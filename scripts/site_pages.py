"""A hook of mkdocs: pages of the site whose files stand beside the README, where people look, and
where keys may break in narrow tables."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
CODE = re.compile(r"<code>.*?</code>", re.DOTALL)
BREAK = re.compile(r"(?<=\w)([._/=,-])(?=\w)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages. Their links to docs/ lead to the site's own pages."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Let code in the cells of tables break after the dots of a key, not within its words."""

    def breakable(code: re.Match[str]) -> str:
        return BREAK.sub(r"\1<wbr>", code[0])

    return CELL.sub(lambda cell: CODE.sub(breakable, cell[0]), html)
