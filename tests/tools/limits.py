"""Measures a job with many actors, without decoding: `python -m tests.tools.limits driver|ledger|cluster`.

Each prints one JSON line. driver: 1,000 actors finish a chunk every 20 s, and the driver commits the chunks to an S3
server. ledger: these actors call the ledger's own process. cluster: 64 real actors, whose steps take no time, finish
chunks as fast as Ray Data hands them out.
"""

import asyncio
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import ray
from aiobotocore.client import AioBaseClient

from exspec.actors.engine import EngineStatistics
from exspec.actors.generator import HEARTBEAT
from exspec.pipeline.cluster.ray_ledger import RayLedger
from exspec.pipeline.input.plan import Chunk, Plan, Shard, Task
from exspec.pipeline.output.collect import Collector, collect
from exspec.pipeline.output.owner import Output, Writer, take
from exspec.pipeline.output.report import Report
from exspec.pipeline.output.state import File
from exspec.pipeline.storage import Folder
from tests.pipeline import jobs
from tests.pipeline.s3 import connected
from tests.tools.scale import summary

ACTORS, EACH = 1000, 20.0  # actors, and seconds in which each finishes a chunk
SECONDS = 60
ROWS = 64  # of a chunk
PART = 64 * 1024  # bytes of a part
CROWD = 8  # processes that play the actors
REAL, CHUNKS = 64, 3000


