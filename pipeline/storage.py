"""Files behind fsspec URLs, with retries. A file is read whole, and written whole or not at all."""

import errno
import os
import shutil
import socket
import sys
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
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from exspec.pipeline.errors import JobError
from exspec.pipeline.secrets import has_user, no_url, redacted

A = TypeVar("A")
T = TypeVar("T")
STREAMS = 16  # concurrent file operations
STAGED, PROBE = "_staged", "_probe"  # a subfolder, and a prefix of probe files; readers ignore both
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}
PATIENCE = 180  # seconds of retries
SILENT = 3.0  # seconds of retries before the user is told
said: float = -PATIENCE  # when
PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
REFUSALS = (
    "NoCredentials", "PartialCredentials", "ClientAuthentication", "InvalidAccessKey", "SignatureDoesNotMatch",
    "NoSuchBucket", "ParamValidation", "OSError Forbidden: ",
)  # fmt: skip
# Codes of S3 that another attempt may cure, though their HTTP status says that the request is wrong.
PASSING = {"BadDigest", "ConditionalRequestConflict", "IncompleteBody", "OperationAborted", "RequestTimeout"}
CLIENTS = ("botocore", "aiohttp", "gcsfs", "google.auth", "azure.core")  # modules whose errors are not OSErrors
HOPELESS = {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ENAMETOOLONG}


