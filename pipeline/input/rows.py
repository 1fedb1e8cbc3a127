"""Rows as Python values, of the columns that are needed; a value that cannot be read is its row's error alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa


class RowError(ValueError):
    """A row that cannot be generated; its message becomes the row's `error`."""

    def __init__(self, message: str) -> None:
        super().__init__(message.encode(errors="backslashreplace").decode())  # it must be text that can be written


Row = dict[str, Any] | RowError


def rows(table: pa.Table, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a table, each with the values of these columns, or with the error of the first that has none."""
    found = {name: values(table, name) for name in columns}
    for i in range(table.num_rows):
        row = {name: column[i] for name, column in found.items()}
        yield next((value for value in row.values() if isinstance(value, RowError)), row)


def values(table: pa.Table, name: str) -> list[Any]:
    """A column's values; in the place of one that cannot be read, its RowError."""
    try:
        return list(table[name].to_pylist())
    except Exception:  # of text, time zones, dates: each has its own
        return [_value(scalar, name) for scalar in table[name]]


def _value(scalar: pa.Scalar, name: str) -> Any:
    try:
        return scalar.as_py()
    except Exception as error:
        return RowError(f"column {name!r}: not a value of {scalar.type}: {type(error).__name__}: {error}")
