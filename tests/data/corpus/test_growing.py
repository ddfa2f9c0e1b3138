"""A corpus that grows is the old one or the new one, whenever the writer dies."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from megafrontier.common.errors import UserError
from megafrontier.data.corpus.growing import AppendWriter, CorpusSources
from megafrontier.data.corpus.indexed import IndexedDataset
from megafrontier.data.corpus.writer import CorpusWriter, DocumentWriter
from tests.data.corpora import read_corpus

UINT16 = np.dtype(np.uint16)
OLD, NEW = [[1, 2, 3], [4, 5]], [[6], [7, 8, 9, 10]]
OPTIONS = {"json_key": "text"}


def add(corpus: CorpusWriter, documents: list[list[int]], has_mask: bool) -> None:
    tokens = np.array([token for document in documents for token in document], UINT16)
    sizes, yes = np.array([len(d) for d in documents], np.int32), np.ones(len(documents), bool)
    mask = (tokens % 2).astype(np.uint8) if has_mask else None
    DocumentWriter(corpus).write_chunks(tokens, sizes, yes, ~yes, mask)


def write(prefix: Path, documents: list[list[int]], has_mask: bool = False) -> None:
    with CorpusWriter(prefix, UINT16, has_mask) as corpus:
        add(corpus, documents, has_mask)
        text = CorpusSources(OPTIONS).encoded(len(documents), [("/a", 1)])
        corpus.publish(text)


def append(prefix: Path, documents: list[list[int]], has_mask: bool = False) -> None:
    sources, _ = CorpusSources.open(prefix, OPTIONS)
    with AppendWriter(prefix, has_mask) as corpus:
        add(corpus, documents, has_mask)
        corpus.publish(sources.encoded(corpus.index.documents, [("/b", 2)]))


def die_at(call: int, work) -> bool:
    """Do the work in a process that dies before it syncs for the `call`-th time. Returns whether
    it died."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [call]

    def fsync(_: object) -> None:
        left[0] -= 1
        if not left[0]:
            os._exit(9)

    os.fsync = fsync  # type: ignore[assignment]
    work()
    os._exit(0)


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_killed_append_leaves_the_old_corpus_and_can_be_done_again(
    tmp_path: Path, has_mask: bool
) -> None:
    write(tmp_path / "whole", OLD + NEW, has_mask)
    before = [1, 2, 3, 4, 5]
    for call in range(1, 9):
        prefix = tmp_path / f"c{call}"
        write(prefix, OLD, has_mask)
        is_dead = die_at(call, lambda: append(prefix, NEW, has_mask))  # noqa: B023
        found = IndexedDataset(prefix)
        sources, documents = CorpusSources.open(prefix, OPTIONS)
        known = [len(files) for _, files in sources.appends]
        is_new = documents == 4
        assert found.tokens.tolist() == before + [6, 7, 8, 9, 10] * is_new
        assert known == [1] + [1] * is_new
        assert (found.mask is not None) == has_mask
        if not is_new:
            append(prefix, NEW, has_mask)
        assert read_corpus(prefix) == read_corpus(tmp_path / "whole")
        if has_mask:
            masks = [Path(f"{p}.mask").read_bytes() for p in (prefix, tmp_path / "whole")]
            assert masks[0] == masks[1]
    assert not is_dead, "all calls have been tried"


def test_an_append_that_fails_cuts_off_what_it_wrote(tmp_path: Path) -> None:
    write(tmp_path / "c", OLD)
    before = read_corpus(tmp_path / "c")

    def fill() -> None:
        with AppendWriter(tmp_path / "c", has_mask=False) as corpus:
            add(corpus, NEW, has_mask=False)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match=r"c\.bin: No space left on device; nothing written"):
        fill()
    assert read_corpus(tmp_path / "c") == before
    assert not list(tmp_path.glob("*.partial"))


def test_readers_keep_the_corpus_that_they_have_opened(tmp_path: Path) -> None:
    write(tmp_path / "c", OLD)
    opened = IndexedDataset(tmp_path / "c")
    append(tmp_path / "c", NEW)
    append(tmp_path / "c", OLD)
    assert opened.tokens.tolist() == [1, 2, 3, 4, 5]
    assert len(IndexedDataset(tmp_path / "c")) == 6


def test_a_longer_bin_without_an_append_is_still_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", OLD)
    with (tmp_path / "c.bin").open("ab") as file:
        file.write(b"\1\0")
    with pytest.raises(UserError, match=r"c\.bin: 12 bytes, its \.idx describes 10; truncated"):
        IndexedDataset(tmp_path / "c")


def test_a_growing_corpus_has_one_writer(tmp_path: Path) -> None:
    write(tmp_path / "c", OLD)
    with (
        AppendWriter(tmp_path / "c", has_mask=False),
        pytest.raises(UserError, match="another process is writing"),
    ):
        AppendWriter(tmp_path / "c", has_mask=False)
