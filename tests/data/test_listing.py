"""What folders and patterns stand for: all of it, or an error that names what is missing."""

import errno
import os
from pathlib import Path

import pytest

from megafrontier.data.sources import find_sources
from megafrontier.errors import UserError


def names(folder: Path, pattern: str = "") -> list[str]:
    """What a folder, or a pattern in it, stands for, from there."""
    found = find_sources([str(folder / pattern)])
    return [str(Path(source.name).relative_to(folder)) for source in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wiki").mkdir()
    (tmp_path / "wiki" / "x.txt").write_text("text")
    return tmp_path


@pytest.mark.parametrize(
    ("link", "pattern"),
    [
        ("wiki/y.jsonl.gz", ""),
        ("wiki/y.txt", "wiki/*.txt"),
        ("wiki/y.txt", "**/*.txt"),
        ("wiki/y.json", "wiki/*.json"),
        ("c4", ""),
        ("c4", "*/*.txt"),
        ("c4", "*/x.txt"),
        ("c4", "**/*.txt"),
    ],
)
def test_a_link_to_texts_that_leads_nowhere_is_refused_not_left_out(
    folder: Path, link: str, pattern: str
) -> None:
    """The disk of half a corpus may not be mounted."""
    (folder / link).symlink_to("/not/mounted")
    with pytest.raises(UserError, match=rf"{link}: leads nowhere, need a folder or file to read"):
        names(folder, pattern)


@pytest.mark.parametrize("link", ["x.so", ".#x.txt"])
@pytest.mark.parametrize("pattern", ["", "**/*.txt", "*/*.txt", "*/*"])
def test_a_link_to_no_text_may_lead_nowhere(folder: Path, link: str, pattern: str) -> None:
    for place in (folder, folder / "wiki"):
        (place / link).symlink_to("nowhere")
    assert names(folder, pattern) == ["wiki/x.txt"]


@pytest.mark.parametrize("pattern", ["*/*.txt", "*/x.txt", "**/*.txt"])
def test_a_folder_that_cannot_be_listed_is_refused_by_a_pattern(
    folder: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "locked").mkdir()
    (folder / "locked" / "x.txt").write_text("text")
    listdir = os.listdir

    def refuse(path: str) -> list[str]:  # modes do not hold back root
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(UserError, match=r"/locked: Permission denied, need a folder"):
        names(folder, pattern)


@pytest.mark.parametrize("name", ["y.jsonl.xz", "y.TXT.bz2"])
def test_a_text_in_another_packing_is_refused_in_a_folder_too(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"packed")
    with pytest.raises(UserError, match=rf"{name}': need it unpacked, or packed as .gz or .zst"):
        names(folder)
    (folder / name).rename(folder / "weights.xz")  # which holds no text by its name
    assert names(folder) == ["wiki/x.txt"]
