"""The rows of parquet files and of datasets that Hugging Face's `datasets` library reads."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megafrontier.common.errors import UserError

Rows = list[Any]
_BATCH_ROWS = 64  # a row may be a book


def is_dataset_folder(folder: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` wrote the folder: one table, or one per split."""
    table = ("state.json", "dataset_info.json")
    return (folder / "dataset_dict.json").is_file() or all((folder / n).is_file() for n in table)


def has_dataset_card(folder: Path) -> bool:
    """Return whether the README.md is a dataset card that says how to read the folder."""
    readme = folder / "README.md"
    if not readme.is_file():
        return False
    head = readme.read_bytes()[:65536].split(b"\n---", 1)[0]
    return head.startswith(b"---") and bool(re.search(rb"^(configs|dataset_info):", head, re.M))


def load_dataset(name: str, split: str | None) -> Any:
    """Load one split (default: train) of a dataset, as a `datasets.Dataset`.

    `name` is a folder, NAME, OWNER/NAME or OWNER/NAME:CONFIG. Raises UserError if `datasets`
    cannot load it, or it has no such split.
    """
    import datasets

    try:
        if is_dataset_folder(Path(name)):
            table = datasets.load_from_disk(name)
        elif Path(name).is_dir():
            table = datasets.load_dataset(name)
        else:
            dataset, _, config = name.partition(":")
            table = datasets.load_dataset(dataset, config or None)
    except Exception as error:  # the library's dozen formats raise all kinds of exceptions
        raise UserError(
            f"input {name!r}: no file or folder of that name here, and no dataset either: {error}"
        ) from error
    if isinstance(table, dict):
        split = split or "train"
        if split not in table:
            raise UserError(f"input {name!r}: no split {split!r}; it has {', '.join(table)}")
        return table[split]
    if split not in (None, str(table.split)):
        raise UserError(f"input {name!r}: no split {split!r}; it is one table, need no --split")
    return table


def read_rows(
    name: str, table: Any, key: str, also: Sequence[str] = ()
) -> Iterator[tuple[int, Rows]]:
    """Yield (number of the first row, from 0; at most _BATCH_ROWS values of column `key`).

    With `also`, a row is a mapping of `key` and of those columns in `also` that exist, without
    null fields, because Arrow gives each record the fields of all others, as nulls.

    Reads the parquet file `name` if `table` is None, otherwise that `datasets.Dataset`. Strings
    are bytes that may not be valid UTF-8. Raises UserError for a file that cannot be read, or
    without that column.
    """
    import pyarrow

    start = 0
    try:
        for columns in _columns(name, table, key, also):
            values = [_values(column) for column in columns.values()]
            records = (dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True))
            rows = [_without_nulls(record) for record in records] if also else values[0]
            yield start, rows
            start += len(rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{name}: cannot read the table: {error}") from error


def size_of(rows: Rows) -> int:
    """Return the characters, or bytes, of all strings, and about those of chats."""
    return sum(len(row if isinstance(row, str | bytes) else str(row)) for row in rows)


def _columns(name: str, table: Any, key: str, also: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield column `key`, and those in `also`, as Arrow arrays of at most _BATCH_ROWS rows."""
    import pyarrow.parquet

    if table is not None:
        _check_column(name, key, table.column_names)
        names = [key, *(column for column in also if column in table.column_names)]
        batches = table.select_columns(names).with_format("arrow").iter(_BATCH_ROWS)
        yield from ({name: batch.column(name) for name in names} for batch in batches)
        return
    with pyarrow.parquet.ParquetFile(name) as file:
        _check_column(name, key, file.schema_arrow.names)
        names = [key, *(column for column in also if column in file.schema_arrow.names)]
        for batch in file.iter_batches(_BATCH_ROWS, columns=names):
            yield {name: batch.column(name) for name in names}


def _values(column: Any) -> Rows:
    import pyarrow

    # The workers decode strings, and find those that are not UTF-8: not every writer checks them.
    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
    return list(column.to_pylist())


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {k: _without_nulls(item) for k, item in value.items() if item is not None}
    return value


def _check_column(name: str, key: str, columns: Sequence[str]) -> None:
    if key not in columns:
        known = ", ".join(columns)
        raise UserError(f"{name}: no column {key!r}; give --json-key, one of: {known}")
