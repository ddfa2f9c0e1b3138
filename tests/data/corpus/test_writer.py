"""A corpus appears under its name when it is complete and on disk, and has one writer."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import IndexedDataset
from megafrontier.data.corpus.writer import CorpusWriter, DocumentWriter

UINT16 = np.dtype(np.uint16)


def write(prefix: Path, *documents: list[int]) -> None:
    """Write and publish a corpus."""
    tokens = np.array([token for document in documents for token in document], UINT16)
    sizes, yes = np.array([len(d) for d in documents], np.int32), np.ones(len(documents), bool)
    with CorpusWriter(prefix, UINT16) as corpus:
        DocumentWriter(corpus).write_chunks(tokens, sizes, yes, ~yes)
        corpus.publish()


def test_a_crash_while_publishing_never_pairs_an_old_index_with_new_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename
    write(tmp_path / "c", [1, 2, 3, 4])

    def crash_at_the_index(path: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", crash_at_the_index)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "c", [1, 2], [3, 4])
    with pytest.raises(UserError, match=r"c\.idx: cannot read the corpus: No such file"):
        IndexedDataset(tmp_path / "c")


def test_files_are_synced_before_they_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(file) -> None:
        fd = getattr(file, "fileno", lambda: file)()
        events.append("sync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def watched_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    write(tmp_path / "out" / "c", [1])
    assert sorted(events[:2]) == ["sync c.bin.partial", "sync c.idx.partial"]
    assert events[2:] == ["rename c.bin", "rename c.idx", "sync out"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        with CorpusWriter(tmp_path / "made", UINT16):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match=r"made\.bin: No space left on device; nothing written"):
        fill()
    assert os.listdir(tmp_path) == []


def test_a_corpus_has_one_writer(tmp_path: Path) -> None:
    with (
        CorpusWriter(tmp_path / "c", UINT16),
        pytest.raises(UserError, match="another process is writing"),
    ):
        CorpusWriter(tmp_path / "c", UINT16)


def test_a_writer_that_has_published_leaves_the_next_ones_files_alone(tmp_path: Path) -> None:
    """The next one may start while the first waits for a slow folder."""
    first = CorpusWriter(tmp_path / "c", UINT16)
    first.data.write(b"\1\0")
    first.index.add(np.array([1], np.int32), np.array([1]))
    first.publish()
    with CorpusWriter(tmp_path / "c", UINT16) as second:
        first.__exit__(None, None, None)
        assert second.partial_bin.exists()
