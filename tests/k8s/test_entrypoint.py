"""The RayJob's command on a Ray cluster of imitated pods, with an S3 server. The head dies, and a retry finishes the
job. The pods have the manifest's job file, variables, users and file systems."""

import io
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pyarrow.parquet as pq
import pytest
import s3fs

from exspec.jobs.demo.shards import write_shards
from tests.k8s import pod
from tests.k8s.manifests import (
    ROOT,
    Manifest,
    combine,
    containers,
    environment,
    job_file,
    needs_renderer,
    one,
    overlay,
    pod_templates,
)
from tests.pipeline.s3 import moto

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

ROWS = 720  # enough that the head can die between the first and the last commit, even on a fast machine
ROWS_PER_CHUNK = 16  # of the overlay's job; towards the end of a job, chunks have fewer
TOKEN = "a-token-of-this-test-and-no-other"
HEAD, WORKER = "127.0.0.2", "127.0.0.3"  # Ray replaces 127.0.0.1 by the address of the host
PATIENCE = 240  # seconds without a new part, on a loaded machine

needs_pods = pytest.mark.skipif(pod.obstacle() is not None, reason=str(pod.obstacle()))
KEYS = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret"}


PLACES = ("/", "/usr", str(ROOT), os.__file__, "/etc/exspec", "/tmp", "/models", "/home/exspec", "/dev/shm")
PROBE = f"""
import json, os
read_only = [p for p in {PLACES} if os.path.exists(p) and os.statvfs(p).f_flag & os.ST_RDONLY]
processes = sum(name.isdigit() for name in os.listdir("/proc"))
print(json.dumps(dict(user=os.getuid(), group=os.getgid(), processes=processes, read_only=read_only)))
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with moto() as options:
        yield options["endpoint_url"]


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path) -> s3fs.S3FileSystem:
    """The store, with messages at the input of the job file."""
    fs = s3fs.S3FileSystem(
        endpoint_url=endpoint, key="testkey", secret="testsecret", skip_instance_cache=True, use_listings_cache=False
    )
    fs.mkdir("exspec")
    write_shards(tmp_path / "messages", ROWS, 3)
    for path in (tmp_path / "messages").iterdir():
        fs.put_file(str(path), f"exspec/messages/{path.name}")
    return fs


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, because the paths of Ray's sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="exspec-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


# From a range that neither Ray's workers nor the system use. No port comes twice.
PORTS = iter(random.sample(range(25000, 30000), 5000))


def free_port() -> int:
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex((HEAD, port)):
                return port
    raise AssertionError("all ports are in use")


class Cluster:
    """A RayCluster as the operator creates it from the manifests: head, worker and submitter. Its pods die with it."""

    def __init__(self, objects: list[Manifest], folder: Path, endpoint: str, stack: ExitStack) -> None:
        self.objects, self.folder, self.stack = objects, folder, stack
        one(objects, "ConfigMap", "exspec-environment")["data"]["AWS_ENDPOINT_URL"] = endpoint
        self.spec = one(objects, "RayJob")["spec"]
        self.templates = {place.rsplit(" ", 1)[-1]: template for place, template in pod_templates(objects)}
        self.gcs, self.dashboard = f"{HEAD}:{free_port()}", free_port()
        group = self.spec["rayClusterSpec"]["workerGroupSpecs"][0]
        cpus = group["replicas"] * int(containers(group["template"])[0]["resources"]["limits"]["cpu"])
        port = self.gcs.rpartition(":")[2]
        head = {"head": "", "port": port, "node-ip-address": HEAD, "dashboard-port": str(self.dashboard)}
        self.head = self._start("head", self._parameters("head", head))
        self._await_dashboard()
        self._start(group["groupName"], self._parameters("worker", {
            "address": self.gcs, "node-ip-address": WORKER, "num-cpus": str(cpus),
        }))  # fmt: skip

    def _parameters(self, kind: str, more: dict[str, str]) -> dict[str, str]:
        cluster = self.spec["rayClusterSpec"]
        group = cluster["headGroupSpec"] if kind == "head" else cluster["workerGroupSpecs"][0]
        first = 20000 if kind == "head" else 21000
        ports = {"min-worker-port": str(first), "max-worker-port": str(first + 200)}
        names = ("metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
        ports |= {f"{name}-port": str(free_port()) for name in names}
        return {"block": "", **group["rayStartParams"], **ports, **more}

    def _container(self, place: str, argv: list[str]) -> list[str]:
        template = self.templates[place]
        (container,) = containers(template)
        variables = environment(self.objects, container, {"exspec-s3": KEYS})
        # The operator adds the token of authOptions.secretName and the address of Ray.
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        if place != "submitter":
            variables |= {"RAY_ADDRESS": self.gcs}
        files = {"job.yaml": job_file(self.objects)}
        return pod.command(template, container["name"], self.folder / place, files, argv, variables)

    def _start(self, place: str, parameters: dict[str, str]) -> pod.Running:
        words = [word for k, v in parameters.items() for word in (f"--{k}", *([v] if v else []))]
        argv = self._container(place, ["ray", "start", *words])
        return self.stack.enter_context(pod.running(argv, self.folder / f"{place}.log"))

    def call(self, path: str) -> Any:
        request = Request(f"http://127.0.0.1:{self.dashboard}{path}", headers={"Authorization": f"Bearer {TOKEN}"})
        with urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def _await_dashboard(self) -> None:
        for _ in range(PATIENCE):
            try:
                self.call("/api/version")
                return
            except (URLError, OSError):
                assert self.head.alive, (self.folder / "head.log").read_text()
                time.sleep(1)
        raise AssertionError((self.folder / "head.log").read_text())

    def probe(self, place: str) -> dict[str, Any]:
        """User, processes and read-only paths of a process in the pod."""
        argv = self._container(place, ["python", "-c", PROBE])
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def submit(self, attempt: str) -> None:
        """Submit the manifest's entry point like the operator's submitter."""
        script = (
            f"ray job submit --address http://127.0.0.1:{self.dashboard} --no-wait --submission-id {attempt} "
            f"-- {self.spec['entrypoint']}"
        )
        argv = self._container("submitter", ["/bin/bash", "-ce", "--", script])
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr

    def log(self, attempt: str) -> str:
        return str(self.call(f"/api/jobs/{attempt}/logs")["logs"])


def parts(fs: s3fs.S3FileSystem) -> dict[str, str]:
    """The parts of the output and the time when each was written."""
    fs.invalidate_cache()
    found = fs.find("exspec/completions", maxdepth=1, detail=True)
    return {name: str(info["LastModified"]) for name, info in found.items() if "/part-" in name}


def await_that(holds: Any, what: str, fs: s3fs.S3FileSystem, cluster: Cluster, attempt: str) -> None:
    """Wait, but fail if the job fails or writes no part for PATIENCE seconds."""
    until, count = time.monotonic() + PATIENCE, 0
    while not holds():
        status = cluster.call(f"/api/jobs/{attempt}")
        if (found := len(parts(fs))) > count:
            until, count = time.monotonic() + PATIENCE, found
        over = status["status"] in ("FAILED", "STOPPED") or time.monotonic() > until
        assert not over, f"no {what}: {status['status']} {status['message']}\n{cluster.log(attempt)}"
        time.sleep(0.5)


@needs_renderer
@needs_pods
def test_a_job_whose_head_dies_is_finished_by_the_retry(bucket: s3fs.S3FileSystem, endpoint: str, folder: Path) -> None:
    objects = overlay("cpu")
    with ExitStack() as stack:
        first = Cluster(objects, folder / "1", endpoint, stack)
        for kind in ("head", "cpu", "submitter"):
            found = first.probe(kind)
            assert (found["user"], found["group"]) == (10001, 10001)
            assert found["processes"] < 5, "the machine's processes are visible"
            # Everything but the mounts, and the mounted job file.
            assert found["read_only"] == [
                place for place in PLACES[:5] if place != "/etc/exspec" or kind != "submitter"
            ]
        first.submit("exspec-one")
        await_that(lambda: len(parts(bucket)) >= 2, "part", bucket, first, "exspec-one")
        first.head.kill()
    before = parts(bucket)
    assert not bucket.exists("exspec/completions/_SUCCESS"), "the first attempt finished before its head died"

    with ExitStack() as stack:
        second = Cluster(objects, folder / "2", endpoint, stack)
        second.submit("exspec-two")
        await_that(lambda: bucket.exists("exspec/completions/_SUCCESS"), "end", bucket, second, "exspec-two")
        succeeded = lambda: second.call("/api/jobs/exspec-two")["status"] == "SUCCEEDED"  # noqa: E731
        await_that(succeeded, "success", bucket, second, "exspec-two")
        log = second.log("exspec-two")
    after = parts(bucket)
    assert len(before) < len(after)
    assert {name: after[name] for name in before} == before, "the retry wrote finished parts again"
    tables = [pq.read_table(io.BytesIO(bucket.cat_file(name))) for name in after]
    assert all(0 < table.num_rows <= ROWS_PER_CHUNK for table in tables)
    ids = [row for table in tables for row in table["id"].to_pylist()]
    assert sorted(ids) == sorted(f"message-{n}" for n in range(ROWS))
    assert not any(error for table in tables for error in table["error"].to_pylist())
    assert "testsecret" not in log
    assert "testsecret" not in bucket.cat_file("exspec/completions/_job.json").decode()


@needs_renderer
def test_every_ray_container_has_the_stores_variables() -> None:
    """Reader, writer and driver are in different pods, and each opens the store."""
    objects = combine(("s3-compatible",))
    seen = set()
    for place, template in pod_templates(objects):
        if place.endswith("submitter"):
            continue
        (container,) = containers(template)
        found = environment(objects, container, {"exspec-s3": KEYS})
        seen.add(place)
        assert found | KEYS == found
        assert found["AWS_REQUEST_CHECKSUM_CALCULATION"] == found["AWS_RESPONSE_CHECKSUM_VALIDATION"] == "when_required"
        assert found["AWS_ENDPOINT_URL"].startswith("http")
        assert found["AWS_DEFAULT_REGION"]
    assert len(seen) == 2


def test_botocore_reads_the_variables_of_the_manifests() -> None:
    """s3fs is built on botocore."""
    code = (
        "import botocore.session, json; s = botocore.session.get_session(); v = s.get_config_variable\n"
        "print(json.dumps([v('region'), v('request_checksum_calculation'), v('response_checksum_validation'),"
        " s.create_client('s3').meta.endpoint_url, s.get_credentials().access_key]))"
    )
    variables = {
        "AWS_DEFAULT_REGION": "eu-north-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        **KEYS,
    }
    env = variables | {"PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [*list(variables.values())[:4], "testkey"]
