"""The texts of a table: one column of a parquet file, or of what the `datasets` library reads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megafrontier.common.errors import UserError

Rows = list[Any]
_ROWS = 512  # read and shipped at a time


def parquet_rows(name: str, key: str) -> Iterator[Rows]:
    """The values of column `key` of the parquet file `name`. Raises UserError for a file that
    cannot be read, or without that column."""
    import pyarrow.parquet

    with _told(f"{name}: cannot read the parquet file"), pyarrow.parquet.ParquetFile(name) as file:
        _check_column(name, key, file.schema_arrow.names)
        for rows in file.iter_batches(_ROWS, columns=[key]):
            yield _values(rows.column(0))


def dataset_rows(name: str, table: Any, key: str) -> Iterator[Rows]:
    """The values of column `key` of a `datasets.Dataset`. Raises as `parquet_rows`."""
    with _told(f"{name}: cannot read the dataset"):
        _check_column(name, key, table.column_names)
        for rows in table.select_columns([key]).with_format("arrow").iter(_ROWS):
            yield _values(rows.column(0))


@contextmanager
def _told(what: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what}: {error}") from error


def _values(column: Any) -> Rows:
    """A column's values. Where some of its strings are no UTF-8, which not every writer looks at,
    those come as bytes."""
    import pyarrow

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        is_large = pyarrow.types.is_large_string(column.type)
        raw = column.cast(pyarrow.large_binary() if is_large else pyarrow.binary())
        return [_decoded(value) for value in raw.to_pylist()]


def _decoded(value: bytes | None) -> str | bytes | None:
    try:
        return value if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def _check_column(name: str, key: str, columns: Sequence[str]) -> None:
    if key not in columns:
        known = ", ".join(columns)
        raise UserError(f"{name}: no column {key!r}; give --json-key, one of: {known}")
