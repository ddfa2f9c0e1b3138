"""Corpora as `prepare` makes them."""

from pathlib import Path

from megafrontier.data.corpus.indexed import IndexedDataset
from megafrontier.data.text.prepare import prepare


def prepared(folder: Path, *inputs: str | Path, **options) -> list[str]:
    """The documents that prepare makes of the inputs."""
    prepare([str(i) for i in inputs], "bytes", folder / "made", 1, **options)
    corpus = IndexedDataset(folder / "made")
    return [bytes(corpus.document(i).tolist()).decode() for i in range(len(corpus))]
