"""A folder that grows every night: each row once, even if shards of earlier nights are gone."""

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from exspec.pipeline.errors import JobError
from tests.pipeline import jobs


@pytest.mark.slow
def test_each_row_once_though_old_shards_go_and_late_ones_look_old(pair: jobs.Pair, tmp_path: Path) -> None:
    jobs.write_shards(tmp_path / "all", rows=60, shards=4)
    arrive = [tmp_path / "all" / f"shard-{i}.parquet" for i in range(4)]
    shown = tmp_path / "in"
    shown.mkdir()
    for path in arrive[:2]:
        path.rename(shown / path.name)
    assert jobs.run(pair, tmp_path, since="last") == 0
    (shown / "shard-0.parquet").unlink()  # archived
    late = arrive[2].rename(shown / arrive[2].name)
    os.utime(late, (0, 0))  # written long ago, arrived now
    assert jobs.run(pair, tmp_path, since="last") == 0
    with pytest.raises(JobError, match=r"shard-0\.parquet: planned shard has vanished"):
        jobs.run(pair, tmp_path)
    for path in shown.iterdir():
        path.unlink()
    assert jobs.run(pair, tmp_path, since="last") == 0, "no new shard"
    arrive[3].rename(shown / arrive[3].name)
    assert jobs.run(pair, tmp_path, since="last") == 0
    jobs.assert_complete(tmp_path / "out", 60)


@pytest.mark.slow
def test_a_changed_or_unfinished_shard_is_not_skipped(pair: jobs.Pair, tmp_path: Path) -> None:
    assert jobs.run(pair, tmp_path, rows=60, since="last") == 0
    lost = sorted((tmp_path / "out").glob("part-0000001-*"))[0]
    lost.unlink()
    assert jobs.run(pair, tmp_path, since="last") == 0
    jobs.assert_complete(tmp_path / "out", 60)
    grown = tmp_path / "in" / "shard-1.parquet"
    table = pq.read_table(grown)
    pq.write_table(table.slice(0, 15), grown)
    with pytest.raises(JobError, match=r"shard-1.parquet: planned shard has changed \(20 rows"):
        jobs.run(pair, tmp_path, since="last")


def test_a_date_skips_older_shards(pair: jobs.Pair, tmp_path: Path) -> None:
    jobs.write_shards(tmp_path / "in", rows=60)
    for old in ("shard-1", "shard-2"):
        os.utime(tmp_path / "in" / f"{old}.parquet", (0, 0))
    assert jobs.run(pair, tmp_path, since="2001-01-01") == 0
    assert set(jobs.read_output(tmp_path / "out")) == {str(n) for n in range(20)}
    with pytest.raises(JobError, match=r"no Parquet, JSONL, CSV or Arrow files in .* are newer than the date in since"):
        jobs.run(pair, tmp_path / "other", rows=9, since="2999-01-01")


def test_a_new_shard_must_have_the_columns_of_the_first_run(pair: jobs.Pair, tmp_path: Path) -> None:
    jobs.write_shards(tmp_path / "in", rows=20, shards=1)
    assert jobs.run(pair, tmp_path, since="last") == 0
    table = pq.read_table(tmp_path / "in" / "shard-0.parquet")
    pq.write_table(table.drop_columns(["budget"]), tmp_path / "in" / "shard-9.parquet")
    with pytest.raises(JobError, match=r"shard-9\.parquet: has no column 'budget', which the first run's input has"):
        jobs.run(pair, tmp_path, since="last")
