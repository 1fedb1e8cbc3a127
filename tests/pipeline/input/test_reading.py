"""Many ranges of a shard in one pass: each row group once, only the necessary bytes, and all rows that are readable."""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from exspec.pipeline.input import reading
from exspec.pipeline.input.plan import Chunk, Shard
from exspec.pipeline.input.reading import Unreadable, read_ranges
from exspec.pipeline.input.shards import find_shards
from tests.pipeline.input.chunks import read_chunk


class CountedFileSystem(MemoryFileSystem):
    """Counts fetched bytes. failures: number of fetches that fail with a 503. refusal: the error of all fetches."""

    protocol = "counted"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    fetched: list[int] = []  # noqa: RUF012
    failures = 0
    refusal: Exception | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("counted://", "memory://")))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        if type(self).failures:
            type(self).failures -= 1
            raise OSError("503 Slow Down")
        if self.refusal and len(self.fetched) > 1:
            raise self.refusal
        content: bytes = super().cat_file(path, start, end, **kwargs)
        self.fetched.append(len(content))
        return content


fsspec.register_implementation("counted", CountedFileSystem, clobber=True)


@pytest.fixture
def store() -> Iterator[CountedFileSystem]:
    fs = CountedFileSystem()
    yield fs
    fs.store.clear()
    fs.fetched.clear()
    fs.refusal = None


def put(fs: CountedFileSystem, table: pa.Table, **options: Any) -> Shard:
    with fs.open("/in/s.parquet", "wb") as file:
        pq.write_table(table, file, **options)
    (shard,), _ = find_shards(["counted://in"], {})
    fs.fetched.clear()
    return shard


def compressed(fs: CountedFileSystem, column: int) -> int:
    with fs.open("/in/s.parquet", "rb") as file:
        found = pq.read_metadata(file)
        return sum(found.row_group(g).column(column).total_compressed_size for g in range(found.num_row_groups))


WIDE = {
    "n": list(range(40_000)),
    "text": [f"{i:064d}" for i in range(40_000)],
    "blob": [f"{i}" * 90 for i in range(40_000)],
}


