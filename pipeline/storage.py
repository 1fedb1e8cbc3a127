"""Files behind fsspec URLs: read whole, written whole or not at all, with retries around both."""

import errno
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec import asyn
from fsspec.implementations.local import LocalFileSystem
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from exspec.pipeline.errors import JobError

A = TypeVar("A")
T = TypeVar("T")
STREAMS = 16  # files worked on at once
STAGED, PROBE = "_staged", "_probe"  # a folder below, and what names of trials begin with; readers pass over both
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}
PATIENCE = 180  # seconds of trying again
PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
REFUSALS = ("NoCredentials", "InvalidAccessKey", "SignatureDoesNotMatch", "NoSuchBucket", "OSError Forbidden: ")
CLIENTS = ("botocore", "aiohttp", "gcsfs", "google.auth", "azure.core")  # whose errors are no OSErrors
HOPELESS = {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ENAMETOOLONG}


class Folder:
    """A folder on a file system. Pickles as its URL and options, so that every process connects by itself.

    url: a path or an fsspec URL. options: as fsspec takes them; S3 takes endpoint and credentials from the usual
    AWS variables too.
    """

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.url, self.options = url.rstrip("/") or "/", options or {}

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "options": self.options}

    @cached_property
    def _connection(self) -> tuple[Any, str]:
        try:
            return fsspec.url_to_fs(self.url, **self.options)  # type: ignore[no-any-return]
        except (ImportError, ValueError) as error:
            raise JobError(f"{self.url}: {error}") from error

    @property
    def fs(self) -> Any:
        return self._connection[0]

    @property
    def path(self) -> str:
        return self._connection[1].rstrip("/")

    @property
    def local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    def names(self, below: str = "") -> set[str]:
        """Names of the files directly in the folder, or in one below it; empty where there is none."""
        return set(self.sizes(below))

    def sizes(self, below: str = "") -> dict[str, int]:
        """Bytes of the files directly in the folder, or in one below it, by name."""
        try:
            return attempt(lambda: self._listed(f"{self.path}/{below}".rstrip("/")))
        except FileNotFoundError:
            return {}

    def _listed(self, path: str) -> dict[str, int]:
        if self.local:  # one system call for many names, where fsspec asks for each file's details
            found = {}
            for entry in os.scandir(path):
                with suppress(FileNotFoundError):  # removed meanwhile
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
            return found
        self.fs.invalidate_cache()
        files = (f for f in self.fs.ls(path, detail=True) if f["type"] != "directory")
        return {str(f["name"]).rsplit("/", 1)[-1]: int(f["size"] or 0) for f in files}

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where it is not there."""
        self.fs.invalidate_cache()
        try:
            return int(attempt(lambda: self.fs.info(f"{self.path}/{name}"))["size"] or 0)
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        return attempt(lambda: bytes(self.fs.cat_file(f"{self.path}/{name}")))

    def exists(self, name: str) -> bool:
        self.fs.invalidate_cache()
        return bool(attempt(lambda: self.fs.exists(f"{self.path}/{name}")))

    def modified(self, name: str) -> float | None:
        """When the file was written, in seconds of its store's clock; None where the store does not tell."""
        self.fs.invalidate_cache()
        try:
            return float(attempt(lambda: self.fs.modified(f"{self.path}/{name}")).timestamp())
        except (NotImplementedError, AttributeError, KeyError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write the file whole, in the place of one that is there."""
        attempt(lambda: self._put(f"{self.path}/{name}", content))

    def _put(self, path: str, content: bytes) -> None:
        if self.local:
            _write_local(Path(path), content, Path.replace)
        else:
            self._make_parent(path)
            self.fs.pipe_file(path, content)

    def _make_parent(self, path: str) -> None:
        """Object stores have no folders to be made."""
        if not self.whole_puts:
            self.fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)

    def create(self, name: str, content: bytes) -> bool:
        """Write the file whole if there is none; of several who try, one succeeds. Returns whether it was this one.

        The content must be one that nobody else writes: where the answer of a store got lost, it tells who was first.
        """
        path = f"{self.path}/{name}"
        try:
            attempt(lambda: self._create(path, content))
        except FileExistsError:
            return self.read(name) == content
        return True

    def _create(self, path: str, content: bytes) -> None:
        if self.local:
            _write_local(Path(path), content, lambda temporary, place: place.hardlink_to(temporary))
        elif self.whole_puts:
            try:
                self.fs.pipe_file(path, content, mode="create")
            except OSError as error:
                raise FileExistsError(path) if _was_there(error) else error from error
        else:
            temporary = f"{path}.{uuid.uuid4().hex}"
            try:
                self._put(temporary, content)
                self.fs.mv(temporary, path)
            except Exception as error:
                with suppress(Exception):  # what is left of it is in nobody's way
                    self.fs.rm_file(temporary)
                raise FileExistsError(path) if self.fs.exists(path) else error from error

    @property
    def whole_puts(self) -> bool:
        """Whether the store writes a file in one step, as object stores do; others may leave half of one."""
        kinds = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        return bool(kinds & OBJECT_STORES)

    def check_create(self) -> None:
        """Raises JobError where the store lets two writers create one file: then nothing keeps two runs apart."""
        name = f"{PROBE}-{uuid.uuid4().hex}"
        try:
            if not self.create(name, b"first") or self.create(name, b"second") or self.read(name) != b"first":
                raise JobError(
                    f"{self.url}: the store lets a second writer replace a file that the first one created, so nothing "
                    "can keep two runs apart there; expected a local disk with hard links, S3, GCS, Azure, or a store "
                    "that creates or renames a file only where there is none"
                )
        finally:
            self.remove(name)

    def stage(self, content: bytes, prefix: str) -> str:
        """Write a file that nobody reads yet; returns its name, which is new for every try and never used again."""

        def put() -> str:
            name = f"{STAGED}/{prefix}-{uuid.uuid4().hex}"
            self._put(f"{self.path}/{name}", content)
            return name

        return attempt(put)

    @contextmanager
    def staging(self, prefix: str) -> Iterator[tuple[Path, str]]:
        """A local file to be written, and the name of the staged file that it is when the block has ended."""
        name = f"{STAGED}/{prefix}-{uuid.uuid4().hex}"
        if self.local:
            place = Path(f"{self.path}/{name}")
            place.parent.mkdir(parents=True, exist_ok=True)
            yield place, name
        else:
            with self.writing(name) as place:
                yield place, name

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A local file to be written, which takes the place of the named one, whole, when the block has ended."""
        path = f"{self.path}/{name}"
        if self.local:
            place = Path(path).with_name(f".{Path(path).name}.{uuid.uuid4().hex}")
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                yield place
                place.replace(path)
            finally:
                place.unlink(missing_ok=True)
        else:
            with tempfile.TemporaryDirectory(prefix="exspec-") as here:
                yield (place := Path(here) / "written")
                attempt(lambda: self._make_parent(path))
                attempt(lambda: self.fs.put_file(str(place), path))

    def move(self, name: str, new: str) -> None:
        """Give a file another name. Raises FileNotFoundError where it is not there: it may have been moved before."""
        here, there = f"{self.path}/{name}", f"{self.path}/{new}"
        if self.local:
            Path(here).replace(there)
        elif self.whole_puts:
            self.fs.invalidate_cache()
            attempt(lambda: self._copy(here, there))
            self.remove(name)
        else:
            attempt(lambda: self.fs.mv(here, there))

    def copy(self, name: str, other: "Folder") -> None:
        """Put a file into another folder of the same file system, under its name."""
        here, there = f"{self.path}/{name}", f"{other.path}/{name}"
        if self.local:
            Path(there).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here, there)
        else:
            attempt(lambda: self._make_parent(there))
            attempt(lambda: self._copy(here, there))

    def _copy(self, here: str, there: str) -> None:
        """Copy to the end: Azure may answer before it has copied, and what was removed meanwhile is lost."""
        self.fs.cp_file(here, there)
        if hasattr(self.fs, "service_client"):  # adlfs's, and only its
            while (status := _copy_status(self.fs, there)) == "pending":
                time.sleep(0.2)
            if status in ("aborted", "failed"):
                raise OSError(f"{there}: the store {status} the copy")

    def remove(self, name: str) -> None:
        """Remove the file if it is there."""
        with suppress(FileNotFoundError):
            attempt(lambda: self.fs.rm_file(f"{self.path}/{name}"))

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Leave no folder behind on a local disk where there was none before, unless something has come into it."""
        there = not self.local or self.exists("")
        try:
            yield
        finally:
            if not there and not any(files for _, _, files in os.walk(self.path)):
                shutil.rmtree(self.path, ignore_errors=True)

    def each(self, action: Callable[[str], T], names: Iterable[str]) -> list[T]:
        """What an action gives for every name, several at a time."""
        return at_once(action, names)


def at_once(action: Callable[[A], T], items: Iterable[A]) -> list[T]:
    """What an action, one that waits for a store, gives for every item, in order.

    No thread outlives it. A generator must not keep a pool while it is suspended: what Python's collector closes, it
    closes in any thread, at any moment, and one that is just starting would wait for itself.
    """
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(action, items))


def _write_local(place: Path, content: bytes, name: Callable[[Path, Path], Any]) -> None:
    """A temporary file beside the place, made durable, then named in one step."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        name(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def _copy_status(fs: Any, path: str) -> str | None:
    """How far Azure has come with the copy that the file is; None where it is none."""

    async def ask() -> Any:
        container, name, _ = fs.split_path(path)
        async with fs.service_client.get_blob_client(container, name) as blob:
            return (await blob.get_blob_properties()).copy.status

    try:
        return asyn.sync(fs.loop, ask)  # type: ignore[no-any-return]
    except Exception as error:
        raise FileNotFoundError(path) if _status(error) == 404 else error from error


