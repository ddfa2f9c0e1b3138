"""A hook of mkdocs: pages of the site whose files stand beside the README, where people look."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages. Their links to docs/ lead to the site's own pages."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    return files
