"""Tables are read at one version, without removed files and deleted rows. A resumed run reads the same version."""

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Chunk, Plan, encode_schema
from exspec.pipeline.input.shards import Since, find_shards
from tests.pipeline.input.chunks import read_chunk


def planned(*urls: Any, before: Plan | None = None, since: Since | None = None) -> Plan:
    shards, schema = find_shards([str(url) for url in urls], {}, before, since)
    plan = Plan(shards, 100, None, encode_schema(schema))
    return before.extended(shards, since.settled if since else frozenset()) if before else plan


def read(plan: Plan) -> list[dict[str, Any]]:
    return [row for shard in plan.shards for row in read_chunk(Chunk(shard, 0, 0, shard.rows), {}).to_pylist()]


def numbers(plan: Plan) -> list[int]:
    return sorted(row["n"] for row in read(plan))


class TestDelta:
    @pytest.fixture
    def table(self, tmp_path: Path) -> Path:
        """Five files, one of which is removed."""
        deltalake = pytest.importorskip("deltalake")
        for i in range(5):
            deltalake.write_deltalake(tmp_path / "t", pa.table({"n": [2 * i, 2 * i + 1]}), mode="append")
        deltalake.DeltaTable(tmp_path / "t").delete("n = 3")
        return tmp_path / "t"

    def test_removed_files_are_not_read(self, table: Path) -> None:
        plan = planned(table)
        assert numbers(plan) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
        assert {shard.version for shard in plan.shards} == {f"file://{table}@5"}
        assert numbers(planned(table.parent)) == numbers(plan), "nor in a folder that contains the table"
        assert [s.name for s in planned(table.parent).shards] == [f"t/{s.name}" for s in plan.shards]

    def test_a_resumed_run_reads_the_planned_version(self, table: Path) -> None:
        import deltalake

        plan = Plan.from_json(planned(table).to_json())
        deltalake.write_deltalake(table, pa.table({"n": [10]}), mode="append")
        deltalake.DeltaTable(table).optimize.compact()
        assert planned(table, before=plan).shards == plan.shards
        assert planned(table.parent / "t", before=plan).shards == plan.shards

    def test_since_reads_appended_files_and_refuses_rewritten_ones(self, table: Path) -> None:
        import deltalake

        plan = planned(table)
        since = Since(plan, {shard.name for shard in plan.shards}, None)
        deltalake.write_deltalake(table, pa.table({"n": [10]}), mode="append")
        more = planned(table, before=plan, since=since)
        assert numbers(more) == [*numbers(plan), 10]
        deltalake.DeltaTable(table).optimize.compact()
        with pytest.raises(JobError, match="is no longer a file of its table, whose new files may contain its rows"):
            planned(table, before=plan, since=since)

    def test_a_log_is_read_from_its_last_checkpoint(self, table: Path) -> None:
        import deltalake

        deltalake.DeltaTable(table).create_checkpoint()
        deltalake.write_deltalake(table, pa.table({"n": [10]}), mode="append")
        for old in range(5):
            (table / "_delta_log" / f"{old:020d}.json").write_text("not read")
        assert numbers(planned(table)) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]

    def test_partition_columns_are_read_from_the_log(self, tmp_path: Path) -> None:
        deltalake = pytest.importorskip("deltalake")
        rows = [
            {"n": 1, "day": date(2026, 1, 31), "kind": "a b%/ü", "size": 7},
            {"n": 2, "day": None, "kind": None, "size": None},
        ]
        schema = pa.schema({"n": pa.int64(), "day": pa.date32(), "kind": pa.string(), "size": pa.int32()})
        deltalake.write_deltalake(
            tmp_path / "t", pa.Table.from_pylist(rows, schema), partition_by=["day", "kind", "size"]
        )
        plan = Plan.from_json(planned(tmp_path / "t").to_json())
        assert sorted(read(plan), key=lambda row: row["n"]) == rows
        (shard, _), found = find_shards([str(tmp_path / "t")], {})
        assert found.equals(schema)
        assert read_chunk(Chunk(shard, 0, 0, 1), {}, ["kind", "n"], found).column_names == ["kind", "n"]
        assert read_chunk(Chunk(shard, 0, 0, 1), {}, ["kind"], found).num_rows == 1

    def test_rows_deleted_by_vectors_are_refused(self, table: Path) -> None:
        log = table / "_delta_log"
        features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
        protocol = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}
        (log / f"{6:020d}.json").write_text(json.dumps(protocol))
        assert len(numbers(planned(table))) == 9, "vectors are allowed, but there are none"
        first = (log / f"{0:020d}.json").read_text().splitlines()
        add = next(json.loads(line) for line in first if '"add"' in line)
        vector = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4, "sizeInBytes": 40}
        add["add"]["deletionVector"] = {**vector, "cardinality": 1}
        (log / f"{7:020d}.json").write_text(json.dumps(add))
        with pytest.raises(JobError, match="has deletion vectors, which are not supported"):
            planned(table)

    def test_columns_that_the_files_lack_are_refused(self, table: Path) -> None:
        import deltalake

        rows = pa.table({"n": [10], "x": ["new"]})
        deltalake.write_deltalake(table, rows, mode="append", schema_mode="merge")
        with pytest.raises(JobError, match=r"\.parquet: column 'x' is in the table, but not the file"):
            planned(table)

    def test_a_pattern_of_its_files_is_refused(self, table: Path) -> None:
        for pattern in (table / "*.parquet", table.parent / "*" / "part-*.parquet"):
            with pytest.raises(JobError, match=f"matches files of the table file://{table}; give the table's folder"):
                planned(pattern)

    def test_a_log_that_cannot_be_read_is_named(self, table: Path) -> None:
        for file in (table / "_delta_log").iterdir():
            file.write_text("{")
        with pytest.raises(JobError, match=f"input file://{table}: cannot be read as a Delta table: "):
            planned(table)


