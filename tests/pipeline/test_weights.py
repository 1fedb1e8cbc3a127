"""Model weights in object storage: downloaded once per node, complete or not at all, and never stale."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch

from exspec.actors.engine.cache import cache_folder
from exspec.actors.models import load_model
from exspec.actors.source import Source
from exspec.pipeline import storage
from exspec.pipeline.errors import JobError
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from exspec.pipeline.weights import local_model, model_digest, resolved
from tests import tiny
from tests.pipeline import jobs


@pytest.fixture
def stored(pair: jobs.Pair, moto: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder with target and draft, in a new bucket. The cache is empty."""
    monkeypatch.setenv("EXSPEC_CACHE", str(tmp_path / "cache"))
    url = f"s3://models-{abs(hash(str(tmp_path)))}"
    fs = s3fs.S3FileSystem(**moto, skip_instance_cache=True)
    fs.mkdir(url)
    for folder in pair:
        fs.put(folder, f"{url}/{Path(folder).name}", recursive=True)
    return url


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_hub_ids_and_folders_are_left_as_they_are(pair: jobs.Pair) -> None:
    assert local_model("some/model", {}) == "some/model"
    assert local_model(pair[0], {}) == pair[0]


def test_what_is_fetched_is_what_is_there(pair: jobs.Pair, stored: str, moto: dict[str, Any]) -> None:
    place = local_model(f"{stored}/target", moto)
    assert Path(place).is_relative_to(cache_folder())
    assert contents(Path(place)) == contents(Path(pair[0]))
    assert local_model(f"{stored}/target", moto) == place


def test_the_driver_fetches_no_weights(stored: str, moto: dict[str, Any]) -> None:
    light = Path(local_model(f"{stored}/target", moto, weights=False))
    assert {"config.json", "tokenizer.json"} <= set(contents(light))
    assert not list(light.glob("*.safetensors"))
    whole = local_model(f"{stored}/target", moto)
    assert list(Path(whole).glob("*.safetensors"))
    assert local_model(f"{stored}/target", moto, weights=False) == whole


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


def fetch(log: Path, url: str, options: dict[str, Any], die_at: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FETCH, str(log), url, json.dumps(options), die_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)


def test_processes_at_once_fetch_it_once(pair: jobs.Pair, stored: str, moto: dict[str, Any], tmp_path: Path) -> None:
    processes = [fetch(tmp_path / "log", f"{stored}/target", moto) for _ in range(3)]
    places = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(places) == 1
    fetched = (tmp_path / "log").read_text().splitlines()
    assert sorted(name.rsplit("/", 1)[-1] for name in fetched) == sorted(contents(Path(pair[0])))


def test_a_download_killed_in_the_middle_leaves_nothing_that_looks_whole(
    pair: jobs.Pair, stored: str, moto: dict[str, Any], tmp_path: Path
) -> None:
    killed = fetch(tmp_path / "log", f"{stored}/target", moto, die_at=".safetensors")
    assert killed.wait(timeout=60) == 9
    assert [p for p in (cache_folder() / "models").iterdir() if p.is_dir() and p.suffix != ".partial"] == []
    place = local_model(f"{stored}/target", moto)
    assert contents(Path(place)) == contents(Path(pair[0]))


