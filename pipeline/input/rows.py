"""Rows as Python values. A value that cannot be converted is an error of its row only."""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa


class RowError(ValueError):
    """A row that cannot be generated; its message becomes the row's `error`."""

    def __init__(self, message: str) -> None:
        super().__init__(message.encode(errors="backslashreplace").decode())  # so that it can be written as text


Row = dict[str, Any] | RowError
BAD = "_exspec_bad_line"  # column with the reason why a line of a file cannot be read; null for other lines


def are_texts(value: Any) -> bool:
    """Whether a value is one text or a list of texts, none of them empty."""
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) and text and text.encode(errors="replace").decode() == text for text in texts)


def rows(table: pa.Table, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a table as dicts of these columns; or the first RowError among the values of a row.

    The table has a column BAD if it has lines that cannot be read, each of which is a RowError.
    """
    found = {name: values(table, name) for name in columns}
    bad = table[BAD].to_pylist() if BAD in table.column_names else []
    for i in range(table.num_rows):
        if bad and bad[i]:
            yield RowError(bad[i])
            continue
        row = {name: column[i] for name, column in found.items()}
        yield next((value for value in row.values() if isinstance(value, RowError)), row)


def values(table: pa.Table, name: str) -> list[Any]:
    """The values of a column, with a RowError for each that cannot be converted."""
    try:
        return list(table[name].to_pylist())
    except Exception:  # conversions of text, time zones and dates raise different types
        return [_value(scalar, name) for scalar in table[name]]


def _value(scalar: pa.Scalar, name: str) -> Any:
    try:
        return scalar.as_py()
    except Exception as error:
        return RowError(f"column {name!r}: not a value of {scalar.type}: {type(error).__name__}: {error}")
