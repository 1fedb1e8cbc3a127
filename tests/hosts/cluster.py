"""A Ray cluster on hosts, started with the commands of the page `jobs/docs/cluster.md`, a store, and a user's host."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.hosts.network import PLACE, Host, Network, until
from tests.hosts.store import Store
from tests.pipeline import jobs
from tests.pipeline.s3 import connected, moto, new_bucket

WORKERS = ("w1", "w2", "w3")
CPUS = "2"  # of a host; the machine may have more
MEMORY = str(100 * 2**20)  # of a host's object store
STARTED = 120  # seconds until all nodes are there
ENDED = 900  # seconds that a job may take
# One sequence at a time and no compiled code: slow, so that a fault has the time to meet a job that decodes.
SHAPE: dict[str, Any] = {
    "id_column": "key", "max_new_tokens_column": "budget", "rows_per_chunk": 8, "method": "plain", "batch_size": 1,
    "window": 1, "bucket": 64, "actors": "4", "attempts": 20,
}  # fmt: skip


class Cluster:
    """The hosts: `head` and `workers` run Ray, `user` submits jobs. They reach the store through `store`."""

    def __init__(self, folder: Path, options: dict[str, Any], bucket: str) -> None:
        self.folder, self.options, self.bucket = folder, options, bucket
        self.network = Network(folder, ["head", *WORKERS, "user", "s3"])
        hosts = self.network.hosts
        self.head, self.user, self.s3 = hosts["head"], hosts["user"], hosts["s3"]
        self.workers = [hosts[name] for name in WORKERS]
        self.store = Store(self.s3, options["endpoint_url"], {h.address: h.name for h in hosts.values()})
        for host in hosts.values():
            self._equip(host)
        self.head.run("ray", "get-auth-token", "--generate")
        token = (self.head.disk / "home/.ray/auth_token").read_text()
        for host in hosts.values():
            (host.disk / "home/.ray").mkdir(parents=True, exist_ok=True)
            (host.disk / "home/.ray/auth_token").write_text(token)
        for host in (self.head, *self.workers):
            self.start(host)
        self.wait_for(1 + len(WORKERS))

    def _equip(self, host: Host) -> None:
        (host.disk / "home").mkdir(exist_ok=True)
        (host.disk / "tmp").mkdir(exist_ok=True)
        host.variables = {
            "HOME": f"{PLACE}/home", "TMPDIR": f"{PLACE}/tmp", "RAY_TMPDIR": PLACE, "RAY_AUTH_MODE": "token",
            "RAY_grpc_keepalive_timeout_ms": "600000",
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin", "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_OFFLINE": "1", "AWS_ENDPOINT_URL": self.store.endpoint, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.options["key"], "AWS_SECRET_ACCESS_KEY": self.options["secret"],
            "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip

    def start(self, host: Host, **variables: str) -> None:
        """Start Ray on a host."""
        role = "--head --port 6379 --dashboard-host 0.0.0.0" if host is self.head else "--address head:6379"
        command = f"ray start {role} --num-cpus {CPUS} --object-store-memory {MEMORY}"
        host.run(*command.split(), timeout=STARTED, **variables)

    def restart(self, host: Host, size: str = "", **variables: str) -> None:
        """Start a worker anew. size: of its disk."""
        self.network.reboot(host, size)
        self.start(host, **variables)

    def alive(self) -> list[str]:
        """The names of the hosts whose nodes Ray believes to be alive."""
        program = (
            "import ray; ray.init(address='auto', log_to_driver=False, logging_level='error');"
            "print(*(n['NodeManagerHostname'] for n in ray.nodes() if n['Alive']))"
        )
        return self.head.run("python", "-c", program).splitlines()[-1].split()

    def wait_for(self, nodes: int) -> None:
        until(lambda: len(self.alive()) == nodes, STARTED, f"{nodes} nodes")

    def heal(self) -> None:
        """Bring all nodes back after a fault, as an operator does: hosts whose node is gone are started anew."""
        alive = set(self.alive())
        for worker in self.workers:
            if worker.name not in alive or not worker.processes("raylet/raylet"):
                self.restart(worker)
        self.wait_for(1 + len(WORKERS))

    def put(self, folder: Path, place: str) -> str:
        """Copy a folder to the store, past the faults; returns its URL."""
        fs = connected(self.options)
        for path in filter(Path.is_file, sorted(folder.rglob("*"))):
            fs.put_file(str(path), f"{self.bucket}/{place}/{path.relative_to(folder)}")
        return f"s3://{self.bucket}/{place}"

    def rows(self, output: str) -> list[dict[str, Any]]:
        """The rows of an output, sorted, without what depends on time and neighbours."""
        fs, rows = connected(self.options), []
        for name in fs.glob(f"{self.bucket}/{output}/part-*"):
            with fs.open(name) as file:
                rows += pq.read_table(file).to_pylist()
        kept = [{n: v for n, v in row.items() if n != "rounds" and "seconds" not in n} for row in rows]
        return sorted(kept, key=lambda row: (row["shard"], row["row"]))

    def report(self, output: str) -> dict[str, Any]:
        """The report of an output."""
        return json.loads(connected(self.options).cat_file(f"{self.bucket}/{output}/_report.json"))  # type: ignore[no-any-return]

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder of the bucket."""
        fs = connected(self.options)
        try:
            return sorted(path.rsplit("/", 1)[-1] for path in fs.ls(f"{self.bucket}/{folder}", refresh=True))
        except FileNotFoundError:
            return []

    def job(self, output: str, **settings: Any) -> "Job":
        return Job(self, output, settings)

    def close(self) -> None:
        self.store.close()
        self.network.close()


