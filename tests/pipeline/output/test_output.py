"""The output: unique names, one owner at a time, and only files of the job."""

import json
import os
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from exspec.actors.engine import EngineStatistics
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Chunk, Plan, Shard, Task
from exspec.pipeline.output import lease
from exspec.pipeline.output.collect import Collector
from exspec.pipeline.output.compact import compact
from exspec.pipeline.output.owner import BusyError, Output, take
from exspec.pipeline.output.state import File, State, Summary
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from exspec.pipeline.storage import Folder
from tests.pipeline import jobs


def summary(chunk: Chunk, errors: int = 0) -> Summary:
    return Summary(chunk.number, chunk.first, chunk.rows, errors, 0, 0, [], [], 0, 0, {}, "a", {}, 0.0, 1.0, 1)


def staged(writer: Any, *chunks: Chunk) -> File:
    """A staged file of some chunks. Its content does not matter here."""
    name = writer.folder.stage(b"rows", writer.prefix)
    return File("", name, 4, "", 4, [summary(chunk) for chunk in chunks])


def test_shards_of_one_base_name_in_many_folders(pair: jobs.Pair, tmp_path: Path) -> None:
    """Names of parts must not collide, even if digests of the folders' paths begin with the same eight hex digits."""
    jobs.write_shards(tmp_path / "all", rows=8, shards=2)
    for shard, customer in enumerate((47060, 52539)):
        folder = tmp_path / "in" / f"customer={customer}"
        folder.mkdir(parents=True)
        (tmp_path / "all" / f"shard-{shard}.parquet").rename(folder / "part-0.parquet")
    assert jobs.run(pair, tmp_path) == 0
    jobs.assert_complete(tmp_path / "out", 8)
    assert ds.dataset(tmp_path / "out", format="parquet").count_rows() == 8


def test_a_name_of_200_characters_and_one_with_a_colon(pair: jobs.Pair, tmp_path: Path) -> None:
    jobs.write_shards(tmp_path / "in", rows=20, shards=2)
    (tmp_path / "in" / "shard-0.parquet").rename(tmp_path / "in" / f"{'x' * 200}.parquet")
    (tmp_path / "in" / "shard-1.parquet").rename(tmp_path / "in" / "a: b.parquet")
    assert jobs.run(pair, tmp_path) == 0
    jobs.assert_complete(tmp_path / "out", 20)


def test_two_drivers_with_other_settings_prepared_at_once(pair: jobs.Pair, tmp_path: Path) -> None:
    """The second finds that the first has begun another job."""
    jobs.write_shards(tmp_path / "in", rows=20)
    one, two = (prepare(jobs.job(pair, tmp_path / "in", tmp_path / "out", max_new_tokens=n)) for n in (50, 60))
    assert execute(one, load=jobs.ArithmeticLoader()) == 0
    with pytest.raises(JobError, match="max_new_tokens was 50 and is 60"):
        execute(two, load=jobs.ArithmeticLoader())
    jobs.assert_complete(tmp_path / "out", 20)
    assert json.loads((tmp_path / "out" / "_job.json").read_text())["job"]["max_new_tokens"] == 50


@pytest.mark.slow
def test_a_second_run_prints_the_owner_and_exits(pair: jobs.Pair, tmp_path: Path) -> None:
    """Run, retry, restart and compact while a run of another process owns the output, which is not disturbed."""
    driver = jobs.started(pair, tmp_path, parts=1)
    refusal = rf"output .*out: in use by run on .* \(process {driver.pid}\) since .*; nothing was changed"
    for options in ({}, {"restart": True}, {"retry_errors": True}):
        with pytest.raises(BusyError, match=refusal):
            jobs.run(pair, tmp_path, **options)
    with pytest.raises(BusyError, match=refusal):
        compact(Folder(str(tmp_path / "out")), 1 << 20)
    assert jobs.run(pair, tmp_path, wait=True) == 0
    assert driver.wait(timeout=60) == 0
    jobs.assert_complete(tmp_path / "out", 120)
    report = json.loads((tmp_path / "out" / "_report.json").read_text())
    assert len(report["rows_by_actor"]) == 1, "nothing was decoded twice"


