"""Model weights in object storage: fetched once a node, whole or not at all, and never stale."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from exspec.pipeline.errors import JobError
from exspec.pipeline.run import execute, prepare
from exspec.pipeline.weights import cache_folder, local_model, model_digest
from tests.pipeline import jobs

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def options(endpoint: str) -> dict[str, Any]:
    return {"endpoint_url": endpoint, "key": "testkey", "secret": "testsecret"}


@pytest.fixture
def stored(pair: Pair, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder with target and draft, in a bucket of its own; the cache is empty."""
    monkeypatch.setenv("EXSPEC_CACHE", str(tmp_path / "cache"))
    url = f"s3://models-{abs(hash(str(tmp_path)))}"
    fs = s3fs.S3FileSystem(**options(endpoint), skip_instance_cache=True)
    fs.mkdir(url)
    for folder in pair:
        fs.put(folder, f"{url}/{Path(folder).name}", recursive=True)
    return url


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_hub_ids_and_folders_are_left_as_they_are(pair: Pair) -> None:
    assert local_model("some/model", {}) == "some/model"
    assert local_model(pair[0], {}) == pair[0]


def test_what_is_fetched_is_what_is_there(pair: Pair, stored: str, endpoint: str) -> None:
    place = local_model(f"{stored}/target", options(endpoint))
    assert Path(place).is_relative_to(cache_folder())
    assert contents(Path(place)) == contents(Path(pair[0]))
    assert local_model(f"{stored}/target", options(endpoint)) == place


def test_the_driver_fetches_no_weights(stored: str, endpoint: str) -> None:
    light = Path(local_model(f"{stored}/target", options(endpoint), weights=False))
    assert {"config.json", "tokenizer.json"} <= set(contents(light))
    assert not list(light.glob("*.safetensors"))
    whole = local_model(f"{stored}/target", options(endpoint))
    assert list(Path(whole).glob("*.safetensors"))
    assert local_model(f"{stored}/target", options(endpoint), weights=False) == whole


FETCH = """
import json, os, sys
from pathlib import Path
from s3fs import S3FileSystem
from exspec.pipeline.weights import local_model
log, url, options, die_at = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
get = S3FileSystem.get_file
def counted(self, remote, local, **more):
    with log.open("a") as file:
        file.write(remote + "\\n")
    if die_at and remote.endswith(die_at):
        Path(local).write_bytes(b"half of it")
        os._exit(9)
    return get(self, remote, local, **more)
S3FileSystem.get_file = counted
print(local_model(url, options))
"""


def fetch(log: Path, url: str, endpoint: str, die_at: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FETCH, str(log), url, json.dumps(options(endpoint)), die_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)


def test_processes_at_once_fetch_it_once(pair: Pair, stored: str, endpoint: str, tmp_path: Path) -> None:
    processes = [fetch(tmp_path / "log", f"{stored}/target", endpoint) for _ in range(3)]
    places = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(places) == 1
    fetched = (tmp_path / "log").read_text().splitlines()
    assert sorted(name.rsplit("/", 1)[-1] for name in fetched) == sorted(contents(Path(pair[0])))


def test_a_download_killed_in_the_middle_leaves_nothing_that_looks_whole(
    pair: Pair, stored: str, endpoint: str, tmp_path: Path
) -> None:
    killed = fetch(tmp_path / "log", f"{stored}/target", endpoint, die_at=".safetensors")
    assert killed.wait(timeout=60) == 9
    assert [p for p in (cache_folder() / "models").iterdir() if p.is_dir() and p.suffix != ".partial"] == []
    place = local_model(f"{stored}/target", options(endpoint))
    assert contents(Path(place)) == contents(Path(pair[0]))


def test_changed_weights_are_another_model(stored: str, endpoint: str) -> None:
    url, given = f"{stored}/target", options(endpoint)
    before, digest = local_model(url, given), model_digest(url, None, given)
    assert model_digest(url, None, given) == digest
    fs = s3fs.S3FileSystem(**given, skip_instance_cache=True)
    content = fs.cat_file(f"{url}/model.safetensors")
    fs.pipe_file(f"{url}/model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))  # no size tells it
    after = local_model(url, given)
    assert after != before
    assert model_digest(url, None, given) != digest
    assert Path(after, "model.safetensors").read_bytes() != Path(before, "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("folder", "message"),
    [("/nothing", "expected a folder with a model's files, and found no config.json"), ("", "found no config.json")],
)
def test_a_url_without_a_model_is_one_sentence(stored: str, endpoint: str, folder: str, message: str) -> None:
    with pytest.raises(JobError, match=message) as error:
        local_model(f"{stored}{folder}", options(endpoint))
    assert "\n" not in str(error.value)
    assert stored in str(error.value)


@pytest.mark.usefixtures("ray_session")
def test_a_job_with_its_pair_in_object_storage(stored: str, endpoint: str, tmp_path: Path) -> None:
    """A second run knows it again."""
    jobs.write_shards(tmp_path / "in", rows=24)
    models = (f"{stored}/target", f"{stored}/draft")
    job = jobs.job(models, tmp_path / "in", tmp_path / "out", storage_options=options(endpoint), rows_per_chunk=24)
    assert execute(prepare(job), quiet=True) == 0
    rows = jobs.read_output(tmp_path / "out")
    assert [row["error"] for row in rows.values()] == [None] * 24
    assert not prepare(job).missing
    assert "testsecret" not in (tmp_path / "out" / "_job.json").read_text()
