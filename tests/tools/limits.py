"""Measures a job with many actors, without decoding: `python -m tests.tools.limits driver|ledger|actors`.

Each prints one JSON line. driver: 1,000 actors finish a chunk every 20 s, and the driver commits the chunks to an S3
server. ledger: these actors call the ledger's own process. actors: 64 real actors finish as many chunks under Ray Data.
"""

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
import pyarrow as pa
import ray
from aiobotocore.client import AioBaseClient

from exspec.actors.engine import EngineConfig, EngineStatistics
from exspec.actors.generator import HEARTBEAT
from exspec.pipeline.cluster import graph
from exspec.pipeline.cluster.ray_ledger import RayLedger
from exspec.pipeline.input.passes import dispatch
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
REAL = 64  # actors with a process each


def paced(every: float) -> Iterator[float]:
    """Yields every so many seconds, SECONDS long: how many seconds late it is."""
    began = time.monotonic()
    for turn in range(round(SECONDS / every)):
        due = began + turn * every
        time.sleep(max(0.0, due - time.monotonic()))
        yield time.monotonic() - due


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
            report, lags = Report(writer.state.description, plan.rows), list[float]()

            def arriving() -> Iterator[dict[str, Any]]:
                for result, late in zip(results, paced(EACH / ACTORS), strict=True):
                    lags.append(late)
                    yield pickle.loads(result)

            began, cpu = time.monotonic(), time.process_time()
            with counted_requests() as requests:
                collect(SimpleNamespace(max_error_share=None), arriving(), report, Collector(writer, Counter()))  # type: ignore[arg-type]
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

    def run(self) -> list[float]:
        """Seconds that the ledger took to answer."""
        beating = threading.Thread(target=self._beat)
        beating.start()
        took = list[float]()
        for turn, _ in enumerate(paced(EACH / len(self.actors))):
            start = time.monotonic()
            self.ledger.begun(f"{self.actors[0]}-{turn}")
            self.ledger.begin(f"{self.actors[0]}-{turn}")
            took.append(time.monotonic() - start)
            self.ledger.end(f"{self.actors[0]}-{turn}")
        beating.join()
        return took

    def _beat(self) -> None:
        for turn, _ in enumerate(paced(HEARTBEAT)):
            for actor in self.actors:
                self.ledger.sign(actor, f"host-{actor[-1]}", turn)


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


class Reading:
    """Reads nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, descriptors: pa.Table) -> Iterator[pa.Table]:
        for task in pickle.loads(descriptors["tasks"][0].as_py()):
            yield pa.table({"task": [pickle.dumps(task)], "rows": [b"r" * PART], "unreadable": [None]})


class Decoding:
    """Sleeps `load` seconds over each chunk."""

    def __init__(self, load: float, *_: Any) -> None:
        self.seconds = load

    def __call__(self, _: pa.Table) -> pa.Table:
        time.sleep(self.seconds)
        return pa.table({"result": [pickle.dumps(os.getpid())]})


def actors(_: Path) -> dict[str, Any]:
    """The graph of a job, whose readers and actors import no models: so many processes fit into one machine."""
    ray.init(
        address="local", num_cpus=REAL + 1, include_dashboard=False, object_store_memory=2**30, log_to_driver=False
    )
    rate, config = ACTORS / EACH, EngineConfig()
    count = round(2 * SECONDS * rate)
    plan = Plan([Shard(str(n), "", ROWS * count // 4, 1, "") for n in range(4)], ROWS)
    job: Any = SimpleNamespace(
        actor_range=(REAL, REAL), chunks_in_flight=1, draws=SimpleNamespace(count=1), num_gpus=0, sampling={},
        attempts=1, answers=None,
    )  # fmt: skip
    pool = (REAL, REAL)
    work = dispatch(map(Task, plan.chunks()), ROWS, pool, config.batch_size, config.slots, 1, job.chunks_in_flight)
    nothing: Any = None
    with patch.multiple(graph, Reader=Reading, Generator=Decoding, RayMeter=lambda: None):
        found = graph.results(
            job, config, ROWS, nothing, map(Task, plan.chunks()), nothing, nothing, work.calls * REAL / rate, nothing
        )
        marks, made = [], Counter[int]()
        for done, actor in enumerate(found):
            made[actor] += 1
            if done in (count // 4, 3 * count // 4):
                marks.append((time.monotonic(), cpu_seconds()))
    (begun, before), (ended, after) = marks
    ray.shutdown()
    return {
        "actors": len(made),
        "chunks": made.total(),
        "fewest_of_an_actor": min(made.values()),
        "most_of_an_actor": max(made.values()),
        "wanted_per_second": rate,
        "chunks_per_second": round(count / 2 / (ended - begun), 1),
        "cpu_ms_per_chunk": {name: round(2000 * (after[name] - before[name]) / count, 2) for name in after},
    }


def cpu_seconds() -> dict[str, float]:
    """Of the driver, the parts of Ray, and all other processes together."""
    found = {"driver": sum(psutil.Process().cpu_times()[:2]), "gcs_server": 0.0, "raylet": 0.0, "others": 0.0}
    for child in psutil.Process().children(recursive=True):
        name = next((name for name in ("gcs_server", "raylet") if child.name() == name), "others")
        found[name] += sum(child.cpu_times()[:2])
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"driver": driver, "ledger": ledger, "actors": actors}[sys.argv[1]](Path(folder))))
