"""Measures the pipeline at scale without decoding: `python -m tests.tools.scale plan|resume|rows`.

Each prints one JSON line. plan: read the footers of 10,000 shards with 100 million rows. resume: plan these in chunks
of 64 rows, commit 1.6 million parts, report, and start again. rows: run 2 million rows with an engine that returns at
once.
"""

import json
import os
import pickle
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from exspec.actors.engine import Completion, EngineConfig, EngineStatistics, Request, SequenceStatistics
from exspec.pipeline.cluster.graph import read_together
from exspec.pipeline.input.plan import Chunk, Plan, Shard
from exspec.pipeline.input.shards import find_shards
from exspec.pipeline.output.owner import Output, take
from exspec.pipeline.output.parts import Task
from exspec.pipeline.output.report import Report
from exspec.pipeline.output.state import File, Summary
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute, finished
from exspec.pipeline.storage import Folder
from tests.pipeline import jobs


def plan(folder: Path) -> dict[str, Any]:
    """The shards are one file of 10,000 rows under many names."""
    table = pa.table({"prompt": ["w1"] * 10_000})
    pq.write_table(table, folder / "shard-00000.parquet")
    for i in range(1, 10_000):
        (folder / f"shard-{i:05}.parquet").hardlink_to(folder / "shard-00000.parquet")
    start, cpu = time.perf_counter(), time.process_time()
    shards, _ = find_shards([str(folder)], {})
    made = Plan(shards, 64)
    chunks = sum(1 for _ in made.chunks())
    seconds, cpu_seconds = round(time.perf_counter() - start, 1), round(time.process_time() - cpu, 1)
    return {"shards": len(shards), "rows": made.rows, "chunks": chunks, "seconds": seconds, "cpu_seconds": cpu_seconds}


def resume(folder: Path) -> dict[str, Any]:
    """From the plan to the report and the next run. The parts are staged here, not by actors."""
    shards = [Shard(f"{n:05}.parquet", f"file:///in/{n:05}.parquet", 10_000, 1, "") for n in range(10_000)]
    made, figures, clock = Plan(shards, 64), {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        figures[name] = round(time.perf_counter() - clock, 1)
        figures[f"{name}_mib"] = psutil.Process().memory_info().rss >> 20
        clock = time.perf_counter()

    out = Folder(str(folder / "out"))
    with take(Output(out), "run") as writer:
        writer.begin({"kind": "generate", "job": {}, "versions": {}, "shape": {}, "device": "cpu"}, made)
        lap("plan_seconds")
        passes = [pickle.dumps(tasks) for tasks in read_together(Task(c) for c in writer.state.missing())]
        figures["passes"], figures["passes_mb"] = len(passes), sum(map(len, passes)) // 10**6
        lap("descriptors_seconds")
        chunks = (task.chunk for tasks in passes for task in pickle.loads(tasks))
        for together in batched(chunks, 256):
            writer.commit([linked(out, writer.prefix, chunk) for chunk in together])
        lap("commit_seconds")
        report = Report(writer.state.description, made.rows)
        report.complete(writer.state, {})
        figures["rows"] = report.figures()["rows"]
        lap("report_seconds")
        writer.finish()
    again = Output(out).read()
    lap("log_seconds")
    assert finished(again, made)
    lap("nothing_to_do_seconds")
    return figures


def linked(folder: Folder, prefix: str, chunk: Chunk) -> File:
    """A staged part with a summary. All parts are links to a few files."""
    name = f"_staged/{prefix}-{chunk.number}-{chunk.first}"
    one = Path(folder.path) / "_staged" / f"one-{chunk.number // 300}"  # a file may have only so many links
    if not one.exists():
        one.parent.mkdir(exist_ok=True)
        one.write_bytes(b"rows")
    Path(f"{folder.path}/{name}").hardlink_to(one)
    now = time.time()
    drafted, lengths = [chunk.rows] * 5, {str(n): 1 for n in range(40)}
    summary = Summary(chunk.number, chunk.first, chunk.rows, 0, 64 * 20, 64 * 40, drafted, drafted, 64 * 8, 0, lengths,
                   f"actor-{chunk.number % 8}", {"device": "null", "torch": "2"}, now, now + 1, 1)  # fmt: skip
    return File("", name, 4, "0" * 32, 4, [summary])


def batched(items: Iterable[Chunk], size: int) -> Iterator[list[Chunk]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


class Instant:
    """An engine whose sequences finish when they are submitted."""

    busy = False
    config = EngineConfig()
    statistics = EngineStatistics()

    def __init__(self) -> None:
        self.done: list[Completion] = []

    def submit(self, request: Request) -> None:
        self.done.append(Completion(request.id, [1], "length", None, SequenceStatistics(1, 1, 1)))

    def step(self) -> None:
        pass

    def take(self) -> list[Completion]:
        done, self.done = self.done, []
        return done


def instant(_: int | None) -> tuple[Any, Any]:
    return Instant(), jobs.tokenizer()


def rows(folder: Path) -> dict[str, Any]:
    count = 2_000_000
    (folder / "in").mkdir()
    for i in range(20):
        keys = range(i * count // 20, (i + 1) * count // 20)
        pq.write_table(pa.table({"key": keys, "prompt": ["w1 w2 w3"] * len(keys)}), folder / "in" / f"s-{i:02}.parquet",
                       row_group_size=10_000)  # fmt: skip
    pair = jobs.save_pair(folder / "pair")
    settings: dict[str, Any] = {"rows_per_chunk": 5000, "max_new_tokens_column": None, "max_new_tokens": 4}
    job = jobs.job(pair, folder / "in", folder / "out", **settings)
    memory: dict[int, int] = {}  # MiB by the number of parts
    over = threading.Event()

    def watch() -> None:
        while not over.wait(2):
            parts = len(list((folder / "out").glob("part-*")))
            memory[parts] = psutil.Process().memory_info().rss // 2**20

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    code = execute(prepare(job), load=instant)
    seconds = time.perf_counter() - start
    over.set()
    watcher.join()
    chunks = count // settings["rows_per_chunk"]
    return {
        "rows": count,
        "exit_code": code,
        "seconds": round(seconds, 1),
        "microseconds_per_row": round(seconds / count * 1e6, 1),
        "driver_mib_by_share_done": {
            f"{share:.0%}": next(mib for parts, mib in sorted(memory.items()) if parts >= share * chunks - 8)
            for share in (0.25, 0.5, 0.75, 1)
        },
    }


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["PYTHONPATH"] = str(Path.cwd())
    with tempfile.TemporaryDirectory() as place:
        figures = {"plan": plan, "resume": resume, "rows": rows}[sys.argv[1]](Path(place))
    figures["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(figures))
