"""Rows as Python values. A value that cannot be converted is an error of its row only."""

import json
import math
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa

T = TypeVar("T")


class RowError(ValueError):
    """A row that cannot be generated; its message becomes the row's `error`."""

    def __init__(self, message: str) -> None:
        super().__init__(message.encode(errors="backslashreplace").decode())  # so that it can be written as text


Row = dict[str, Any] | RowError
BAD = "_exspec_bad_line"  # column with the reason why a line of a file cannot be read; null for other lines


SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 80


def shown(value: Any) -> str:
    """A value as a message shows it: shortened."""
    return SHORT.repr(value)


def are_texts(value: Any) -> bool:
    """Whether a value is one text or a list of texts, none of them empty."""
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) and text and text.encode(errors="replace").decode() == text for text in texts)


def attempted(action: Callable[[], T]) -> T | RowError:
    """The result of an action on one row. Any exception is the row's error, RecursionError and MemoryError included."""
    try:
        return action()
    except RowError as error:
        return error
    except RecursionError:
        return RowError("the row cannot be read: a value is nested too deep")
    except Exception as error:
        return RowError(f"the row cannot be read: {type(error).__name__}: {error}")


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


def nearest(scalar: pa.Scalar) -> Any:
    """A value of any type as a Python value, or if it has none as text: every value can be shown."""
    return _inside(scalar, _as_text)


def stored(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """A column as Parquet and its readers take it: as JSON text if `kind` is not its type, and bytes that are not UTF-8
    as escapes. Other values stay the same."""
    if column.type != kind:
        texts = [as_json(nearest(scalar)) if scalar.is_valid else None for scalar in column]
        return pa.chunked_array([pa.array(texts, kind)])
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return pa.chunked_array([pa.array([_inside(scalar, _text) for scalar in column], kind)])
    if pa.types.is_dictionary(kind) and any(chunk.dictionary.null_count for chunk in column.chunks):
        return pa.chunked_array([pa.array(column.to_pylist(), kind)])  # Parquet takes no null among the coded values
    return column


def _inside(scalar: pa.Scalar, leaf: Callable[[pa.Scalar], Any]) -> Any:
    """A value with all values inside replaced."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar | pa.RunEndEncodedScalar | pa.UnionScalar):
        return _inside(scalar.value, leaf)
    if isinstance(scalar, pa.MapScalar):
        return [(_inside(pair[0], leaf), _inside(pair[1], leaf)) for pair in scalar.values]
    if isinstance(scalar, pa.ListScalar):
        return [_inside(item, leaf) for item in scalar.values]
    if isinstance(scalar, pa.StructScalar):
        return {field.name: _inside(scalar[i], leaf) for i, field in enumerate(scalar.type)}
    return leaf(scalar)


def _text(scalar: pa.Scalar) -> Any:
    if not isinstance(scalar, pa.StringScalar):
        return scalar
    return scalar.as_buffer().to_pybytes().decode(errors="backslashreplace")


def _as_text(scalar: pa.Scalar) -> Any:
    found = _text(scalar)
    try:
        return found.as_py() if isinstance(found, pa.Scalar) else found
    except Exception:  # dates that Python does not have, and unknown time zones
        return f"{scalar.value} {scalar.type}"


def as_json(value: Any) -> str:
    """JSON with bytes as hexadecimal digits, and with null for NaN and infinities."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):  # a map is a list of tuples
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return None if isinstance(value, float) and not math.isfinite(value) else value
