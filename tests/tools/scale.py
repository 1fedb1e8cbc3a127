"""Measures the pipeline at scale without decoding: `python -m tests.tools.scale plan|resume`.

Each prints one JSON line. plan: read the footers of 10,000 shards with 100 million rows. resume: plan these in chunks
of 64 rows, commit 1.6 million parts, report, and start again.
"""

import json
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from exspec.pipeline.input.passes import read_together
from exspec.pipeline.input.plan import Chunk, Plan, Shard, Task
from exspec.pipeline.input.shards import find_shards
from exspec.pipeline.output.owner import Output, take
from exspec.pipeline.output.report import Report
from exspec.pipeline.output.state import File, Summary
from exspec.pipeline.run import finished
from exspec.pipeline.storage import Folder


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
        writer.begin({"kind": "generate", "job": {}, "fingerprint": {}, "shape": {}, "device": "cpu"}, made)
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
    one = Path(folder.path).parent / f"one-{chunk.number // 300}"  # a file may have only so many links
    if not one.exists():
        (Path(folder.path) / "_staged").mkdir(exist_ok=True)
        one.write_bytes(b"rows")
    Path(f"{folder.path}/{name}").hardlink_to(one)
    return File("", name, 4, "0" * 32, 4, [summary(chunk, 8)])


def summary(chunk: Chunk, actors: int) -> Summary:
    """Of a chunk that one of so many actors has decoded."""
    now = time.time()
    drafted, lengths = [chunk.rows] * 5, {str(n): 1 for n in range(40)}
    actor = f"actor-{(chunk.number + chunk.first) % actors}"
    return Summary(chunk.number, chunk.first, chunk.rows, 0, 64 * 20, 64 * 40, drafted, drafted, 64 * 8, 0, lengths,
                   actor, {"device": "null", "torch": "2"}, now, now + 1, 1)  # fmt: skip


def batched(items: Iterable[Chunk], size: int) -> Iterator[list[Chunk]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        figures = {"plan": plan, "resume": resume}[sys.argv[1]](Path(place))
    figures["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(figures))