@pytest.mark.parametrize("together", [reading.AT_ONCE, 100_000])
def test_all_chunks_of_a_large_row_group_cost_one_pass(
    store: CountedFileSystem, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Not one pass per chunk, and only the columns that are needed."""
    monkeypatch.setattr(reading, "AT_ONCE", together)
    shard = put(store, pa.table(WIDE), row_group_size=40_000, compression="none", use_dictionary=False)
    ranges = [(first, 64) for first in range(0, 40_000, 64)]
    decoded = []
    whole = reading.ParquetShard._batches
    monkeypatch.setattr(reading.ParquetShard, "_batches", lambda *a: decoded.append(a[1]) or whole(*a))
    found = [t["text"].to_pylist() for t in read_ranges(shard, ranges, ["text"], {}) if isinstance(t, pa.Table)]
    assert [text for texts in found for text in texts] == WIDE["text"]
    assert len(decoded) == 1
    assert sum(store.fetched) < 1.05 * compressed(store, 1) + 100_000
    assert len(store.fetched) < 20


def test_the_first_rows_of_a_huge_row_group_cost_a_few_pages(
    store: CountedFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "AT_ONCE", 100_000)
    monkeypatch.setattr(reading, "FETCHED", 100_000)
    monkeypatch.setattr(reading, "DECODED", 100_000)
    shard = put(
        store, pa.table(WIDE), row_group_size=40_000, compression="none", use_dictionary=False, data_page_size=50_000
    )
    (table,) = read_ranges(shard, [(0, 64)], ["text"], {})
    assert isinstance(table, pa.Table)
    assert table["text"].to_pylist() == WIDE["text"][:64]
    assert sum(store.fetched) < 500_000 < compressed(store, 1)


def test_small_row_groups_are_fetched_together(store: CountedFileSystem) -> None:
    shard = put(store, pa.table({"n": list(range(5000))}), row_group_size=10)
    tables = list(read_ranges(shard, [(0, 2500), (2500, 2500)], None, {}))
    assert [n for t in tables if isinstance(t, pa.Table) for n in t["n"].to_pylist()] == list(range(5000))
    assert len(store.fetched) < 20, "500 row groups"


def test_a_busy_store_is_retried(store: CountedFileSystem) -> None:
    shard = put(store, pa.table({"n": [1, 2, 3]}))
    CountedFileSystem.failures = 2
    (table,) = read_ranges(shard, [(1, 2)], None, {})
    assert isinstance(table, pa.Table)
    assert table["n"].to_pylist() == [2, 3]


@pytest.mark.parametrize("together", [0, reading.AT_ONCE])
def test_a_refusal_of_the_store_is_not_damage(
    store: CountedFileSystem, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr(reading, "AT_ONCE", together)
    shard = put(store, pa.table({"n": list(range(9000))}), row_group_size=1000)
    store.refusal = PermissionError("not yours any more")
    with pytest.raises(PermissionError, match="not yours any more"):
        list(read_ranges(shard, [(0, 500), (5000, 500)], None, {}))


def test_a_shard_that_vanishes_while_it_is_read_is_not_retried(
    store: CountedFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "AT_ONCE", 0)
    shard = put(store, pa.table({"n": list(range(9000))}), row_group_size=1000)
    found = read_ranges(shard, [(0, 500), (500, 500), (5000, 500)], None, {})
    assert isinstance(next(found), pa.Table)
    store.rm("/in/s.parquet")
    assert isinstance(next(found), pa.Table), "it was read already"
    assert next(found) == Unreadable("has vanished since it was planned")


ROWS = pa.table({"n": list(range(60)), "t": [None if i % 7 == 0 else {"a": [str(i)] * (i % 4)} for i in range(60)]})


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Shard]:
    folder = tmp_path_factory.mktemp("in")
    for size in (1, 7, 60):
        pq.write_table(ROWS, folder / f"{size}.parquet", row_group_size=size)
    return find_shards([str(folder)], {})[0]


@given(
    st.integers(0, 2),
    st.lists(st.integers(0, 60), unique=True, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.sampled_from([0, 300, 1 << 20]),
)
def test_ranges_are_the_rows_that_they_name(
    shards: list[Shard], which: int, cuts: list[int], kept: list[bool], together: int
) -> None:
    borders = sorted(cuts)
    ranges = [(a, b - a) for (a, b), keep in zip(pairwise(borders), kept, strict=False) if keep]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "AT_ONCE", together)
        patch.setattr(reading, "DECODED", 500)
        found = list(read_ranges(shards[which], ranges, None, {}))
    assert [t.to_pylist() for t in found if isinstance(t, pa.Table)] == [ROWS.slice(*r).to_pylist() for r in ranges]


def test_columns_come_in_the_given_order_and_none_gives_bare_rows(shards: list[Shard]) -> None:
    for names in (["t", "n"], ["n"], []):
        (table,) = read_ranges(shards[1], [(5, 10)], names, {})
        assert isinstance(table, pa.Table)
        assert (table.column_names, table.num_rows) == (names, 10)


def test_a_column_whose_name_is_the_path_of_another(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [{"b": 1}], "a.b": [2]}), tmp_path / "s.parquet")
    (shard,), _ = find_shards([str(tmp_path)], {})
    for name, value in (("a", {"b": 1}), ("a.b", 2)):
        assert read_chunk(Chunk(shard, 0, 0, 1), {}, [name]).to_pylist() == [{name: value}]


def damaged(tmp_path: Path, column: int, **options: Any) -> Shard:
    """A shard of three row groups with damage in the second one, in the middle of a column."""
    path = tmp_path / "s.parquet"
    table = pa.table({"n": list(range(3000)), "t": [f"{i:050d}" for i in range(3000)]})
    pq.write_table(table, path, row_group_size=1000, use_dictionary=False, **options)
    place = pq.read_metadata(path).row_group(1).column(column)
    content = bytearray(path.read_bytes())
    middle = place.data_page_offset + place.total_compressed_size // 2
    for i in range(middle, middle + 40):
        content[i] ^= 0xFF
    path.write_bytes(content)
    return find_shards([str(tmp_path)], {})[0][0]


PAGES = {"compression": "none", "data_page_size": 2000, "write_batch_size": 50, "write_page_checksum": True}


@pytest.mark.parametrize("options", [{"compression": "snappy"}, PAGES])
def test_damage_does_not_affect_other_rows(tmp_path: Path, options: dict[str, Any]) -> None:
    """Damage is not retried."""
    shard = damaged(tmp_path, 1, **options)
    started = time.monotonic()
    ranges = [(first, 100) for first in range(0, 3000, 100)]
    found = list(read_ranges(shard, ranges, None, {}))
    assert time.monotonic() - started < 5
    lost = [i for i, item in enumerate(found) if isinstance(item, Unreadable)]
    assert lost
    assert set(lost) <= set(range(10, 20)), "other row groups"
    assert options is not PAGES or lost == list(range(min(lost), 20)) != list(range(10, 20)), "pages before the damage"
    for (first, rows), item in zip(ranges, found, strict=True):
        if isinstance(item, pa.Table):
            assert item["n"].to_pylist() == list(range(first, first + rows))
    other = list(read_ranges(shard, ranges, ["n"], {}))
    assert all(isinstance(item, pa.Table) for item in other), "a column that is not needed may be damaged"
    (item,) = read_ranges(shard, [(1900, 10)], None, {})
    assert isinstance(item, Unreadable)
    assert item.reason.startswith("cannot be read: ")


def test_a_file_whose_end_is_lost_gives_an_item_for_each_range(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": list(range(10))}), path := tmp_path / "s.parquet")
    (shard,), _ = find_shards([str(tmp_path)], {})
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "difference", lambda *_: None)  # as if it was planned like this
        found = list(read_ranges(shard, [(0, 5), (5, 5)], None, {}))
    assert len(found) == 2
    assert all(isinstance(item, Unreadable) and item.reason.startswith("cannot be read: ") for item in found)
    path.write_bytes(path.read_bytes()[:-50])
    assert all("has changed" in item.reason for item in read_ranges(shard, [(0, 5), (5, 5)], None, {}))  # type: ignore[union-attr]