def _was_there(error: OSError) -> bool:
    """A store refused to create what exists; some say so only by the status of their answer."""
    answer = getattr(error.__cause__, "response", None) or {}
    return isinstance(error, FileExistsError) or answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412


def etag(info: dict[str, Any]) -> str:
    """What tells a changed file, as far as its file system knows; empty where it does not.

    What follows from the content comes first: the same bytes, written anew, are no change.
    """
    settings = info.get("content_settings") or {}  # Azure's: as a mapping, or an object like one
    found = [*(info.get(k) for k in ("md5Hash", "crc32c", "content_md5")), settings.get("content_md5")]
    found += [info.get(k) for k in ("ETag", "etag", "mtime", "LastModified", "created")]
    told = next((value for value in found if value), "")
    return told.hex() if isinstance(told, bytes | bytearray) else str(told).strip('"')


def attempt(action: Callable[[], T]) -> T:
    """Run an idempotent action, again and again while the failure may pass: connections, throttling, 5xx."""
    retrying = Retrying(
        retry=retry_if_exception(_may_pass),
        wait=wait_random_exponential(multiplier=0.5, max=20),
        stop=stop_after_delay(PATIENCE),
        reraise=True,
    )
    return retrying(action)


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, PERMANENT) or getattr(error, "errno", None) in HOPELESS:
        return False
    text = f"{type(error).__name__} {error}"
    if any(word in text for word in REFUSALS):
        return False
    status = _status(error)
    if status and 400 <= status < 500 and status not in (408, 429) and "PendingCopyOperation" not in text:
        return False
    return isinstance(error, OSError) or type(error).__module__.startswith(CLIENTS)


def _status(error: BaseException) -> int | None:
    """The HTTP status that Google's or Azure's client tells, where it does."""
    client = type(error).__module__
    told = getattr(error, "code" if client.startswith("gcsfs") else "status_code", None)
    return int(str(told)) if str(told).isdecimal() else None