class TestIceberg:
    @pytest.fixture
    def table(self, tmp_path: Path) -> Any:
        """Three files, one of which is removed."""
        pytest.importorskip("pyiceberg")
        memory = pytest.importorskip("pyiceberg.catalog.memory")
        catalog = memory.InMemoryCatalog("test", warehouse=f"file://{tmp_path}")
        catalog.create_namespace("n")
        table = catalog.create_table("n.t", pa.schema({"n": pa.int64(), "text": pa.string()}))
        for i in range(3):
            table.append(pa.table({"n": [i], "text": [f"t{i}"]}))
        table.delete("n = 1")
        return table

    def test_removed_files_are_not_read(self, table: Any) -> None:
        folder = table.location()
        plan = planned(folder)
        assert sorted(read(plan), key=lambda row: row["n"]) == [{"n": 0, "text": "t0"}, {"n": 2, "text": "t2"}]
        assert {s.version for s in plan.shards} == {f"{folder}@{table.metadata.current_snapshot_id}"}
        assert [s.name.partition("/")[0] for s in plan.shards] == ["data", "data"]
        assert numbers(planned(table.metadata_location)) == [0, 2]

    def test_a_resumed_run_reads_the_planned_snapshot(self, table: Any) -> None:
        plan = planned(table.location())
        table.append(pa.table({"n": [9], "text": ["t9"]}))
        assert planned(table.location(), before=plan).shards == plan.shards
        settled = {shard.name for shard in plan.shards}
        assert numbers(planned(table.location(), before=plan, since=Since(plan, settled, None))) == [0, 2, 9]

    def test_columns_that_were_renamed_are_refused(self, table: Any) -> None:
        with table.update_schema() as update:
            update.rename_column("text", "old")
        with table.update_schema() as update:
            update.add_column("text", table.schema().find_type("old"))
        with pytest.raises(JobError, match="column 'old' is in the table, but not the file"):
            planned(table.location())
        with table.update_schema() as update:
            update.delete_column("old")
        with pytest.raises(JobError, match="column 'text' is a different column in the table, after a rename"):
            planned(table.location())

    def test_rows_deleted_by_files_are_refused(self, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from pyiceberg.table import FileScanTask

        monkeypatch.setattr(FileScanTask, "delete_files", {"a file of deletes"}, raising=False)
        monkeypatch.setattr(FileScanTask, "__init__", lambda self, file, **_: vars(self).update(file=file))
        with pytest.raises(JobError, match="has delete files, which are not supported"):
            planned(table.location())

    def test_two_newest_metadata_files_are_refused(self, table: Any) -> None:
        newest = Path(table.metadata_location.removeprefix("file://"))
        other = newest.with_name(newest.name[:6] + "other.metadata.json")
        other.write_bytes(newest.read_bytes())
        with pytest.raises(JobError, match="only its catalog knows which is current; give that file as input"):
            planned(table.location())
        assert numbers(planned(newest)) == [0, 2]


@pytest.mark.parametrize(
    ("log", "library", "extra"),
    [
        ("_delta_log/00000000000000000000.json", "deltalake", "delta"),
        ("metadata/v1.metadata.json", "pyiceberg", "iceberg"),
    ],
)
def test_without_the_library_a_table_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, library: str, extra: str
) -> None:
    """Else removed files would be read too."""
    pq.write_table(pa.table({"n": [1]}), tmp_path / "removed.parquet")
    (tmp_path / log).parent.mkdir()
    (tmp_path / log).write_text("{}")
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, f"{library}.table", None)
    with pytest.raises(JobError, match=rf"{library} is not installed to tell which; install exspec\[{extra}\]"):
        planned(tmp_path)
    assert numbers(planned(tmp_path / "removed.parquet")) == [1], "a file that is given by name is read"
