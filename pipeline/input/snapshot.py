"""Whether the input is unchanged since it was planned, by size and etag."""

import base64
import hashlib
import re
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Shard
from exspec.pipeline.storage import at_once, attempt, etag

PIECE = 16 << 20  # bytes that are read at once


class IrregularError(JobError):
    """A path that is not a regular file, so that reading it may block or never end."""


def locate(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """File system and path of a file or folder. `::` is part of the name here, not a chain of URLs."""
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*", url)
    fs, _ = fsspec.url_to_fs(scheme[0].partition("::")[0] if scheme else "/", **options)
    return fs, fs._strip_protocol(url)


def probe(fs: Any, path: str, known: Shard | None = None) -> tuple[int, str, str]:
    """Present size, etag and stamp of a file. A local file with the known stamp is not read again.

    Raises IrregularError.
    """
    if not isinstance(fs, LocalFileSystem):
        info = attempt(lambda: fs.info(path))
        return int(info["size"] or 0), etag(info), ""
    status = attempt(Path(path).stat)
    if not S_ISREG(status.st_mode):
        raise IrregularError(f"input {path}: is a pipe, socket, device or folder; expected a regular file")
    stamp = f"{status.st_mtime_ns}-{status.st_ino}"
    if known and (known.size, known.stamp) == (status.st_size, stamp):
        return known.size, known.etag, stamp
    return status.st_size, _digest(path, stamp), stamp


@lru_cache(maxsize=100_000)
def _digest(path: str, stamp: str) -> str:  # noqa: ARG001  (part of the cache key)
    def read() -> str:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    return attempt(read)


def same_start(fs: Any, path: str, planned: Shard) -> bool:
    """Whether a file begins with the planned bytes, to the end of a line, as far as their etag is a digest of them."""
    digests: list[Any] = [hashlib.blake2b(digest_size=16), hashlib.md5(usedforsecurity=False)]
    last = b""
    for begin in range(0, planned.size, PIECE):
        last = attempt(lambda: bytes(fs.cat_file(path, start=begin, end=min(begin + PIECE, planned.size))))  # noqa: B023
        for digest in digests:
            digest.update(last)
    known = [*(digest.hexdigest() for digest in digests), base64.b64encode(digests[1].digest()).decode()]
    return planned.etag in known and last.endswith(b"\n")


def difference(shard: Shard, fs: Any, path: str) -> str | None:
    """How a shard has changed since it was planned; None if it has not."""
    if not isinstance(fs, LocalFileSystem):
        fs.invalidate_cache()  # it may be as old as the plan
    try:
        size, content, _ = probe(fs, path, shard)
    except FileNotFoundError:
        return "has vanished since it was planned"
    except IrregularError:
        return "has changed since it was planned: it is no longer a regular file"
    if size != shard.size:
        return f"has changed since it was planned ({shard.size} bytes then, {size} now)"
    return None if content == shard.etag else f"has changed since it was planned ({size} bytes, but other content)"


def changed(shards: list[Shard], options: dict[str, Any]) -> dict[str, str]:
    """The shards that have changed since they were planned, by name, with how."""
    found = at_once(lambda shard: difference(shard, *locate(shard.url, options)), shards)
    return {shard.name: what for shard, what in zip(shards, found, strict=True) if what}


def vanished(shards: list[Shard], options: dict[str, Any]) -> set[str]:
    """Names of the shards whose files are gone."""

    def gone(shard: Shard) -> bool:
        fs, path = locate(shard.url, options)
        return not attempt(lambda: fs.exists(path))

    return {shard.name for shard, is_gone in zip(shards, at_once(gone, shards), strict=True) if is_gone}
