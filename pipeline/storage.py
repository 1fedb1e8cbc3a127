"""Files behind fsspec URLs: read whole, written whole or not at all, with retries around both."""

import errno
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from exspec.pipeline.errors import JobError

T = TypeVar("T")
PATIENCE = 180  # seconds of trying again
PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
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

    def names(self) -> set[str]:
        """Names of the files directly in the folder; empty where there is no folder."""

        def listing() -> list[str]:
            if self.local:  # one system call for many names, where fsspec asks for each file's details
                return [e.name for e in os.scandir(self.path)]
            self.fs.invalidate_cache()
            return [str(p) for p in self.fs.ls(self.path, detail=False)]

        try:
            found = attempt(listing)
        except FileNotFoundError:
            return set()
        return {name.rstrip("/").rsplit("/", 1)[-1] for name in found}

    def sizes(self) -> dict[str, int]:
        """Bytes of the files directly in the folder, by name."""
        if self.local:
            return {e.name: e.stat().st_size for e in os.scandir(self.path) if e.is_file()}
        self.fs.invalidate_cache()
        found = attempt(lambda: self.fs.ls(self.path, detail=True))
        return {str(f["name"]).rsplit("/", 1)[-1]: int(f["size"] or 0) for f in found}

    def read(self, name: str) -> bytes:
        return attempt(lambda: bytes(self.fs.cat_file(f"{self.path}/{name}")))

    def exists(self, name: str) -> bool:
        return bool(attempt(lambda: self.fs.exists(f"{self.path}/{name}")))

    def write(self, name: str, content: bytes, replace: bool = True) -> bool:
        """Write the file whole. Without `replace` the first writer wins: returns False where the file was there."""
        return attempt(lambda: self._write(f"{self.path}/{name}", content, replace))

    def remove(self, name: str) -> None:
        """Remove the file if it is there."""
        with suppress(FileNotFoundError):
            attempt(lambda: self.fs.rm_file(f"{self.path}/{name}"))

    def rename(self, name: str, new: str) -> None:
        """Give the file another name: in one step on a local disk, by a copy elsewhere."""
        if self.local:
            Path(f"{self.path}/{name}").replace(f"{self.path}/{new}")
            return
        self.fs.invalidate_cache()
        attempt(lambda: self.fs.cp_file(f"{self.path}/{name}", f"{self.path}/{new}"))
        self.remove(name)

    @contextmanager
    def staged(self, name: str) -> Iterator[Path]:
        """A local file to be written, which becomes the folder's file whole if the block ends without an error."""
        if self.local:
            temporary = Path(f"{self.path}/.{name}.{uuid.uuid4().hex}")
            try:
                yield temporary
                temporary.replace(f"{self.path}/{name}")
            finally:
                temporary.unlink(missing_ok=True)
        else:
            with tempfile.TemporaryDirectory(prefix="exspec-") as here:
                yield (temporary := Path(here) / "staged")
                attempt(lambda: self.fs.put_file(str(temporary), f"{self.path}/{name}"))

    def _write(self, path: str, content: bytes, replace: bool) -> bool:
        if self.local:
            return _write_local(Path(path), content, replace)
        try:
            self.fs.pipe_file(path, content, mode="overwrite" if replace else "create")
        except OSError as error:
            if not replace and _was_there(error):
                return False
            raise
        return True


def _write_local(path: Path, content: bytes, replace: bool) -> bool:
    """A temporary file beside the place, made durable, then moved there in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            temporary.replace(path)
            return True
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
            if path.exists():  # no hard links here: the check and the move are two steps
                return False
            temporary.replace(path)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _was_there(error: OSError) -> bool:
    """A store refused to create what exists; some say so only by the status of their answer."""
    answer = getattr(error.__cause__, "response", None) or {}
    return isinstance(error, FileExistsError) or answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412


def etag(info: dict[str, Any]) -> str:
    """What tells a changed file, as far as its file system knows; empty where it does not.

    What follows from the content comes first: the same bytes, written anew, are no change.
    """
    settings = info.get("content_settings") or {}  # Azure's
    found = [*(info.get(k) for k in ("md5Hash", "crc32c", "content_md5")), dict(settings).get("content_md5")]
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
    if any(word in text for word in ("NoCredentials", "InvalidAccessKey", "SignatureDoesNotMatch", "NoSuchBucket")):
        return False
    return isinstance(error, OSError) or type(error).__module__.startswith(("botocore", "aiohttp"))
