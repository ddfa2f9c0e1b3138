"""What folders and patterns stand for: all of it, or an error that names what is missing."""

import errno
import os
from pathlib import Path

import pytest

from megafrontier.common.errors import UserError
from megafrontier.data.text.sources import find_sources
from tests.data.preparing import prepared


def names(folder: Path, pattern: str = "") -> list[str]:
    """What a folder, or a pattern in it, stands for, from there."""
    found = find_sources([str(folder / pattern)])
    return [str(Path(source.name).relative_to(folder)) for source in found]


def lock(monkeypatch: pytest.MonkeyPatch, listing: str) -> None:
    """Have this function of `os` refuse folders named locked: modes do not hold back root."""
    listed = getattr(os, listing)

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(os, listing, refuse)


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
        ("c4.en", ""),
        ("c4.en", "*/*.txt"),
        ("dolma-v1.7", ""),
        ("dolma-v1.7", "**/*.txt"),
    ],
)
def test_a_link_to_texts_that_leads_nowhere_is_refused_not_left_out(
    folder: Path, link: str, pattern: str
) -> None:
    """The disk of half a corpus may not be mounted."""
    (folder / link).symlink_to("/not/mounted")
    with pytest.raises(UserError, match=rf"{link}: leads nowhere, need a folder or file to read"):
        names(folder, pattern)


@pytest.mark.parametrize("link", ["x.so", "x.PNG", ".#x.txt"])
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
    lock(monkeypatch, "listdir")
    with pytest.raises(UserError, match=r"/locked: Permission denied, need a folder"):
        names(folder, pattern)


@pytest.mark.parametrize("name", ["y.jsonl.xz", "y.TXT.bz2"])
def test_a_text_in_another_packing_is_refused_in_a_folder_too(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"packed")
    with pytest.raises(UserError, match=rf"{name}': need it unpacked, or packed as .gz or .zst"):
        names(folder)
    (folder / name).rename(folder / "weights.xz")  # which holds no text by its name
    assert names(folder) == ["wiki/x.txt"]


def test_linked_folders_are_read_once_and_circles_end(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "x.txt").write_text("here")
    (elsewhere / "x.txt").write_text("there")
    (elsewhere / "back").symlink_to(folder)
    for name in ("a", "b"):
        (folder / name).symlink_to(elsewhere)
    assert prepared(tmp_path, folder) == ["here", "there"]


def test_a_folder_that_cannot_be_listed_is_refused_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    (folder / "locked").mkdir(parents=True)
    (folder / "x.txt").write_text("here")
    lock(monkeypatch, "scandir")
    with pytest.raises(UserError, match=r"folder': .*/locked: Permission denied, need a folder"):
        prepared(tmp_path, folder)


def test_a_glob_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("2.txt", "1.txt", "3.c", "deep/0.txt"):
        (tmp_path / "in" / name).write_text(name)
    assert prepared(tmp_path, tmp_path / "in" / "*.txt") == ["1.txt", "2.txt"]
    assert prepared(tmp_path, tmp_path / "in/**/*.txt") == ["1.txt", "2.txt", "deep/0.txt"]
    assert prepared(tmp_path, tmp_path / "in/3.c", tmp_path / "in/*.txt")[0] == "3.c"


def test_a_glob_takes_each_file_once_though_a_link_goes_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/x.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "back").symlink_to(tmp_path)
    assert names(tmp_path, "**/*.txt") == ["a.txt", "b/x.txt", "c.txt"]


def test_a_glob_ends_where_several_links_go_in_circles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system follows forty in a row: by two there would be 2**40 ways to each file."""
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / "x.txt").write_text("text")
    (tmp_path / "v2" / "back").symlink_to(tmp_path)
    (tmp_path / "current").symlink_to("v2")
    looked, scandir = [], os.scandir

    def count(path):
        looked.append(path)
        assert len(looked) < 100
        return scandir(path)

    monkeypatch.setattr(os, "scandir", count)
    assert names(tmp_path, "**/*.txt") == ["current/x.txt"]


def test_a_glob_takes_a_file_by_its_shortest_name(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.txt").write_text("text")
    (tmp_path / "link").symlink_to("a/b")
    assert names(tmp_path, "**/*.txt") == ["link/x.txt"]


def test_a_glob_takes_a_version_and_the_link_to_it_for_one(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "x.txt").write_text(version)
    (tmp_path / "current").symlink_to("v2")
    assert names(tmp_path, "**/*.txt") == ["current/x.txt", "v1/x.txt"]
    assert prepared(tmp_path, tmp_path / "**" / "*.txt") == ["v2", "v1"]
