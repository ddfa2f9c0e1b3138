"""A corpus that grows: new documents go behind those that are there, in place.

Note [Growing in place]
A reader must find the old corpus or the new one, whenever the writer dies. New tokens go behind the
old ones in the .bin, which may be terabytes and is not copied. The .idx that describes them takes
the place of the old one by one rename. Until then PREFIX.growing, the number of tokens that the old
.idx describes, tells readers why the .bin is longer. It stays afterwards, for readers that have
opened the old .idx. PREFIX.sources lists the files of each append, with the number of documents
that the corpus has then. It is written before the .idx: appends that lead to more documents than
the .idx has did not happen.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path
from typing import Any, BinaryIO

from megafrontier.common.errors import UserError, need
from megafrontier.common.files import sync_file, sync_folder, write_atomically
from megafrontier.common.parsing import LARGEST_JSON, read_text
from megafrontier.data.corpus.indexed import (
    IndexedDataset,
    growing_path,
    idx_path,
    mask_path,
    sources_path,
)
from megafrontier.data.corpus.merge import copy_index
from megafrontier.data.corpus.writer import CorpusWriter, partial_path


@dataclass
class CorpusSources:
    """What a growing corpus was made of.

    options: how its texts become tokens. appends: the number of documents after each, and the bytes
    of its files by their path.
    """

    options: Mapping[str, Any]
    appends: list[tuple[int, dict[str, int]]] = field(default_factory=list)

    @classmethod
    def open(
        cls, prefix: str | Path, options: Mapping[str, Any]
    ) -> "tuple[CorpusSources, int | None]":
        """Those of the corpus at a prefix, and its number of documents; None if there is none yet.
        Raises UserError for other options, and for a corpus that was made in another way."""
        if not idx_path(prefix).exists():
            return cls(options), None
        documents, path = len(IndexedDataset(prefix)), sources_path(prefix)
        need(path.is_file(), str(path), "missing", "need a corpus that prepare --append has made")
        try:
            values = json.loads(read_text(path, LARGEST_JSON))
            appends = [(int(count), dict(files)) for count, files in values["appends"]]
            before = dict(values["options"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}: {error}, need it as prepare --append wrote it") from error
        for key, value in options.items():
            fits = f"need {before.get(key)}, with which the corpus was made"
            need(value == before.get(key), f"--append: {key}", value, fits)
        return cls(options, [each for each in appends if each[0] <= documents]), documents

    def new(self, files: Sequence[tuple[str, int]]) -> Iterator[int]:
        """The positions of the files (path and bytes) that the corpus does not have. Raises
        UserError for one that has changed."""
        known = {path: size for _, held in self.appends for path, size in held.items()}
        for at, (path, size) in enumerate(files):
            before = known.get(realpath(path))
            fits = f"was {before} when it was prepared, need files that do not change"
            need(before in (None, size), f"input {path!r}", f"{size} bytes", fits)
            if before is None:
                yield at

    def encoded(self, documents: int, files: Sequence[tuple[str, int]]) -> str:
        """The text of PREFIX.sources with one more append."""
        added = {realpath(path): size for path, size in files}
        values = {"options": dict(self.options), "appends": [*self.appends, (documents, added)]}
        return json.dumps(values, indent=1) + "\n"


class AppendWriter(CorpusWriter):
    """Writes documents behind those of a corpus (Note [Growing in place])."""

    def __init__(self, prefix: str | Path, has_mask: bool) -> None:
        """Raises UserError as `CorpusWriter`, and for a corpus that cannot be read."""
        corpus = IndexedDataset(prefix)
        super().__init__(prefix, corpus.dtype)
        copy_index(corpus, self.index)
        self.tokens_before, self.documents_before = len(corpus.tokens), len(corpus)
        write_atomically(growing_path(prefix), f"{self.tokens_before}\n")
        sync_folder(self.bin.parent)
        self._lock = self.data
        self.data = _open_behind(self.bin, corpus.tokens.nbytes)
        if has_mask:
            self.mask = _open_behind(mask_path(prefix), self.tokens_before)

    def publish(self, sources: str | None = None) -> None:
        """Put the new .idx in place of the old one, after tokens and sources are on the disk."""
        sync_file(self.data)
        if self.mask is not None:
            sync_file(self.mask)
        if sources is not None:
            write_atomically(self.sources, sources)
        self.write_index()
        partial_path(self.idx).rename(self.idx)
        sync_folder(self.bin.parent)
        self._is_published = True

    def __exit__(self, *raised: Any) -> None:
        is_published, self._is_published = self._is_published, False
        try:
            super().__exit__(*raised)
        finally:
            self._lock.close()
            if not is_published:
                with suppress(OSError):
                    _open_behind(self.bin, self.tokens_before * self.dtype.itemsize).close()
                    if self.mask is not None:
                        _open_behind(self.mask_path, self.tokens_before).close()


def _open_behind(path: Path, size: int) -> BinaryIO:
    """Open a file to write behind its first `size` bytes. What a killed append left is cut off."""
    file = path.open("ab")
    file.truncate(size)
    return file
