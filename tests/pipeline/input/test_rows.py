"""A value of any type that cannot be converted is an error of its row."""

from typing import Any

import pyarrow as pa
import pytest

from exspec.pipeline.input.rows import RowError, rows


def text(*content: bytes, large: bool = False) -> pa.Array:
    """A text column of arbitrary bytes."""
    kind, raw = (pa.large_string(), pa.large_binary()) if large else (pa.string(), pa.binary())
    return pa.Array.from_buffers(kind, len(content), pa.array(content, raw).buffers())


BAD = {
    "text": (text(b"ok", b"\xff\xfe", b"fine"), "UnicodeDecodeError"),
    "large_text": (text(b"ok", b"\xff\xfe", b"fine", large=True), "UnicodeDecodeError"),
    "coded": (pa.DictionaryArray.from_arrays([0, 1, 0], text(b"ok", b"\xff")), "UnicodeDecodeError"),
    "list": (pa.ListArray.from_arrays([0, 1, 2, 3], text(b"ok", b"\xff", b"fine")), "UnicodeDecodeError"),
    "time": (pa.array([0, 2**62, 1], pa.timestamp("us")), "OverflowError"),
    "date": (pa.array([0, 2**30, 1], pa.date32()), "OverflowError"),
    "duration": (pa.array([0, 2**62, 1], pa.duration("s")), "OverflowError"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_unreadable_value_is_its_rows_error(name: str) -> None:
    column, error = BAD[name]
    table = pa.table({"n": [1, 2, 3], name: column})
    found = list(rows(table, ["n", name]))
    assert [isinstance(row, RowError) for row in found] == [False, True, False]
    assert str(found[1]).startswith(f"column {name!r}: not a value of {column.type}: {error}: ")
    assert list(rows(table, ["n"])) == [{"n": 1}, {"n": 2}, {"n": 3}], "a column that is not needed is not read"


def test_an_unknown_time_zone_is_an_error_of_rows_with_a_time() -> None:
    table = pa.table({"t": pa.array([0, None], pa.timestamp("us", "Mars/Olympus"))})
    bad, null = rows(table, ["t"])
    assert isinstance(bad, RowError)
    assert null == {"t": None}


def test_the_message_of_an_error_can_be_written() -> None:
    error: Any = RowError("half a pair: \ud800")
    assert pa.array([str(error)]).to_pylist() == ["half a pair: \\ud800"]