@pytest.mark.slow
def test_a_driver_that_was_stopped_wakes_up_after_another_finished(
    pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its next commit it finds that it lost the output, and exits with 1."""
    driver = jobs.started(pair, tmp_path, parts=2)
    os.kill(driver.pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(lease, "dead", lambda *_: True)
        assert jobs.run(pair, tmp_path) == 0
    finally:
        os.kill(driver.pid, signal.SIGCONT)
    jobs.assert_complete(tmp_path / "out", 120)
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").glob("part-*")}
    assert driver.wait(timeout=240) == 1
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").glob("part-*")} == before
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_a_refused_run_leaves_the_marker(pair: jobs.Pair, tmp_path: Path) -> None:
    assert jobs.run(pair, tmp_path, rows=20) == 0
    table = pq.read_table(tmp_path / "in" / "shard-0.parquet")
    pq.write_table(table, tmp_path / "in" / "shard-9.parquet")
    for settings in ({"max_new_tokens": 7}, {"device": "cuda"}):
        with pytest.raises(JobError):
            jobs.run(pair, tmp_path, **settings)
        assert (tmp_path / "out" / "_SUCCESS").exists()


def test_a_limit_may_grow_and_not_shrink(pair: jobs.Pair, tmp_path: Path) -> None:
    """Even if it cuts a chunk in two. Finished rows stay."""
    assert jobs.run(pair, tmp_path, rows=60, limit=13) == 0
    with pytest.raises(JobError, match=r"limit: is 10, but 13 rows are done in .*; raise it"):
        jobs.run(pair, tmp_path, limit=10)
    for limit in (31, None):
        assert jobs.run(pair, tmp_path, limit=limit) == 0
        assert set(jobs.read_output(tmp_path / "out")) == {str(n) for n in range(limit or 60)}
    jobs.assert_complete(tmp_path / "out", 60)


def test_binary_ids_are_hexadecimal(pair: jobs.Pair, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    table = pa.table({"uid": [b"\x01\xff", None], "prompt": ["w1", "w2"], "budget": [2, 2]})
    pq.write_table(table, tmp_path / "in" / "s.parquet")
    assert jobs.run(pair, tmp_path, id_column="uid") == 0
    assert set(jobs.read_output(tmp_path / "out")) == {"01ff", "s.parquet:1"}


@pytest.mark.slow
def test_what_an_actor_staged_for_a_driver_that_died_is_kept(pair: jobs.Pair, tmp_path: Path) -> None:
    """The next run commits a complete staged part and does not decode it again; it removes half a part."""
    assert jobs.run(pair, tmp_path, rows=20, limit=5) == 0
    (whole,) = (tmp_path / "out").glob("part-*")
    content = whole.read_bytes()
    whole.unlink()
    (tmp_path / "out" / "_staged" / "0000000001-late").write_bytes(content)
    (tmp_path / "out" / "_staged" / "0000000001-torn").write_bytes(content[:-100])
    assert jobs.run(pair, tmp_path) == 0
    jobs.assert_complete(tmp_path / "out", 20)
    kept = [p for p in (tmp_path / "out").glob("part-*") if p.read_bytes() == content]
    assert len(kept) == 1
    assert not list((tmp_path / "out" / "_staged").glob("*-*"))


def plan(rows: int = 20) -> Plan:
    return Plan([Shard("s.parquet", "file:///in/s.parquet", rows, 1, "")], 8)


def test_the_next_owner_removes_the_heartbeat_of_a_killed_one(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "out"))

    def signs() -> list[str]:
        return [name for name in folder.names("_log") if name.startswith("alive-")]

    with ExitStack() as killed:
        for _ in range(3):
            killed.enter_context(take(Output(folder), "run", dead=lambda *_: True))
            assert len(signs()) == 1, "its own"
        with take(Output(folder), "run", dead=lambda *_: True):
            assert len(signs()) == 1, "its own"
        assert signs() == []


def test_rows_are_never_committed_twice(tmp_path: Path) -> None:
    with take(Output(Folder(str(tmp_path / "out"))), "run") as writer:
        writer.begin(jobs.DESCRIBED, plan())
        first, second, third = writer.state.missing()
        writer.commit([staged(writer, first)])
        overlapping = Chunk(first.shard, 0, 7, 2)
        across = Chunk(first.shard, 0, 15, 2)
        for new in ([first], [second, first], [overlapping], [second, second], [across, second], [second, across]):
            with pytest.raises(JobError, match="already has rows of _staged/"):
                writer.commit([staged(writer, chunk) for chunk in new])
        assert len(writer.folder.names()) == 1
        assert list(writer.state.missing()) == [second, third]


def test_staged_parts_that_share_rows_are_not_adopted_both(tmp_path: Path) -> None:
    """Earlier owners may have cut the rows differently, after a limit or a lost file."""
    with take(Output(Folder(str(tmp_path / "out"))), "run") as writer:
        writer.begin(jobs.DESCRIBED, plan())
        _, second, third = writer.state.missing()
        files = [staged(writer, chunk) for chunk in (second, Chunk(second.shard, 0, 15, 2), third)]
    with take(Output(Folder(str(tmp_path / "out"))), "run") as writer:
        job, found = str(writer.state.job), {file.staged: file for file in files}
        writer.adopt(lambda _, name: (job, found[name]))
        ranges = [(first, rows) for _, first, rows in writer.state.held()]
        assert ranges in ([(8, 8), (16, 4)], [(15, 2)]), "by the order of the random names"
        writer.sweep()
        assert not writer.folder.names("_staged")


def test_an_owner_elsewhere_is_dead_without_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another node, only the heartbeat counts."""
    monkeypatch.setattr(lease, "PATIENCE", 1.5)
    monkeypatch.setattr(lease, "BEAT", 0.2)
    folder = Folder(str(tmp_path / "out"))
    with take(Output(folder), "run"):
        monkeypatch.setattr(lease, "_machine", lambda: "elsewhere")
        with pytest.raises(BusyError), take(Output(folder), "compact"):
            pytest.fail("the owner lives")
        monkeypatch.setattr(lease.Lease, "_sign", lambda *_: None)
        start = time.monotonic()
        with take(Output(folder), "compact"):
            assert time.monotonic() - start < 3
    (tmp_path / "out" / "_log" / "alive-old").write_bytes(b"7")
    os.utime(tmp_path / "out" / "_log" / "alive-old", (0, 0))
    assert lease.dead(folder, {"machine": "another", "lease": "old"}), "an old heartbeat needs no waiting"


def test_a_million_chunks_fit_a_small_memory() -> None:
    """Finished chunks are in a table on disk, and missing chunks are generated one by one."""
    state = State()
    made = Plan([Shard(f"{n}", f"file:///{n}", 64 * 1000, 1, "") for n in range(1000)], 64)
    state.plan, state.job = made, "j"
    before = psutil.Process().memory_info().rss
    for shard in range(0, 1000, 100):
        chunks = [Chunk(made.shards[shard], shard, first, 64) for first in range(0, 64_000, 128)]
        new = [
            vars(File(f"part-{shard:07d}-{c.first:012d}-64-000001.parquet", f"_staged/{c.first:010d}-a", 1, "", 1, []))
            | {"chunks": [vars(summary(c))]}
            for c in chunks
        ]
        state.apply({"kind": "swap", "new": new, "old": []})
    assert sum(1 for _ in state.missing()) == 1_000_000 - 5000
    assert psutil.Process().memory_info().rss - before < 64 << 20


class Kept:
    """A writer that records commits."""

    def __init__(self) -> None:
        self.files: list[File] = []

    def commit(self, files: list[File]) -> None:
        self.files += files


def result(first: int, actor: str, prefill: int, found: int, set_aside: str = "") -> dict[str, Any]:
    chunk = Chunk(plan().shards[0], 0, first, 8)
    engine = EngineStatistics(prefill_tokens=prefill, cached_tokens=found)
    file = vars(File("", f"staged-{first}", 1, "", 1, [])) | {"chunks": [vars(summary(chunk))]}
    return {"task": Task(chunk), "actor": actor, "engine": engine, "set_aside": set_aside, "file": file}


def test_the_prefill_counts_of_chunks_sum_to_what_the_engines_did() -> None:
    """With two actors, a chunk that is set aside, and a result that overtakes an earlier one."""
    writer = Kept()
    collector = Collector(writer, Counter())  # type: ignore[arg-type]
    for received in (
        result(0, "a", 100, 0),
        result(8, "b", 70, 30),
        result(24, "a", 180, 120, set_aside="why"),
        result(32, "a", 260, 240),
        result(16, "a", 200, 150),
    ):
        collector.add(received)
    collector.flush()
    counts = {s.first: (s.prefill_tokens, s.found_tokens) for file in writer.files for s in file.chunks}
    assert counts == {0: (100, 0), 8: (70, 30), 32: (160, 240), 16: (0, 0)}
