"""A hook of mkdocs: pages of the site whose files stand beside the README, where people look, and
where code in a sentence or a table may break."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
CODE = re.compile(r"(?<!<pre>)(?<!<span></span>)<code>[^<]*</code>")
BREAK = re.compile(r"(?<=\w)([._/=,-])(?=\w)")
OPTION = re.compile(r"(?<![\w-])--?\w+")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages. Their links to docs/ lead to the site's own pages."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Let code break after the dots of a key, but not after the dashes of an option."""

    def breakable(code: re.Match[str]) -> str:
        whole = OPTION.sub(r'<span class="option">\g<0></span>', code[0])
        return BREAK.sub(r"\1<wbr>", whole)

    return CODE.sub(breakable, html)