class Folder:
    """A folder on a file system. It pickles as URL and options, so every process opens its own connection.

    url: a path or an fsspec URL. options: for fsspec. S3 also reads endpoint and credentials from the AWS variables.
    """

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.url, self.options = url.rstrip("/") or "/", options or {}

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "options": self.options}

    @cached_property
    def _connection(self) -> tuple[Any, str]:
        refuse_user(self.url)
        if reason := no_url(self.url):
            raise JobError(reason)
        try:
            return fsspec.url_to_fs(self.url, **self.options)  # type: ignore[no-any-return]
        except (ImportError, ValueError) as error:
            raise JobError(f"{self.url}: {error}; expected a path, or a URL that fsspec can open") from error

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
        """Names of the files in the folder or a subfolder, not recursive; empty if it does not exist."""
        return set(self.sizes(below))

    def sizes(self, below: str = "") -> dict[str, int]:
        """Sizes of the files in the folder or a subfolder, not recursive, by name."""
        try:
            return attempt(lambda: self._listed(f"{self.path}/{below}".rstrip("/")))
        except FileNotFoundError:
            return {}

    def _listed(self, path: str) -> dict[str, int]:
        if self.local:  # one system call for many names; fsspec makes several per file
            found = {}
            for entry in os.scandir(path):
                with suppress(FileNotFoundError):  # it was removed meanwhile
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
            return found
        self.fs.invalidate_cache()
        files = (f for f in self.fs.ls(path, detail=True) if f["type"] != "directory")
        return {str(f["name"]).rsplit("/", 1)[-1]: int(f["size"] or 0) for f in files}

    def refuse_links(self, *names: str) -> None:
        """Raises JobError if a local subfolder is a link: files where it leads would be moved and removed."""
        for name in names if self.local else ():
            if Path(f"{self.path}/{name}").is_symlink():
                raise JobError(f"{self.url}/{name}: is a link; expected a folder")

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if it does not exist."""
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
        """When the file was written, by the store's clock, in seconds; None if the store does not say."""
        self.fs.invalidate_cache()
        try:
            return float(attempt(lambda: self.fs.modified(f"{self.path}/{name}")).timestamp())
        except (NotImplementedError, AttributeError, KeyError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write the whole file; replaces an existing one."""
        attempt(lambda: self._put(f"{self.path}/{name}", content))

    def _put(self, path: str, content: bytes) -> None:
        if self.local:
            _write_local(Path(path), content, Path.replace)
        else:
            self._make_parent(path)
            self.fs.pipe_file(path, content)

    def _make_parent(self, path: str) -> None:
        """Create the parent folder. Object stores need none."""
        if not self.whole_puts:
            self.fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)

    def create(self, name: str, content: bytes) -> bool:
        """Write the whole file unless it exists. Of several writers, one succeeds. Returns whether it was this one.

        The content must be unique: if the store's response is lost, the content shows which process was first.
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
                with suppress(Exception):  # leftovers do no harm
                    self.fs.rm_file(temporary)
                raise FileExistsError(path) if self.fs.exists(path) else error from error

    @property
    def whole_puts(self) -> bool:
        """Whether the store writes files in one step, like object stores. Others may leave half a file."""
        kinds = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        return bool(kinds & OBJECT_STORES)

    def check_create(self) -> None:
        """Raises JobError if two writers can create the same file: then two runs could write to one output."""
        name = f"{PROBE}-{uuid.uuid4().hex}"
        try:
            if not self.create(name, b"first") or self.create(name, b"second") or self.read(name) != b"first":
                raise JobError(
                    f"{self.url}: the store lets a second writer replace a file that another one created, so two runs "
                    "could overwrite each other; expected a local disk with hard links, S3, GCS, Azure, or a store "
                    "that never overwrites when it creates or renames a file"
                )
        finally:
            self.remove(name)

    def stage(self, content: bytes, prefix: str) -> str:
        """Write a staged file and return its name. Every attempt has a new name, which is never used again."""

        def put() -> str:
            name = f"{STAGED}/{prefix}-{uuid.uuid4().hex}"
            self._put(f"{self.path}/{name}", content)
            return name

        return attempt(put)

    @contextmanager
    def staging(self, prefix: str) -> Iterator[tuple[Path, str]]:
        """A local file to write to, and the name of the staged file that it becomes at the end of the block."""
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
        """A local file to write to. It replaces the named file, whole, at the end of the block."""
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

    @contextmanager
    def whole(self) -> Iterator["Folder"]:
        """The new folder to write to. It is removed if the block raises an exception.

        A local one has another name until the end of the block, so that it appears whole.
        """
        if not self.local:
            try:
                yield self
            except Exception:
                if self.exists(""):
                    self.fs.rm(self.path, recursive=True)
                raise
            return
        place = Path(self.path)
        hidden = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
        try:
            yield Folder(str(hidden), self.options)
            hidden.rename(place)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)

    def move(self, name: str, new: str) -> None:
        """Rename a file. Raises FileNotFoundError if it does not exist: it may have been moved already."""
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
        """Copy a file to another folder of the same file system, under the same name."""
        here, there = f"{self.path}/{name}", f"{other.path}/{name}"
        if self.local:
            Path(there).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here, there)
        else:
            attempt(lambda: self._make_parent(there))
            attempt(lambda: self._copy(here, there))

    def _copy(self, here: str, there: str) -> None:
        """Copy and wait for the end. Azure may respond earlier; if the source is removed then, it is lost."""
        self.fs.cp_file(here, there)
        if hasattr(self.fs, "service_client"):  # only adlfs has it
            while (status := _copy_status(self.fs, there)) == "pending":
                time.sleep(0.2)
            if status in ("aborted", "failed"):
                raise OSError(f"{there}: the store {status} the copy")

    def remove(self, name: str) -> None:
        """Remove the file if it exists."""
        with suppress(FileNotFoundError):
            attempt(lambda: self.fs.rm_file(f"{self.path}/{name}"))

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Remove a local folder at the end of the block if it did not exist before and contains no files, and those of
        its parents that are new and empty."""
        try:
            place = Path(self.path)
        except JobError:  # of a URL that cannot be opened; the job is refused for it
            yield
            return
        new = [folder for folder in (place, *place.parents) if self.local and not folder.exists()]
        try:
            yield
        finally:
            below = [folder for folder, _, _ in os.walk(place, topdown=False)] if new else []
            for folder in dict.fromkeys([*map(Path, below), *new]):
                with suppress(OSError):  # not empty
                    folder.rmdir()

    def each(self, action: Callable[[str], T], names: Iterable[str]) -> list[T]:
        """Results of an action for every name, run concurrently."""
        return at_once(action, names)


def refuse_user(url: str) -> None:
    """Raises JobError if a user or password is in the URL of a bucket: it would count as the bucket's name."""
    if has_user(url):
        raise JobError(
            f"{url.rstrip('/')}: a user or password is in the URL, where no store looks for it; set it in "
            'storage_options, such as {"key": ..., "secret": ...}, or in the environment'
        )