class Job:
    """A job over the bucket's rows. since: number of the store's requests before it began."""

    def __init__(self, cluster: Cluster, output: str, settings: dict[str, Any]) -> None:
        self.cluster, self.output, self.settings = cluster, output, settings
        self.since = len(cluster.store.requests)
        place = f"s3://{cluster.bucket}"
        made = {"input": [f"{place}/in"], "target": f"{place}/target", "output": f"{place}/{output}"}
        self.file = cluster.user.disk / f"{output}.json"
        self.file.write_text(json.dumps(made | SHAPE | settings))

    def submit(self) -> "Job":
        """Submit it from the user's host, and follow it."""
        command = ("exspec", "submit", "--address", "http://head:8265", "run", "--job")
        return self._begin(self.cluster.user, *command, self.inside)

    def run(self, host: Host) -> "Job":
        """Run it on a host of the cluster: the driver is there."""
        copy = host.disk / self.file.name
        copy.write_text(self.file.read_text())
        return self._begin(host, "exspec", "run", "--job", self.inside, "--ray-address", "head:6379")

    @property
    def inside(self) -> str:
        return f"{PLACE}/{self.file.name}"

    def _begin(self, host: Host, *words: str) -> "Job":
        self.log = self.cluster.folder / f"{self.output}-{host.name}.log"
        with self.log.open("wb") as log:
            self.process = host.start(log, *words)
        return self

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, request: str, count: int = 1) -> None:
        """Wait until so many of this job's requests have reached the store. OUT: its output."""
        pattern, end = request.replace("OUT", f"/{self.cluster.bucket}/{self.output}"), time.monotonic() + ENDED
        while not self.cluster.store.wait(pattern, self.since, count, 1):
            assert self.process.poll() is None, f"the job ended before {request}: {self.text[-3000:]}"
            assert time.monotonic() < end, f"{request}: {self.text[-3000:]}"

    def end(self) -> int:
        """Wait until it has ended; returns its exit code."""
        return self.process.wait(ENDED)


@contextmanager
def cluster(folder: Path, options: dict[str, Any] | None = None, rows: int = 1200) -> Iterator[Cluster]:
    """A cluster with rows and the tiny pair in its bucket. options: of an S3 server; default: moto's is started."""
    with nullcontext(options) if options else moto() as used:
        made = Cluster(folder / "hosts", used, new_bucket(used, folder))
        try:
            jobs.save_pair(folder / "pair")
            jobs.write_shards(folder / "in", rows)
            made.put(folder / "pair/target", "target")
            made.put(folder / "in", "in")
            yield made
        finally:
            made.close()
