"""Folders and patterns stand for all their files, or for an error that names what is missing."""

import errno
import os
from pathlib import Path

import pytest

from megafrontier.common.errors import UserError
from megafrontier.data.text.sources import find_sources
from tests.data.corpora import prepared


def names(folder: Path, pattern: str = "") -> list[str]:
    """The files of a folder, or of a pattern in it, relative to the folder."""
    found = find_sources([str(folder / pattern)])
    return [str(Path(source.name).relative_to(folder)) for source in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with wiki/x.txt."""
    (tmp_path / "wiki").mkdir()
    (tmp_path / "wiki" / "x.txt").write_text("text")
    return tmp_path


@pytest.mark.parametrize("link", ["wiki/y.jsonl.gz", "dolma-v1.7"])
def test_a_link_that_leads_nowhere_is_refused(folder: Path, link: str) -> None:
    """The disk with half of a corpus may not be mounted."""
    (folder / link).symlink_to("/not/mounted")
    with pytest.raises(UserError, match=rf"{link}: leads nowhere, need a folder or file to read"):
        names(folder)
    with pytest.raises(UserError, match=rf"{link}': no regular file"):
        names(folder, link[:-1] + "?")


def test_a_folder_that_cannot_be_listed_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "locked").mkdir()
    scandir = os.scandir

    def refuse(path):  # modes do not stop root
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="/locked"):
        names(folder)


def test_a_text_in_another_packing_is_refused_in_a_folder_too(folder: Path) -> None:
    (folder / "y.TXT.bz2").write_bytes(b"packed")
    with pytest.raises(UserError, match=r"y.TXT.bz2': need it unpacked, or packed as .gz or .zst"):
        names(folder)
    (folder / "y.TXT.bz2").rename(folder / "weights.xz")  # not a text by its name
    assert names(folder) == ["wiki/x.txt"]


def test_linked_folders_are_read_once_even_in_a_cycle(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "x.txt").write_text("here")
    (elsewhere / "x.txt").write_text("there")
    (elsewhere / "back").symlink_to(folder)
    for name in ("a", "b"):
        (folder / name).symlink_to(elsewhere)
    assert prepared(tmp_path, folder) == ["here", "there"]


def test_a_pattern_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("2.txt", "1.txt", "3.c", "deep/0.txt"):
        (tmp_path / "in" / name).write_text(name)
    assert prepared(tmp_path, tmp_path / "in" / "*.txt") == ["1.txt", "2.txt"]
    assert prepared(tmp_path, tmp_path / "in/**/*.txt") == ["1.txt", "2.txt", "deep/0.txt"]
    assert prepared(tmp_path, tmp_path / "in/3.c", tmp_path / "in/*.txt")[0] == "3.c"


@pytest.mark.parametrize("pattern", ["part**", "**/c.txt", "a/**/*", "**/b/**/*.txt"])
def test_two_stars_match_any_depth_as_a_name_and_one_star_within_a_name(
    tmp_path: Path, pattern: str
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("part-1.txt", "part-2.txt", "a/b/c.txt"):
        (tmp_path / name).write_text(name)
    found = ["part-1.txt", "part-2.txt"] if pattern == "part**" else ["a/b/c.txt"]
    assert names(tmp_path, pattern) == found


def test_a_pattern_takes_each_file_once_by_its_shortest_name(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.txt").write_text("text")
    (tmp_path / "link").symlink_to("a/b")
    assert names(tmp_path, "**/*.txt") == ["link/x.txt"]
    assert names(tmp_path, "*/x.txt") == ["link/x.txt"]