def at_once(action: Callable[[A], T], items: Iterable[A]) -> list[T]:
    """Results of an action for every item, in order, run concurrently.

    No thread outlives the call. A generator must not hold a pool while suspended: Python's garbage collector may close
    it in any thread, even in one that is just starting, which would wait for itself.
    """
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(action, items))


def _write_local(place: Path, content: bytes, name: Callable[[Path, Path], Any]) -> None:
    """Write a temporary file in the same folder, sync it, then rename or link it in one step."""
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
    """The status of Azure's copy to this path; None if there is no copy."""

    async def ask() -> Any:
        container, name, _ = fs.split_path(path)
        async with fs.service_client.get_blob_client(container, name) as blob:
            return (await blob.get_blob_properties()).copy.status

    try:
        return asyn.sync(fs.loop, ask)  # type: ignore[no-any-return]
    except Exception as error:
        raise FileNotFoundError(path) if _status(error) == 404 else error from error


def _was_there(error: OSError) -> bool:
    """Whether a store refused to create a file because it exists. Some stores only set the status code."""
    answer = getattr(error.__cause__, "response", None) or {}
    return isinstance(error, FileExistsError) or answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412


def etag(info: dict[str, Any]) -> str:
    """What changes when the file changes, as far as the file system knows; else empty.

    Values that depend on the content alone come first: writing the same bytes again is not a change.
    """
    settings = info.get("content_settings") or {}  # Azure: a mapping, or an object like one
    found = [*(info.get(k) for k in ("md5Hash", "crc32c", "content_md5")), settings.get("content_md5")]
    found += [info.get(k) for k in ("ETag", "etag", "mtime", "LastModified", "created")]
    first = next((value for value in found if value), "")
    return first.hex() if isinstance(first, bytes | bytearray) else str(first).strip('"')


def attempt(action: Callable[[], T]) -> T:
    """Run an idempotent action, with retries while the failure is transient: connections, throttling, 5xx."""
    retrying = Retrying(
        retry=retry_if_exception(_is_transient),
        wait=wait_random_exponential(multiplier=0.5, max=20),
        stop=stop_after_delay(PATIENCE),
        before_sleep=_say,
        reraise=True,
    )
    return retrying(action)


def _say(attempts: RetryCallState) -> None:
    """Print what is retried, once it lasts. Of calls that fail at once, at the same time, one prints."""
    global said
    now = time.monotonic()
    if attempts.seconds_since_start and attempts.seconds_since_start > SILENT and now - said > PATIENCE:
        said = now
        error = attempts.outcome and attempts.outcome.exception()
        reason = redacted(" ".join(f"{type(error).__name__}: {error}".split()))
        print(f"the store fails ({reason}); trying again for {PATIENCE} s", file=sys.stderr, flush=True)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, PERMANENT) or getattr(error, "errno", None) in HOPELESS:
        return False
    text = f"{type(error).__name__} {error}"
    if any(word in text for word in REFUSALS) or _unknown_host(error):
        return False
    status = _status(error)
    if status and 400 <= status < 500 and status not in (408, 429) and "PendingCopyOperation" not in text:
        return False
    return isinstance(error, OSError) or type(error).__module__.startswith(CLIENTS)


def _unknown_host(error: BaseException | None) -> bool:
    """Whether a name server answered that there is no such host. If none answers, the error is another one."""
    seen = set()  # the causes may form a circle
    while error is not None and id(error) not in seen:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error of a store's client, if it has one that counts."""
    if answer := getattr(error.__cause__, "response", None):  # S3
        return None if answer["Error"].get("Code") in PASSING else answer["ResponseMetadata"].get("HTTPStatusCode")
    client = type(error).__module__
    status = getattr(error, "code" if client.startswith("gcsfs") else "status_code", None)
    return int(str(status)) if str(status).isdecimal() else None
