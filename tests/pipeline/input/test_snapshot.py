"""The input is a snapshot: a changed shard is noticed, and the same bytes written again are not a change."""

import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exspec.pipeline.errors import JobError
from exspec.pipeline.input import reading, snapshot
from exspec.pipeline.input.plan import Plan
from exspec.pipeline.input.reading import Unreadable, read_ranges
from exspec.pipeline.input.shards import Since, find_shards
from exspec.pipeline.input.snapshot import changed
from exspec.pipeline.storage import etag


def write(path: Path, first: int) -> None:
    pq.write_table(pa.table({"n": pa.array(range(first, first + 20))}), path, row_group_size=5, compression="none")


@pytest.fixture
def shard_file(tmp_path: Path) -> Path:
    write(tmp_path / "s.parquet", 1000)
    return tmp_path / "s.parquet"


def planned(path: Path) -> Plan:
    shards, _ = find_shards([str(path.parent)], {})
    return Plan(shards, 8)


def test_the_same_bytes_written_again_are_not_a_change(shard_file: Path) -> None:
    """Nor is another modification time."""
    plan = planned(shard_file)
    os.utime(shard_file, (1, 1))
    content = shard_file.read_bytes()
    again, _ = find_shards([str(shard_file.parent)], {}, plan)
    assert plan.extended(again).shards == again
    shard_file.unlink()
    shard_file.write_bytes(content)
    assert changed(plan.shards, {}) == {}
    assert [t.num_rows for t in read_ranges(plan.shards[0], [(0, 3)], None, {}) if isinstance(t, pa.Table)] == [3]


def test_other_bytes_of_the_same_size_are_a_change(shard_file: Path) -> None:
    plan, size = planned(shard_file), shard_file.stat().st_size
    write(shard_file, 5000)
    assert shard_file.stat().st_size == size
    again, _ = find_shards([str(shard_file.parent)], {}, plan)
    with pytest.raises(JobError, match=rf"planned shard has changed \(20 rows and {size} bytes, but other content\)"):
        plan.extended(again)
    assert changed(plan.shards, {}) == {
        "s.parquet": f"has changed since it was planned ({size} bytes, but other content)"
    }
    late, _ = find_shards([str(shard_file.parent)], {}, plan, Since(plan, {"s.parquet"}, None))
    assert late == again, "a settled shard with other bytes is not skipped"


def test_a_resumed_run_does_not_read_files_with_the_same_stamp(
    shard_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(shard_file)

    def refuse(path: str, stamp: str) -> str:
        raise AssertionError(f"{path} with the stamp {stamp} is read again")

    monkeypatch.setattr(snapshot, "_digest", refuse)
    assert find_shards([str(shard_file.parent)], {}, Plan.from_json(plan.to_json()))[0] == plan.shards
    assert changed(plan.shards, {}) == {}


def test_no_rows_of_a_changed_shard_are_read(shard_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is rewritten between two ranges, with the same number of rows and bytes."""
    monkeypatch.setattr(reading, "AT_ONCE", 0)  # else all row groups are fetched together
    (shard,) = planned(shard_file).shards
    found = read_ranges(shard, [(0, 5), (5, 5), (10, 10)], None, {})
    first = next(found)
    assert isinstance(first, pa.Table)
    assert first["n"].to_pylist() == list(range(1000, 1005))
    write(shard_file, 5000)
    rest = list(found)
    assert len(rest) == 2
    assert all(isinstance(r, Unreadable) and "has changed since it was planned" in r.reason for r in rest)


def test_rows_fetched_while_a_shard_is_rewritten_are_dropped(shard_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = planned(shard_file).shards
    fetch = reading.Bytes._fetch

    def slow(self: Any, begin: int, end: int) -> bytes:
        content = fetch(self, begin, end)
        write(shard_file, 5000)
        return content

    monkeypatch.setattr(reading.Bytes, "_fetch", slow)
    (item,) = read_ranges(shard, [(0, 5)], None, {})
    assert isinstance(item, Unreadable)


def test_a_missing_shard_is_reported_at_once(shard_file: Path) -> None:
    (shard,) = planned(shard_file).shards
    shard_file.unlink()
    assert list(read_ranges(shard, [(0, 5), (5, 5)], None, {})) == [Unreadable("has vanished since it was planned")] * 2
    assert changed([shard], {}) == {"s.parquet": "has vanished since it was planned"}


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"md5Hash": "m", "crc32c": "c", "etag": "e", "mtime": 1}, "m"),  # Google
        ({"crc32c": "c", "etag": "e"}, "c"),  # Google, of a composed object
        ({"content_settings": {"content_md5": bytearray(b"\x01\xff")}, "etag": "e"}, "01ff"),  # Azure
        ({"content_settings": {"content_md5": None}, "etag": "e"}, "e"),
        ({"ETag": '"e"', "LastModified": 1}, "e"),  # S3
        ({"mtime": 1}, "1"),
        ({}, ""),
    ],
)
def test_digests_of_the_content_come_first(info: dict[str, Any], expected: str) -> None:
    assert etag(info) == expected


def test_without_a_digest_the_time_counts() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/snapshot/s.parquet", b"")
    with memory.open("/snapshot/s.parquet", "wb") as file:
        pq.write_table(pa.table({"n": [1]}), file)
    content = memory.cat_file("/snapshot/s.parquet")
    shards, _ = find_shards(["memory://snapshot"], {})
    assert changed(shards, {}) == {}
    memory.pipe_file("/snapshot/s.parquet", content)
    assert "has changed since it was planned" in changed(shards, {})["s.parquet"]
