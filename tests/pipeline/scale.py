"""What the pipeline itself costs at scale, with nothing decoded: `python -m tests.pipeline.scale plan|list|rows`.

Each prints one JSON line. plan: footers of 10,000 shards with 100 million rows. list: 200,000 finished parts.
rows: a job of 2 million rows with an engine that returns at once.
"""

import json
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from exspec.actors.engine import Completion, EngineConfig, EngineStatistics, Request, SequenceStatistics
from exspec.pipeline.plan import Plan, Shard
from exspec.pipeline.run import execute, prepare
from exspec.pipeline.shards import find_shards
from exspec.pipeline.storage import Folder
from tests.pipeline import jobs


def plan(folder: Path) -> dict[str, Any]:
    """The footers are real, of files of 10,000 equal rows, which are one file under many names."""
    table = pa.table({"prompt": ["w1"] * 10_000})
    pq.write_table(table, folder / "shard-00000.parquet")
    for i in range(1, 10_000):
        (folder / f"shard-{i:05}.parquet").hardlink_to(folder / "shard-00000.parquet")
    start, cpu = time.perf_counter(), time.process_time()
    shards, _ = find_shards([str(folder)], {})
    made = Plan(shards, 1000)
    chunks = sum(1 for _ in made.chunks())
    seconds, cpu_seconds = round(time.perf_counter() - start, 1), round(time.process_time() - cpu, 1)
    return {"shards": len(shards), "rows": made.rows, "chunks": chunks, "seconds": seconds, "cpu_seconds": cpu_seconds}


def list_(folder: Path) -> dict[str, Any]:
    shard = Shard("shard.parquet", "shard.parquet", 200_000_000, 1, "")
    made = Plan([shard], 1000)
    for chunk in made.chunks():
        (folder / chunk.part).touch()
    start = time.perf_counter()
    names = Folder(str(folder)).names()
    missing = [chunk for chunk in made.chunks() if chunk.part not in names]
    return {"parts": len(names), "missing": len(missing), "seconds": round(time.perf_counter() - start, 1)}


class Instant:
    """An engine whose sequences are done when they are submitted."""

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
    memory: dict[int, int] = {}  # MiB by parts that are there
    over = threading.Event()

    def watch() -> None:
        while not over.wait(2):
            parts = len(list((folder / "out").glob("part-*")))
            memory[parts] = psutil.Process().memory_info().rss // 2**20

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    code = execute(prepare(job), load=instant, quiet=True)
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
        figures = {"plan": plan, "list": list_, "rows": rows}[sys.argv[1]](Path(place))
    figures["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(figures))
