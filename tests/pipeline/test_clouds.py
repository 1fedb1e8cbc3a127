"""`Folder` and the life of an `Output` on every kind of store.

- Local files, and S3 with moto's server. test_s3.py runs whole jobs there, and on a real server.
- Google: gcsfs with gcp-storage-emulator. The emulator ignores `ifGenerationMatch`, with which gcsfs creates a file
  only if there is none, so exspec refuses the emulator. Here the condition is added to it.
- Azure: adlfs with Azurite, Microsoft's emulator, which supports `If-None-Match`.
- Stores without whole writes, such as HDFS, SMB or SFTP: fsspec's memory file system with faults.
"""

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem

from exspec.pipeline import storage
from exspec.pipeline.errors import JobError
from exspec.pipeline.output.log import LOG
from exspec.pipeline.output.owner import SUCCESS, LostError, Output, Writer, read_output, take
from exspec.pipeline.storage import STAGED, Folder, etag
from tests.pipeline import jobs
from tests.pipeline.output.test_output import plan, staged

KINDS = ("local", "s3", "gcs", "azure", "renaming")
DEVSTORE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # public


class InPlace(MemoryFileSystem):  # type: ignore[misc]
    """Writes in place; while `torn`, it writes half a file and fails. Writes do not create the parent folder."""

    protocol = "renaming"
    replaces = False  # whether a rename replaces an existing file
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    torn = 0
    writes: list[str] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.split("://", 1)[-1]))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if not self.isdir(self._parent(path)):
            raise FileNotFoundError(path)
        self.writes.append(path)
        if InPlace.torn:
            InPlace.torn -= 1
            super().pipe_file(path, value[: len(value) // 2], mode)
            raise ConnectionError("broke off")
        super().pipe_file(path, value, mode)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        here, there = self._strip_protocol(path1), self._strip_protocol(path2)
        if here not in self.store:
            raise FileNotFoundError(here)
        if there in self.store and not self.replaces:
            raise OSError(f"{there} is there")
        self.store[there] = self.store.pop(here)


class Replacing(InPlace):
    protocol = "replacing"
    replaces = True


for kind in (InPlace, Replacing):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


def only_if_new(upload: Callable[..., Any]) -> Callable[..., Any]:
    """An upload that supports ifGenerationMatch=0. The emulator answers requests one by one."""
    from gcp_storage_emulator.exceptions import NotFound

    def conditional(request: Any, response: Any, store: Any) -> None:
        try:
            store.get_file_obj(request.params["bucket_name"], request.data["meta"]["name"])
        except NotFound:
            upload(request, response, store)
            return
        if request.query.get("ifGenerationMatch") == ["0"]:
            response.status = HTTPStatus.PRECONDITION_FAILED
        else:
            upload(request, response, store)

    return conditional


@contextmanager
def gcs(conditions: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    needed = "needs gcsfs and gcp-storage-emulator (pip install)"
    server_module = pytest.importorskip("gcp_storage_emulator.server", reason=needed)
    from gcp_storage_emulator.handlers import objects

    with pytest.MonkeyPatch.context() as patch:
        # Else gcsfs asks for the kind of every new bucket by gRPC, and only gives up after a minute.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip("gcsfs", reason=needed)
        if conditions:
            patch.setattr(objects, "_multipart_upload", only_if_new(objects._multipart_upload))
        server = server_module.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
        server.start()
        endpoint = f"http://127.0.0.1:{server._api._httpd.server_port}"
        yield "gs://bucket", {"endpoint_url": endpoint, "token": "anon"}
        server.stop()


@contextmanager
def azure() -> Iterator[tuple[str, dict[str, Any]]]:
    adlfs = pytest.importorskip("adlfs", reason="needs adlfs (pip install)")
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    azurite = shutil.which("azurite-blob", path=places)
    if azurite is None:
        pytest.skip("needs azurite-blob on the PATH or in .venv/bin (npm install azurite)")
    command = [azurite, "--inMemoryPersistence", "--blobPort", "0", "--skipApiVersionCheck", "--disableTelemetry"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = next((line for line in server.stdout if "successfully listens on" in line), "")
        try:
            assert said, "azurite-blob ended before it listened"
            account = f"AccountName=devstoreaccount1;AccountKey={DEVSTORE_KEY}"
            endpoint = f"BlobEndpoint={said.split()[-1]}/devstoreaccount1"
            options = {"connection_string": f"DefaultEndpointsProtocol=http;{account};{endpoint};"}
            adlfs.AzureBlobFileSystem(**options).mkdir("bucket")
            yield "abfs://bucket", options
        finally:
            server.terminate()


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """The URL of an empty folder, and the options for it."""
    if request.param == "local":
        yield str(tmp_path_factory.mktemp("local")), {}
    elif request.param == "renaming":
        yield "renaming://all", {}
    elif request.param == "s3":
        options = request.getfixturevalue("moto")
        s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("clouds")
        yield "s3://clouds", options
    else:
        with {"gcs": gcs, "azure": azure}[request.param]() as found:
            yield found


@pytest.fixture
def folder(place: tuple[str, dict[str, Any]]) -> Folder:
    return Folder(f"{place[0]}/{uuid.uuid4().hex}/out", place[1])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PATIENCE", 10)


def test_what_is_not_there(folder: Folder) -> None:
    assert (folder.sizes(), folder.sizes(STAGED), folder.size("a"), folder.exists("a")) == ({}, {}, None, False)
    folder.remove("a")
    folder.remove("below/a")
    for action in (folder.read, folder.modified, lambda name: folder.move(name, "b")):
        with pytest.raises(FileNotFoundError):
            action("a")


def test_the_first_writer_wins(folder: Folder) -> None:
    folder.check_create()
    name = f"{LOG}/1"
    assert folder.create(name, b"first")
    assert folder.create(name, b"first"), "the response to the first attempt may have been lost"
    assert not folder.create(name, b"second")
    assert folder.read(name) == b"first"
    assert folder.sizes(LOG) == {"1": 5}, "no temporary file is left"
    path = f"{folder.path}/{name}"
    with pytest.raises(FileExistsError):
        folder._create(path, b"second")


def test_one_of_many_who_create_at_once_wins(folder: Folder) -> None:
    won = folder.each(lambda content: folder.create("a", content.encode()), "abcdefgh")
    assert sum(won) == 1
    assert folder.read("a").decode() == "abcdefgh"[won.index(True)]


def test_what_was_written_is_there_at_once(folder: Folder) -> None:
    folder.names()  # listings may be cached
    for content in (b"12345", b"123456", b""):
        folder.write("a", content)
        assert (folder.read("a"), folder.size("a"), folder.sizes()) == (content, len(content), {"a": len(content)})
    before = etag(folder.fs.info(f"{folder.path}/a"))
    folder.write("a", b"another")
    folder.fs.invalidate_cache()
    assert etag(folder.fs.info(f"{folder.path}/a")) != before
    assert abs((folder.modified("a") or 0) - time.time()) < 60
    folder.write("below/b", b"b")
    assert folder.names() == {"a"}
    folder.remove("a")
    assert (folder.names(), folder.exists("a"), folder.names("below")) == (set(), False, {"b"})


def test_what_is_staged_is_moved_once(folder: Folder) -> None:
    name = folder.stage(b"rows", "0001")
    with folder.staging("0001") as (here, other):
        here.write_bytes(b"more rows")
    assert folder.sizes(STAGED) == {name.removeprefix(f"{STAGED}/"): 4, other.removeprefix(f"{STAGED}/"): 9}
    folder.move(name, "a")
    folder.move(other, "b")
    for moved in (name, other):
        with pytest.raises(FileNotFoundError):
            folder.move(moved, "c")
    assert (folder.sizes(), folder.sizes(STAGED), folder.read("b")) == ({"a": 4, "b": 9}, {}, b"more rows")
    aside = Folder(f"{folder.url}-aside", folder.options)
    folder.write("below/c", b"c")
    folder.copy("a", aside)
    folder.copy("below/c", aside)
    assert (aside.sizes(), aside.read("below/c"), folder.sizes()) == ({"a": 4}, b"c", {"a": 4, "b": 9})


def commit_all(writer: Writer) -> list[str]:
    """Commit every missing chunk in a file; returns the names."""
    writer.commit([staged(writer, chunk) for chunk in writer.state.missing()])
    return writer.state.names()


def test_the_life_of_an_output(folder: Folder) -> None:
    """Two owners, the first of which loses the output; then the job is set aside and replaced."""
    with take(Output(folder), "run") as late:
        late.begin(jobs.DESCRIBED | {"n": 1}, plan())
        first, *others = late.state.missing()
        late.commit([staged(late, first)])
        (single,) = late.state.names()
        part = staged(late, others[0])
        with take(Output(folder), "run", dead=lambda *_: True) as writer:
            assert list(writer.state.missing()) == others
            writer.commit([staged(writer, first)], [single])
            names = commit_all(writer)
            assert len(names) == 3
            assert single not in names
            writer.finish()
        shown = folder.sizes()
        assert shown == dict.fromkeys(names, 4) | {SUCCESS: folder.size(SUCCESS)}
        with pytest.raises(LostError, match=r"out: run on .* took it over, .*; what it committed is kept"):
            late.commit([part])
    assert folder.sizes() == shown
    assert read_output(folder).state.complete
    assert read_output(folder).state.taken is None
    with take(Output(folder), "run") as writer:
        assert writer.lost == 0
        aside = writer.keep_old()
        writer.begin(jobs.DESCRIBED | {"n": 2}, plan())
        writer.sweep()
        assert (folder.sizes(), folder.sizes(STAGED)) == ({}, {})
        commit_all(writer)
        writer.finish()
    assert aside.sizes() == shown
    assert [read_output(place).state.description["n"] for place in (aside, folder)] == [1, 2]
    assert read_output(aside).state.complete
    assert read_output(folder).state.complete
    assert len(folder.names()) == 4
    assert not any(name.startswith("alive-") for name in folder.names(LOG))


def test_what_an_owner_left_undone_is_done_by_the_next(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an owner dies after its entry, the next one moves the staged parts. A part that is gone is missing."""
    with take(Output(folder), "run") as writer, monkeypatch.context() as patch:
        writer.begin(jobs.DESCRIBED, plan())
        patch.setattr(Folder, "move", lambda *_: None)
        names = commit_all(writer)
        assert folder.names() == set()
    with take(Output(folder), "run") as writer:
        assert folder.names() == set(names)
    folder.remove(names[0])
    with take(Output(folder), "run") as writer:
        assert len(list(writer.state.missing())) == 1
        assert writer.lost == 8


def test_google_emulator_as_it_is_would_let_two_create_one_file() -> None:
    """Such a store is refused. So are Google's Rapid (zonal) buckets, for which gcsfs omits the condition. If this test
    fails, the emulator supports the condition, and `only_if_new` can be removed."""
    with gcs(conditions=False) as (url, options), pytest.raises(JobError, match="lets a second writer replace"):
        Folder(f"{url}/out", options).check_create()


def test_azure_may_copy_after_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of a move is removed when the copy is complete. A failed copy leaves it there."""
    with azure() as (url, options):
        from azure.storage.blob.aio import BlobClient

        folder = Folder(f"{url}/out", options)
        name = folder.stage(b"rows", "0001")
        statuses = iter(["pending", "pending", "success"])
        seen: list[int] = []

        async def properties(*_: Any, **__: Any) -> Any:
            status = next(statuses)
            seen.append(removed)
            return SimpleNamespace(copy=SimpleNamespace(status=status))

        removed, remove = 0, Folder.remove

        def counted(self: Folder, name: str) -> None:
            nonlocal removed
            removed += 1
            remove(self, name)

        with monkeypatch.context() as patch:
            patch.setattr(BlobClient, "get_blob_properties", properties)
            patch.setattr(Folder, "remove", counted)
            folder.move(name, "a")
        assert (seen, removed, folder.sizes(), folder.sizes(STAGED)) == ([0, 0, 0], 1, {"a": 4}, {})
        monkeypatch.setattr(storage, "PATIENCE", 0)
        statuses = iter(["failed"])
        name = folder.stage(b"rows", "0001")
        with monkeypatch.context() as patch:
            patch.setattr(BlobClient, "get_blob_properties", properties)
            with pytest.raises(OSError, match="failed the copy"):
                folder.move(name, "b")
        assert len(folder.names(STAGED)) == 1


def test_a_store_that_renames_over_what_is_there_is_refused() -> None:
    with pytest.raises(JobError, match="lets a second writer replace"):
        Folder("replacing://all/out").check_create()


def test_half_a_file_is_nobodys_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn write is retried under another name: a file with the final name is complete."""
    folder = Folder(f"renaming://all/{uuid.uuid4().hex}")
    monkeypatch.setattr(InPlace, "torn", 2)
    monkeypatch.setattr(InPlace, "writes", [])
    assert folder.create(f"{LOG}/1", b"whole")
    assert InPlace.torn == 0
    assert len(set(InPlace.writes)) == 3
    assert f"{folder.path}/{LOG}/1" not in InPlace.writes
    assert (folder.sizes(LOG), folder.read(f"{LOG}/1")) == ({"1": 5}, b"whole")
    monkeypatch.setattr(storage, "PATIENCE", 0)
    monkeypatch.setattr(InPlace, "torn", 1)
    with pytest.raises(ConnectionError):
        folder.create(f"{LOG}/2", b"whole")
    assert not folder.exists(f"{LOG}/2")
    assert folder.create(f"{LOG}/2", b"another's"), "a failed writer is not the first"
    monkeypatch.setattr(storage, "PATIENCE", 10)
    monkeypatch.setattr(InPlace, "torn", 1)
    name = folder.stage(b"rows", "0001")
    assert folder.read(name) == b"rows"


class AnswerError(Exception):
    """Like errors of gcsfs and the Azure clients: not an OSError, with the status in an attribute."""

    def __init__(self, module: str, status: int, text: str = "") -> None:
        super().__init__(text)
        self.code = self.status_code = status
        type(self).__module__ = module


@pytest.mark.parametrize("module", ["gcsfs.retry", "azure.core.exceptions"])
def test_a_busy_store_is_retried_and_a_refusal_is_not(module: str) -> None:
    cases = ((503, "", 2), (429, "", 2), (403, "", 1), (404, "", 1), (409, "PendingCopyOperation", 2))
    for status, text, tries in cases:
        answers = iter([AnswerError(module, status, text), None])
        asked = 0

        def action(answers: Any = answers) -> None:
            nonlocal asked
            asked += 1
            if (error := next(answers)) is not None:
                raise error

        if tries == 1:
            with pytest.raises(AnswerError):
                storage.attempt(action)
        else:
            storage.attempt(action)
        assert asked == tries
    refused = OSError("Forbidden: b/bucket/o\nno storage.objects.create")  # gcsfs's 403
    with pytest.raises(OSError, match="Forbidden"):
        storage.attempt(lambda: (_ for _ in ()).throw(refused))
