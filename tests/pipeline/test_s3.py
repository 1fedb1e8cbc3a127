"""The same job on object storage: moto's server here, and any other that EXSPEC_TEST_S3 names."""

import json
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
import s3fs
from moto.server import ThreadedMotoServer

from exspec.pipeline.errors import JobError
from exspec.pipeline.output.contents import tables
from exspec.pipeline.output.owner import read_output
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from exspec.pipeline.storage import Folder
from tests.pipeline import jobs

Pair = tuple[str, str]


@pytest.fixture(scope="module", params=["moto", "external"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "external":
        if "EXSPEC_TEST_S3" not in os.environ:
            pytest.skip("no other S3 server is at hand (EXSPEC_TEST_S3)")
        yield os.environ["EXSPEC_TEST_S3"]
        return
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def options(endpoint: str) -> dict[str, Any]:
    return {
        "endpoint_url": endpoint,
        "key": os.environ.get("EXSPEC_TEST_S3_KEY", "testkey"),
        "secret": os.environ.get("EXSPEC_TEST_S3_SECRET", "testsecret"),
    }


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path) -> str:
    """A fresh bucket with sixty rows in it."""
    name = f"exspec-{random.Random(str(tmp_path)).randrange(10**9)}"
    fs = s3fs.S3FileSystem(**options(endpoint), skip_instance_cache=True)
    fs.mkdir(name)
    jobs.write_shards(tmp_path / "in", rows=60)
    for path in (tmp_path / "in").iterdir():
        fs.put_file(str(path), f"{name}/in/{path.name}")
    return name


def fetch(endpoint: str, bucket: str, folder: Path) -> Path:
    """The output, copied to a local folder."""
    fs = s3fs.S3FileSystem(**options(endpoint), skip_instance_cache=True)
    folder.mkdir()
    for found in fs.ls(f"{bucket}/out", detail=True, refresh=True):
        if found["type"] == "file":
            fs.get_file(found["name"], str(folder / found["name"].rsplit("/", 1)[-1]))
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_job_from_bucket_to_bucket(pair: Pair, endpoint: str, bucket: str, tmp_path: Path, capsys: Any) -> None:
    job = jobs.job(pair, f"s3://{bucket}/in", f"s3://{bucket}/out", storage_options=options(endpoint))
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    jobs.assert_complete(fetch(endpoint, bucket, tmp_path / "one"), 60)
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    assert "nothing to do" in capsys.readouterr().out
    fs = s3fs.S3FileSystem(**options(endpoint), skip_instance_cache=True)
    for key in sorted(fs.glob(f"{bucket}/out/part-*"))[::2]:
        fs.rm_file(key)
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    jobs.assert_complete(fetch(endpoint, bucket, tmp_path / "two"), 60)


def test_the_first_writer_wins(endpoint: str, bucket: str) -> None:
    folder = Folder(f"s3://{bucket}/out", options(endpoint))
    folder.check_create()
    assert folder.create("part", b"first")
    assert folder.create("part", b"first"), "the answer to the first try may have been lost"
    assert not folder.create("part", b"second")
    assert folder.read("part") == b"first"
    folder.write("part", b"third")
    assert folder.read("part") == b"third"
    assert folder.modified("part") is not None


@pytest.mark.slow
def test_a_restart_keeps_the_old_output_and_leaves_one_job(
    pair: Pair, endpoint: str, bucket: str, tmp_path: Path, capsys: Any
) -> None:
    job = jobs.job(pair, f"s3://{bucket}/in", f"s3://{bucket}/out", storage_options=options(endpoint))
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    other = job.model_copy(update={"seed": 7})
    assert execute(prepare(other, restart=True), load=jobs.ArithmeticLoader()) == 0
    jobs.assert_complete(fetch(endpoint, bucket, tmp_path / "one"), 60)
    aside = capsys.readouterr().out.split("the old output is now in ")[1].split()[0]
    old = read_output(Folder(aside, options(endpoint)))
    assert (old.state.rows, old.state.description["job"]["seed"]) == (60, 0)
    assert sum(table.num_rows for table in tables(old, None)) == 60
    now = read_output(Folder(f"s3://{bucket}/out", options(endpoint)))
    assert now.state.description["job"]["seed"] == 7


class Faulty(BaseHTTPRequestHandler):
    """Passes requests on, but answers some with 503 SlowDown and cuts the connection of others."""

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
def faulty(endpoint: str) -> Iterator[str]:
    Faulty.upstream, Faulty.rate, Faulty.faults = endpoint, 0.15, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_a_store_that_throttles_and_cuts_connections(
    pair: Pair, endpoint: str, faulty: str, bucket: str, tmp_path: Path
) -> None:
    job = jobs.job(pair, f"s3://{bucket}/in", f"s3://{bucket}/out", storage_options=options(faulty))
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    assert Faulty.faults > 5
    jobs.assert_complete(fetch(endpoint, bucket, tmp_path / "one"), 60)


def test_an_unknown_bucket_and_wrong_keys_are_one_sentence(pair: Pair, endpoint: str, bucket: str) -> None:
    good = options(endpoint)
    with pytest.raises(JobError, match=r"input s3://no-such-bucket-here/in: ") as error:
        prepare(jobs.job(pair, "s3://no-such-bucket-here/in", f"s3://{bucket}/out", storage_options=good))
    assert "\n" not in str(error.value)
    if "EXSPEC_TEST_S3" in os.environ and endpoint == os.environ["EXSPEC_TEST_S3"]:
        wrong = good | {"secret": "wrong"}
        with pytest.raises(JobError, match=r"input s3://.*: "):
            prepare(jobs.job(pair, f"s3://{bucket}/in", f"s3://{bucket}/out", storage_options=wrong))


def test_secrets_stay_out_of_what_is_written(pair: Pair, endpoint: str, bucket: str) -> None:
    job = jobs.job(pair, f"s3://{bucket}/in", f"s3://{bucket}/out", storage_options=options(endpoint))
    assert "testsecret" not in json.dumps(job.published())