def test_changed_weights_are_another_model(stored: str, moto: dict[str, Any]) -> None:
    url = f"{stored}/target"
    before, digest = local_model(url, moto), model_digest(url, None, moto)
    assert model_digest(url, None, moto) == digest
    fs = s3fs.S3FileSystem(**moto, skip_instance_cache=True)
    content = fs.cat_file(f"{url}/model.safetensors")
    fs.pipe_file(f"{url}/model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))  # of the same size
    after = local_model(url, moto)
    assert after != before
    assert model_digest(url, None, moto) != digest
    assert Path(after, "model.safetensors").read_bytes() != Path(before, "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("folder", "message"),
    [("/nothing", "expected a folder with a model's files, but it has no config.json"), ("", "it has no config.json")],
)
def test_a_url_without_a_model_is_one_sentence(stored: str, moto: dict[str, Any], folder: str, message: str) -> None:
    with pytest.raises(JobError, match=message) as error:
        local_model(f"{stored}{folder}", moto)
    assert "\n" not in str(error.value)
    assert stored in str(error.value)


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "name", ["../../../ESCAPED.txt", "a/../../b.txt", "/absolute.txt", "a//b.txt", "a\\b.txt", "C:b.txt", "./b.txt"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_key_that_would_leave_the_folder_is_refused(
    stored: str, moto: dict[str, Any], name: str, whole: bool, tmp_path: Path
) -> None:
    fs = s3fs.S3FileSystem(**moto, skip_instance_cache=True)
    bucket, key = stored.removeprefix("s3://"), f"target/{name}"
    fs.call_s3("put_object", Bucket=bucket, Key=key, Body=b"escaped")
    with pytest.raises(JobError) as error:
        local_model(f"{stored}/target", moto, weights=whole)
    assert f"invalid file name {name!r}; expected a path below the folder" in str(error.value)
    assert not list(tmp_path.rglob("*.txt"))


def test_secrets_of_a_url_are_in_no_message(stored: str, moto: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PATIENCE", 1)
    with pytest.raises(JobError, match=r"/none: a user or password is in the URL, where no store looks") as error:
        local_model(f"{stored.replace('://', '://testkey:SECRET/@')}/none", moto)
    assert "SECRET" not in str(error.value)


@pytest.fixture
def folder(pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a large file."""
    monkeypatch.setenv("EXSPEC_CACHE", str(tmp_path / "cache"))
    shutil.copytree(pair[0], tmp_path / "model")
    (tmp_path / "model" / "large.bin").write_bytes(os.urandom(3 << 20))
    return tmp_path / "model"


def change(path: Path, place: int, keep_time: bool = False) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("place", [0, 3 << 19, (3 << 20) - 1])
@pytest.mark.parametrize("keep_time", [False, True])
def test_every_byte_of_a_folder_counts(folder: Path, place: int, keep_time: bool) -> None:
    """Not only the first and the last MiB of a file."""
    before = model_digest(str(folder), None, {})
    assert model_digest(str(folder), None, {}) == before
    change(folder / "large.bin", place, keep_time)
    assert model_digest(str(folder), None, {}) != before
    change(folder / "large.bin", place)
    assert model_digest(str(folder), None, {}) == before
    (folder / "large.bin").rename(folder / "other.bin")
    assert model_digest(str(folder), None, {}) != before


def test_a_second_digest_reads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_digest(str(folder), None, {})
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", lambda *_: pytest.fail("a file was read again"))
        assert model_digest(str(folder), None, {}) == before


@pytest.mark.parametrize("damage", [b"", b"abc", b"\xff" * 64, b"0" * 63, b"0" * 65])
def test_a_damaged_cached_digest_is_ignored(folder: Path, damage: bytes) -> None:
    before = model_digest(str(folder), None, {})
    for note in (cache_folder() / "digests").iterdir():
        note.write_bytes(damage)
    assert model_digest(str(folder), None, {}) == before


def test_a_cache_that_cannot_be_written_only_costs_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_digest(str(folder), None, {})
    (folder / "file").write_text("in the way")
    monkeypatch.setenv("EXSPEC_CACHE", str(folder / "file"))
    assert model_digest(str(folder), None, {}) != before
    (folder / "file").unlink()
    assert model_digest(str(folder), None, {}) == before


def test_processes_at_once_find_the_same_digest(folder: Path) -> None:
    script = "import sys; from exspec.pipeline.weights import model_digest; print(model_digest(sys.argv[1], None, {}))"
    command = [sys.executable, "-c", script, str(folder)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {process.communicate(timeout=120)[0].strip() for process in running} == {model_digest(str(folder), None, {})}


FIRST, SECOND = "1" * 40, "2" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with two commits of one model. main is the first."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--some--model"
    for seed, commit in enumerate((FIRST, SECOND)):
        tiny.model(seed=seed).save_pretrained(place / "snapshots" / commit)
        jobs.tokenizer().save_pretrained(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(FIRST)
    (place / "refs" / "old").write_text(FIRST)
    return place


def test_a_revision_is_resolved_once_to_a_commit(hub: Path, tmp_path: Path) -> None:
    job = resolved(jobs.job(("some/model", "some/model"), tmp_path, tmp_path / "out", draft_revision="old"))
    assert (job.target_revision, job.draft_revision) == (FIRST, FIRST)
    (hub / "refs" / "main").write_text(SECOND)
    loaded = load_model(Source(job.target, job.target_revision), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), tiny.model(seed=0).parameters(), strict=True))
    assert resolved(job) == job
    assert model_digest(job.target, job.target_revision, {}) == FIRST
    assert resolved(jobs.job(("some/model", "some/model"), tmp_path, tmp_path / "out")).target_revision == SECOND


@pytest.mark.usefixtures("hub")
def test_what_is_not_a_revision_of_the_hub_stays(pair: jobs.Pair, tmp_path: Path) -> None:
    for names, revision in (
        (pair, "main"),
        (("s3://bucket/model", "memory://model"), None),
        (("no hub id: /", "no/hub/id"), "main"),
    ):
        job = jobs.job(names, tmp_path, tmp_path / "out", target_revision=revision, draft_revision=revision)
        assert resolved(job) == job


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("name", "revision"), [("some/other", "main"), ("some/model", "3" * 40)])
def test_what_neither_hub_nor_cache_knows_is_refused(name: str, revision: str, pair: jobs.Pair, tmp_path: Path) -> None:
    """Loading it would ask the hub for each file, with retries."""
    job = jobs.job((name, pair[1]), tmp_path, tmp_path / "out", target_revision=revision)
    with pytest.raises(
        JobError, match=f"target {name} at {revision}: no such folder, not in the local cache of the hub"
    ):
        resolved(job)


def test_a_job_with_its_pair_in_object_storage(stored: str, moto: dict[str, Any], tmp_path: Path) -> None:
    """A second run recognizes it."""
    jobs.write_shards(tmp_path / "in", rows=24)
    models = (f"{stored}/target", f"{stored}/draft")
    job = jobs.job(models, tmp_path / "in", tmp_path / "out", storage_options=moto, rows_per_chunk=24)
    assert execute(prepare(job)) == 0
    rows = jobs.read_output(tmp_path / "out")
    assert [row["error"] for row in rows.values()] == [None] * 24
    assert not list(prepare(job).missing)
    assert "testsecret" not in (tmp_path / "out" / "_job.json").read_text()
