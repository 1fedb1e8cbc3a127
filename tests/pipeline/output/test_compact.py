"""Compaction: the same rows in fewer files. No row is ever there twice, and a kill at any point loses nothing."""

import json
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import s3fs

from exspec.actors.generator import Origin
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Plan, Shard
from exspec.pipeline.output import lease
from exspec.pipeline.output.compact import Compacted, _sources, compact, mend
from exspec.pipeline.output.contents import read_range, tables
from exspec.pipeline.output.owner import Output, read_output, take
from exspec.pipeline.output.parts import GENERATED, described, encode, summarize
from exspec.pipeline.output.reasons import Reasons
from exspec.pipeline.output.report import rebuild
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from exspec.pipeline.storage import Folder
from tests.jobs import calls
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process

ROWS, REFUSED = 60, 29
SMALL, LARGE = 12_000, 1 << 20  # the first makes several merged files out of nine parts, the second one
SCHEMA = 16_000  # bytes of a footer beside the summaries, at most


@pytest.fixture(scope="module")
def finished(pair: jobs.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job of nine parts, and its input. Tests copy it."""
    place = tmp_path_factory.mktemp("finished")
    with in_process():
        assert jobs.run(pair, place, ROWS, jobs.RefusingLoader(jobs.prompt(REFUSED))) == 0
    return place


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "job"))


def visible(out: Path | str) -> pa.Table:
    """The rows that a reader of the folder sees."""
    return pq.read_table(out)


def visible_ids(out: Path) -> list[str]:
    return list(visible(out)["id"].to_pylist()) if files(out) else []


def assert_unique(ids: list[str]) -> None:
    assert len(ids) == len(set(ids)), "a row occurs twice"


def files(out: Path) -> list[str]:
    return sorted(p.name for p in out.glob("part-*"))


SEEN = ["shard", "row", "id", "completion", "error", "accepted_by_position"]


def by_contents(folder: Folder) -> list[dict[str, Any]]:
    """The rows that exspec's own readers see, in the plan's order."""
    return [row for table in tables(read_output(folder), SEEN) for row in table.to_pylist()]


@pytest.mark.parametrize("target", [SMALL, LARGE])
def test_a_reader_finds_the_same_rows_in_the_same_order(place: Path, target: int) -> None:
    before, out = visible(place / "out"), place / "out"
    done = compact(Folder(str(out)), target)
    assert done.before == 9
    assert done.after == len(files(out)) < 9
    assert visible(out).equals(before)
    assert visible(out).schema.equals(before.schema, check_metadata=False)
    assert ds.dataset(out).schema.field("completion").metadata == {
        b"description": b"the text that the target wrote; null for an error row"
    }
    assert all(p.stat().st_size <= target + SCHEMA for p in out.glob("part-*"))
    assert (out / "_SUCCESS").exists()
    if target == LARGE:
        assert done == Compacted(9, 1, 1)
    assert compact(Folder(str(out)), target) == Compacted(done.after, done.after, 0)


def write_output(out: Path, chunks: int, text: int) -> None:
    """A finished output of parts of eight rows. text: incompressible characters per row."""
    shard = Shard("s.parquet", "file:///in/s.parquet", 8 * chunks, 1, "")
    folder = Folder(str(out))
    with take(Output(folder), "run") as writer:
        writer.begin(jobs.DESCRIBED, Plan([shard], 8))
        parts = []
        for chunk in writer.state.missing():
            rows = [
                {"shard": shard.name, "row": n, "id": str(n), "completion": random.Random(n).randbytes(text // 2).hex()}
                for n in range(chunk.first, chunk.first + chunk.rows)
            ]
            table = pa.Table.from_pylist(rows, schema=GENERATED)
            told = [summarize(chunk, table, Origin("a", "h", {}, 0, 0, 1), Reasons())]
            content = encode(table, str(writer.state.job), told)
            parts.append(described(content, folder.stage(content, writer.prefix), told))
        writer.commit(parts)
        writer.finish()


def test_files_come_close_to_the_target(tmp_path: Path) -> None:
    """Also if the output was compacted to smaller files before. Memory holds row groups, not files."""
    out = tmp_path / "out"
    write_output(out, chunks=100, text=8000)
    before = visible(out)
    for target in (300_000, 2_000_000):
        done = compact(Folder(str(out)), target)
        sizes = [(out / name).stat().st_size for name in files(out)]
        assert len(sizes) == done.after
        assert all(0.7 * target < size < target + SCHEMA for size in sizes[:-1])
        assert sizes[-1] < target + SCHEMA
        assert visible(out).equals(before)
        assert compact(Folder(str(out)), target).written == 0
        assert max(pq.read_metadata(out / name).row_group(0).num_rows for name in files(out)) < 800 / 8


@pytest.mark.parametrize("seed", range(6))
def test_a_second_compaction_has_nothing_to_do(tmp_path: Path, seed: int) -> None:
    """For any sizes of parts and target."""
    draw = random.Random(seed)
    out = tmp_path / "out"
    write_output(out, chunks=draw.randrange(2, 40), text=draw.choice([10, 500, 3000]))
    target = draw.choice([4_000, 10_000, 40_000, 200_000])
    before = visible(out)
    compact(Folder(str(out)), target)
    assert compact(Folder(str(out)), target).written == 0
    assert visible(out).equals(before)


def test_a_target_too_small_for_two_files_changes_nothing(place: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (place / "out").glob("part-*")}
    assert compact(Folder(str(place / "out")), 1000) == Compacted(9, 9, 0)
    assert {p: p.stat().st_mtime_ns for p in (place / "out").glob("part-*")} == before


def test_the_last_file_grows_with_the_output(pair: jobs.Pair, place: Path, capsys: Any) -> None:
    """New shards add their chunks, and no other chunk runs again. After compaction the rows are in one file."""
    out = place / "out"
    compact(Folder(str(out)), LARGE)
    assert jobs.run(pair, place) == 0
    assert "nothing to do: all 60 rows" in capsys.readouterr().out
    (merged,) = out.glob("part-*")
    then = merged.stat().st_mtime_ns
    table = pq.read_table(place / "in" / "shard-0.parquet")
    pq.write_table(table.set_column(0, "key", pa.array(range(100, 120))), place / "in" / "shard-9.parquet")
    assert jobs.run(pair, place) == 0
    assert merged.stat().st_mtime_ns == then
    assert len(files(out)) == 1 + 3
    before = visible(out)
    assert compact(Folder(str(out)), LARGE) == Compacted(4, 1, 1)
    assert visible(out).equals(before)
    assert visible(out).num_rows == 80
    assert jobs.run(pair, place) == 0
    assert "nothing to do: all 80 rows" in capsys.readouterr().out


def test_the_report_stays_the_same(place: Path) -> None:
    folder = Folder(str(place / "out"))
    before = rebuild(read_output(folder)).figures()
    compact(folder, SMALL)
    assert rebuild(read_output(folder)).figures() == before


def test_an_error_row_in_a_merged_file_is_decoded_again(pair: jobs.Pair, place: Path) -> None:
    """Other rows stay as they are, and all rows stay in one file."""
    out = place / "out"
    compact(Folder(str(out)), LARGE)
    before = visible(out).to_pylist()
    assert [r["id"] for r in before if r["error"]] == [str(REFUSED)]
    assert jobs.run(pair, place, retry_errors=True) == 0
    after = visible(out).to_pylist()
    assert len(files(out)) == 1
    assert [r for r in after if r["id"] != str(REFUSED)] == [r for r in before if r["id"] != str(REFUSED)]
    assert [r["id"] for r in after] == [r["id"] for r in before]
    (mended,) = [r for r in after if r["id"] == str(REFUSED)]
    assert mended["error"] is None
    assert mended["completion"] == jobs.expected(REFUSED)
    assert json.loads((out / "_report.json").read_text())["errors"] == 0
    assert compact(Folder(str(out)), LARGE) == Compacted(1, 1, 0)


class Killed(BaseException):
    """The process is gone."""


class Reaper:
    """Allows `left` storage operations. All later ones raise Killed."""

    def __init__(self, left: int) -> None:
        self.left, self.lock = left, threading.Lock()

    def step(self) -> None:
        with self.lock:
            if self.left == 0:
                raise Killed
            self.left -= 1

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*values: Any, **named: Any) -> Any:
            self.step()
            return method(*values, **named)

        return wrapped


def killed_after(operations: int, folder: Folder, action: Callable[[Folder], Any]) -> bool:
    """Run the action and kill it after this many changes of the store. Returns whether it was killed."""
    reaper = Reaper(operations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease.Lease, "_beat", lambda _: None)
        if folder.local:
            for name in ("replace", "hardlink_to"):
                patch.setattr(Path, name, reaper.wrap(getattr(Path, name)))
            patch.setattr(type(folder.fs), "rm_file", reaper.wrap(type(folder.fs).rm_file))
        else:
            for name in ("rm_file", "cp_file", "put_file", "pipe_file"):
                patch.setattr(folder.fs, name, reaper.wrap(getattr(folder.fs, name)))
        try:
            action(folder)
        except Killed:
            return True
    return False


@pytest.fixture(autouse=True)
def _the_killed_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The killed process is this one, which is alive."""
    monkeypatch.setattr(lease, "dead", lambda *_: True)


def test_a_reader_that_stops_leaves_no_threads(finished: Path, tmp_path: Path) -> None:
    """A suspended generator with threads could deadlock when the garbage collector closes it."""
    here = Path(shutil.copytree(finished, tmp_path / "here"))
    before = set(threading.enumerate())
    half = tables(read_output(Folder(str(here / "out"))), SEEN)
    assert next(half).num_rows > 0
    assert set(threading.enumerate()) <= before
    with take(read_output(Folder(str(here / "out"))), "compact") as writer:
        before = set(threading.enumerate())  # including the heartbeat
        sources = _sources(writer, writer.state.names(), LARGE)
        assert next(sources).table is not None
        assert set(threading.enumerate()) <= before


def test_killed_after_any_operation_nothing_is_lost(pair: jobs.Pair, finished: Path, tmp_path: Path) -> None:
    """At every point, no row is visible twice, and exspec reads all rows. Compaction or a run repairs the output."""
    before = visible(finished / "out")
    rows = by_contents(Folder(str(finished / "out")))
    seen = 0
    for operations in range(1000):
        here = Path(shutil.copytree(finished, tmp_path / f"{operations}"))
        folder = Folder(str(here / "out"))
        if not killed_after(operations, folder, lambda f: compact(f, SMALL)):
            break
        found = visible(here / "out") if files(here / "out") else before.slice(0, 0)
        assert_unique(found["id"].to_pylist())
        seen = max(seen, ROWS - found.num_rows)
        assert by_contents(folder) == rows
        assert rebuild(read_output(folder)).figures()["rows"] == ROWS
        if operations % 4 == 0:
            other = Path(shutil.copytree(here, tmp_path / f"{operations}-run"))
            assert jobs.run(pair, other) == 0
            assert visible(other / "out").equals(before)
            assert (other / "out" / "_SUCCESS").exists()
        compact(folder, SMALL)
        assert visible(here / "out").equals(before)
        assert (here / "out" / "_SUCCESS").exists()
        assert not list((here / "out" / "_staged").glob("*-*"))
    else:
        pytest.fail("it never ended")
    assert operations > 15
    assert 0 < seen < ROWS, "some rows are invisible while a file is moved"


def test_killed_while_an_error_is_mended(finished: Path, tmp_path: Path) -> None:
    """A retry of errors is killed after every operation, and run again."""
    merged = Path(shutil.copytree(finished, tmp_path / "merged"))
    compact(Folder(str(merged / "out")), LARGE)
    before = by_contents(Folder(str(merged / "out")))

    def mended(folder: Folder) -> None:
        with take(Output(folder), "retry") as writer:
            (name,) = writer.state.names()
            (found,) = writer.state.chunks("mendable")
            table = pa.concat_tables(read_range(folder, name, found[2], found[0].rows))
            good = pa.array([None] * len(table), pa.string())
            table = table.set_column(table.schema.get_field_index("error"), table.schema.field("error"), good)
            told = [summarize(found[0], table, Origin("a", "h", {}, 0, 0, 1), Reasons())]
            content = encode(table, str(writer.state.job), told)
            mend(writer, name, [described(content, folder.stage(content, writer.prefix), told)])

    for operations in range(100):
        here = Path(shutil.copytree(merged, tmp_path / f"{operations}"))
        folder = Folder(str(here / "out"))
        if not killed_after(operations, folder, mended):
            break
        assert_unique(visible_ids(here / "out"))
        rows = by_contents(folder)
        assert [r["id"] for r in rows] == [r["id"] for r in before]
        if any(r["error"] for r in rows):
            mended(folder)
        with take(Output(folder), "run") as writer:
            writer.sweep()
        assert not any(visible(here / "out")["error"].to_pylist())
        assert len(visible_ids(here / "out")) == ROWS
        assert not list((here / "out" / "_staged").glob("*-*"))
    else:
        pytest.fail("it never ended")
    assert operations > 5


def test_a_part_mended_after_the_kill_wins(pair: jobs.Pair, place: Path) -> None:
    """The staged file of a killed compaction must not replace a part that was mended since."""
    folder = Folder(str(place / "out"))
    killed_after(3, folder, lambda f: compact(f, LARGE))
    assert jobs.run(pair, place, retry_errors=True) == 0
    compact(folder, LARGE)
    assert not any(visible(place / "out")["error"].to_pylist())


def test_a_file_that_was_replaced_and_comes_back_is_removed(pair: jobs.Pair, place: Path) -> None:
    """As after restoring a folder from a backup: the log says that the rows are in another file."""
    out = place / "out"
    late = files(out)[4]
    content = (out / late).read_bytes()
    compact(Folder(str(out)), LARGE)
    (out / late).write_bytes(content)
    (out / "_SUCCESS").unlink()
    assert jobs.run(pair, place) == 0
    assert_unique(visible_ids(out))
    assert not (out / late).exists()


def test_foreign_files_are_named_and_left_alone(pair: jobs.Pair, place: Path) -> None:
    (place / "out" / "mine.parquet").write_bytes(b"")
    with pytest.raises(JobError, match=r"out: has mine.parquet, which this job did not write"):
        jobs.run(pair, place)
    assert (place / "out" / "mine.parquet").exists()


def test_an_unfinished_output_is_refused(place: Path) -> None:
    next((place / "out").glob("part-*")).unlink()
    with pytest.raises(JobError, match=r"out: \d of 60 rows are missing; expected a finished output"):
        compact(Folder(str(place / "out")), LARGE)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "gone"])
