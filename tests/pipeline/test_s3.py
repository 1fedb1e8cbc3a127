"""The same job on object storage: on moto's server, and on the server in EXSPEC_TEST_S3."""

import os
import random
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from exspec.pipeline.errors import JobError
from exspec.pipeline.output.contents import tables
from exspec.pipeline.output.owner import read_output
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from exspec.pipeline.storage import Folder
from tests.pipeline import jobs
from tests.pipeline.s3 import connected, external, fetch, new_bucket


@pytest.fixture(scope="module", params=["moto", "external"])
def options(request: pytest.FixtureRequest, moto: dict[str, Any]) -> dict[str, Any]:
    """Options to connect to the server."""
    return moto if request.param == "moto" else external()


@pytest.fixture
def bucket(options: dict[str, Any], tmp_path: Path) -> str:
    """A new bucket with 60 rows."""
    name, fs = new_bucket(options, tmp_path), connected(options)
    jobs.write_shards(tmp_path / "in", rows=60)
    for path in (tmp_path / "in").iterdir():
        fs.put_file(str(path), f"{name}/in/{path.name}")
    return name


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_job_from_bucket_to_bucket(
    pair: jobs.Pair, options: dict[str, Any], bucket: str, tmp_path: Path, capsys: Any
) -> None:
    job = jobs.job(pair, f"s3://{bucket}/in", f"s3://{bucket}/out", storage_options=options)
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    jobs.assert_complete(fetch(options, bucket, tmp_path / "one"), 60)
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    assert "nothing to do" in capsys.readouterr().out
    fs = connected(options)
    for key in sorted(fs.glob(f"{bucket}/out/part-*"))[::2]:
        fs.rm_file(key)
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    jobs.assert_complete(fetch(options, bucket, tmp_path / "two"), 60)


@pytest.mark.slow
def test_a_restart_keeps_the_old_output_and_leaves_one_job(
    pair: jobs.Pair, options: dict[str, Any], bucket: str, tmp_path: Path, capsys: Any
) -> None:
    job = jobs.job(pair, f"s3://{bucket}/in", f"s3://{bucket}/out", storage_options=options)
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    other = job.model_copy(update={"seed": 7})
    assert execute(prepare(other, restart=True), load=jobs.ArithmeticLoader()) == 0
    jobs.assert_complete(fetch(options, bucket, tmp_path / "one"), 60)
    aside = capsys.readouterr().out.split("the old output is now in ")[1].split()[0]
    old = read_output(Folder(aside, options))
    assert (old.state.rows, old.state.description["job"]["seed"]) == (60, 0)
    assert sum(table.num_rows for table in tables(old, None)) == 60
    now = read_output(Folder(f"s3://{bucket}/out", options))
    assert now.state.description["job"]["seed"] == 7


class Faulty(BaseHTTPRequestHandler):
    """A proxy that answers some requests with 503 SlowDown and cuts the connection of others."""

    protocol_version = "HTTP/1.1"
    upstream = ""
    rate = 0.0
    seed = random.Random(7)
    faults = 0

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        draw = self.seed.random()
        if draw < self.rate:
            type(self).faults += 1
            if draw < self.rate / 3:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            text = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            self._answer(503, {"Content-Type": "application/xml"}, text)
            return
        address = urlsplit(self.upstream)
        connection = HTTPConnection(str(address.hostname), address.port or 80, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        kept = {k: v for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")}
        self._answer(answer.status, kept, content)
        connection.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any  # noqa: N815

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def faulty(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Options to connect through the faulty proxy."""
    Faulty.upstream, Faulty.rate, Faulty.faults = options["endpoint_url"], 0.15, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield options | {"endpoint_url": f"http://127.0.0.1:{server.server_port}"}
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_a_store_that_throttles_and_cuts_connections(
    pair: jobs.Pair, options: dict[str, Any], faulty: dict[str, Any], bucket: str, tmp_path: Path
) -> None:
    job = jobs.job(pair, f"s3://{bucket}/in", f"s3://{bucket}/out", storage_options=faulty)
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    assert Faulty.faults > 5
    jobs.assert_complete(fetch(options, bucket, tmp_path / "one"), 60)


def test_unknown_buckets_and_wrong_keys_are_one_sentence(pair: jobs.Pair, options: dict[str, Any], bucket: str) -> None:
    with pytest.raises(JobError, match=r"input s3://no-such-bucket-here/in: ") as error:
        prepare(jobs.job(pair, "s3://no-such-bucket-here/in", f"s3://{bucket}/out", storage_options=options))
    assert "\n" not in str(error.value)
    if options["endpoint_url"] == os.environ.get("EXSPEC_TEST_S3"):
        wrong = options | {"secret": "wrong"}
        with pytest.raises(JobError, match=r"input s3://.*: "):
            prepare(jobs.job(pair, f"s3://{bucket}/in", f"s3://{bucket}/out", storage_options=wrong))