def driver(place: Path) -> dict[str, Any]:
    """The actors' part is done before: their files are staged."""
    count = int(ACTORS / EACH * SECONDS)
    plan = Plan(
        [Shard(f"{n:05}.parquet", f"file:///in/{n:05}.parquet", 10_000, 1, "") for n in range(count // 100)], ROWS
    )
    with s3_server(place) as options:
        connected(options).mkdir("limits")
        out = Folder("s3://limits/out", options)
        with take(Output(out), "run") as writer:
            writer.begin(jobs.DESCRIBED, plan)
            with ThreadPoolExecutor(16) as pool:
                results = list(pool.map(lambda chunk: finished(writer, chunk), list(plan.chunks())[:count]))
            report, lags, began, cpu = (
                Report(writer.state.description, plan.rows),
                [0.0],
                time.monotonic(),
                time.process_time(),
            )

            def paced() -> Iterator[dict[str, Any]]:
                for i, result in enumerate(results):
                    due = began + i * EACH / ACTORS
                    time.sleep(max(0.0, due - time.monotonic()))
                    lags.append(time.monotonic() - due)
                    yield pickle.loads(result)

            with counted_requests() as requests:
                collect(SimpleNamespace(max_error_share=None), paced(), report, Collector(writer, Counter()))  # type: ignore[arg-type]
            seconds, cpu = time.monotonic() - began, time.process_time() - cpu
            entries = writer.log.length
    return {
        "chunks": count,
        "seconds": round(seconds, 1),
        "late_seconds": round(max(lags), 1),
        "cpu_ms_per_chunk": round(1000 * cpu / count, 2),
        "log_entries": entries,
        "requests_per_second": {name: round(n / seconds, 1) for name, n in sorted(requests.items())},
    }


def finished(writer: Writer, chunk: Chunk) -> bytes:
    """What an actor returns for a chunk whose file it has staged."""
    staged, made = writer.folder.stage(os.urandom(PART), writer.prefix), summary(chunk, ACTORS)
    file = File("", staged, PART, "0" * 32, PART, [made])
    described = vars(file) | {"chunks": [vars(made)]}
    result = {
        "set_aside": "",
        "task": Task(chunk),
        "file": described,
        "engine": EngineStatistics(),
        "actor": made.actor,
    }
    return pickle.dumps(result)


@contextmanager
def s3_server(place: Path) -> Iterator[dict[str, Any]]:
    """The options of a server in its own process."""
    code = (
        "import time; from moto.server import ThreadedMotoServer as S; s = S(verbose=False, port=0); s.start(); "
        "print(*s.get_host_and_port(), sep=':', flush=True); time.sleep(3600)"
    )
    with (place / "server.log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        yield {"endpoint_url": f"http://{server.stdout.readline().strip()}", "key": "k", "secret": "s"}
    finally:
        server.kill()


@contextmanager
def counted_requests() -> Iterator[Counter[str]]:
    """Requests to S3, by operation and the folder below the output."""
    found, call = Counter[str](), AioBaseClient._make_api_call

    async def counted(self: Any, operation: str, arguments: dict[str, Any]) -> Any:
        key = str(arguments.get("Key") or arguments.get("Prefix") or "").removeprefix("out").strip("/")
        found[f"{operation} {key.split('/')[0] if '/' in key else 'parts'}"] += 1
        return await call(self, operation, arguments)

    with patch.object(AioBaseClient, "_make_api_call", counted):
        yield found


class Crowd:
    """Plays some of the actors."""

    def __init__(self, ledger: RayLedger, number: int) -> None:
        self.ledger, self.actors = ledger, [f"{number}-{i}" for i in range(ACTORS // CROWD)]

    async def run(self) -> list[float]:
        """Seconds that the ledger took to answer."""
        end, took = time.monotonic() + SECONDS, list[float]()
        await asyncio.gather(*(asyncio.to_thread(self._beat, end), asyncio.to_thread(self._begin, end, took)))
        return took

    def _beat(self, end: float) -> None:
        turn = 0
        while (due := end - SECONDS + turn * HEARTBEAT) < end:
            time.sleep(max(0.0, due - time.monotonic()))
            for actor in self.actors:
                self.ledger.sign(actor, f"host-{actor[-1]}", turn)
            turn += 1

    def _begin(self, end: float, took: list[float]) -> None:
        every, turn = EACH / len(self.actors), 0
        while (due := end - SECONDS + turn * every) < end:
            time.sleep(max(0.0, due - time.monotonic()))
            start = time.monotonic()
            self.ledger.begun(f"{self.actors[0]}-{turn}")
            self.ledger.begin(f"{self.actors[0]}-{turn}")
            took.append(time.monotonic() - start)
            turn += 1


def ledger(_: Path) -> dict[str, Any]:
    ray.init(address="local", num_cpus=CROWD, include_dashboard=False, log_to_driver=False)
    shared = RayLedger()
    process = psutil.Process(ray.get(shared._actor.__ray_call__.remote(lambda _: os.getpid())))
    make: Any = ray.remote(num_cpus=1)(Crowd)
    crowd = [make.remote(shared, number) for number in range(CROWD)]
    ray.get([one.__ray_ready__.remote() for one in crowd])
    before = sum(process.cpu_times()[:2])
    running = [one.run.remote() for one in crowd]
    time.sleep(SECONDS / 2)
    start = time.monotonic()
    signs = shared.signs()
    shown = time.monotonic() - start
    took = [seconds for one in ray.get(running) for seconds in one]
    cpu = sum(process.cpu_times()[:2]) - before
    ray.shutdown()
    return {
        "actors": signs.actors,
        "begun": len(took),
        "median_ms": round(1000 * quantiles(took, n=100)[49], 1),
        "p99_ms": round(1000 * quantiles(took, n=100)[98], 1),
        "signs_ms": round(1000 * shown, 1),
        "cpu_share": round(cpu / SECONDS, 3),
    }


def cluster(place: Path) -> dict[str, Any]:
    ray.init(address="local", num_cpus=REAL, include_dashboard=False, object_store_memory=2**29, log_to_driver=False)
    pair = jobs.save_pair(place / "pair")
    jobs.write_shards(place / "in", 8 * CHUNKS, 10)
    me = psutil.Process()
    shares: dict[str, list[float]] = {"driver": [], "gcs_server": [], "raylet": [], "ray::Ledger": []}
    over = threading.Event()

    def watch() -> None:
        """CPU seconds of the processes that a job has only once, at the moments when 10 % and 90 % are done."""
        for share in (0.1, 0.9):
            while len(list((place / "out").glob("part-*"))) < share * CHUNKS and not over.wait(0.2):
                continue
            shares["driver"].append(sum(me.cpu_times()[:2]))
            for child in me.children(recursive=True):
                name = next((n for n in shares if n in " ".join(child.cmdline()[:1])), None)
                if name:
                    shares[name].append(sum(child.cpu_times()[:2]))
            moments.append(time.monotonic())

    moments = list[float]()
    thread = threading.Thread(target=watch)
    thread.start()
    began = time.monotonic()
    assert jobs.run(pair, place, load=jobs.ArithmeticLoader(), actors=str(REAL)) == 0
    seconds = time.monotonic() - began
    over.set()
    thread.join()
    ray.shutdown()
    between, chunks = moments[1] - moments[0], 0.8 * CHUNKS
    used = {
        name: round(1000 * (values[-1] - values[0]) / chunks, 2) for name, values in shares.items() if len(values) == 2
    }
    return {
        "actors": REAL,
        "seconds": round(seconds, 1),
        "chunks_per_second": round(chunks / between, 1),
        "cpu_ms_per_chunk": used,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"driver": driver, "ledger": ledger, "cluster": cluster}[sys.argv[1]](Path(folder))))