def test_a_damaged_file_is_decoded_again(pair: jobs.Pair, place: Path, capsys: Any, damage: str) -> None:
    """A run notices the size and repairs it, even if the job is marked as done."""
    out = place / "out"
    compact(Folder(str(out)), LARGE)
    before = visible(out)
    (merged,) = out.glob("part-*")
    content = merged.read_bytes()
    damaged = {"cut": content[: len(content) // 2], "empty": b"", "text": b"this is no Parquet"}
    if damage == "gone":
        merged.unlink()
    else:
        merged.write_bytes(damaged[damage])
        with pytest.raises(JobError, match=rf"{merged.name}: .*run the job again") as error:
            list(tables(read_output(Folder(str(out))), None))
        assert "\n" not in str(error.value)
    assert jobs.run(pair, place) == 0
    assert f"{ROWS} rows to decode again: the files that held them are gone or damaged" in capsys.readouterr().out
    assert visible(out)["id"].equals(before["id"])
    assert not merged.exists()


def test_flipped_bytes_are_named_and_nothing_is_removed(place: Path) -> None:
    part = sorted((place / "out").glob("part-*"))[4]
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 255
    part.write_bytes(content)
    with pytest.raises(JobError, match=rf"{part.name}: is damaged; remove it and run the job again"):
        compact(Folder(str(place / "out")), LARGE)
    assert len(files(place / "out")) == 9


def test_an_audit_reads_merged_files(pair: jobs.Pair, tmp_path: Path) -> None:
    jobs.write_shards(tmp_path / "in", rows=40)
    assert execute(prepare(jobs.job(pair, tmp_path / "in", tmp_path / "out"))) == 0
    assert "1 file instead of 6" in calls.succeed("compact", tmp_path / "out", "--target-size", "1MiB")
    assert "nothing to do" in calls.succeed("compact", tmp_path / "out", "--target-size", "1MiB")
    calls.succeed("audit", tmp_path / "out", "--share", "1")
    assert json.loads((tmp_path / "out" / "_audit.json").read_text())["comparisons"][0]["equal"] == 40


@pytest.mark.parametrize(("text", "bytes_"), [("256MiB", 256 << 20), ("1GB", 10**9), ("4096", 4096)])
def test_a_size_has_a_unit(place: Path, monkeypatch: pytest.MonkeyPatch, text: str, bytes_: int) -> None:
    given = []
    monkeypatch.setattr(
        "exspec.jobs.commands.compact.merge", lambda _, target, __: given.append(target) or Compacted(1, 1, 0)
    )
    calls.succeed("compact", place / "out", "--target-size", text)
    assert given == [bytes_]


@pytest.mark.parametrize("text", ["large", "-1", "0", "10 apples"])
def test_an_invalid_size_is_refused(text: str) -> None:
    result = calls.call("compact", "out", "--target-size", text)
    assert result.exit_code == 2
    assert "expected bytes with a unit, such as 256MiB" in result.stderr


@pytest.mark.slow
def test_killed_after_any_operation_on_object_storage(finished: Path, moto: dict[str, Any]) -> None:
    """Object storage has no rename, so a kill can come between copy and removal."""
    fs = s3fs.S3FileSystem(**moto, skip_instance_cache=True)
    fs.mkdir("compact")
    before = visible(finished / "out")

    def read(folder: Folder) -> pa.Table:
        fs.invalidate_cache()
        found = sorted(n for n in folder.names() if n.startswith("part-"))
        tables = [pq.read_table(pa.BufferReader(folder.read(n))) for n in found]
        return pa.concat_tables(tables).replace_schema_metadata() if tables else before.slice(0, 0)

    for operations in range(200):
        folder = Folder(f"s3://compact/{operations}", moto)
        for path in (p for p in (finished / "out").rglob("*") if p.is_file()):
            folder.write(path.relative_to(finished / "out").as_posix(), path.read_bytes())
        if not killed_after(operations, folder, lambda f: compact(f, SMALL)):
            break
        assert_unique(read(folder)["id"].to_pylist())
        assert len(by_contents(folder)) == ROWS
        compact(folder, SMALL)
        assert read(folder).equals(before.replace_schema_metadata())
        assert folder.exists("_SUCCESS")
        assert not folder.names("_staged")
    else:
        pytest.fail("it never ended")
    assert operations > 15
