"""Where a model's files lie: hub ids and folders as they are, fsspec URLs as a copy in this node's cache folder.

Hub ids are left to transformers, whose own cache (HF_HOME) holds a lock of its own for every file.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from exspec.pipeline.errors import JobError
from exspec.pipeline.storage import Folder, attempt, etag

STREAMS = 4  # files fetched at once
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"}


@dataclass(frozen=True)
class File:
    """A file of a model behind a URL. name: its path below the model's folder."""

    name: str
    size: int
    etag: str


def local_model(name: str, options: dict[str, Any], weights: bool = True) -> str:
    """What transformers can load a model from: hub ids and folders as they are, for a URL a folder on this node.

    A node fetches a model once, whichever of its processes asks first; the others wait. What changed behind the URL is
    another model, in another folder. A download that was killed is taken up again with the files that it had finished.

    options: of the file system, as fsspec takes them. weights: False leaves out the weights, for those who need the
    configuration and the tokenizer alone.

    Raises JobError where the URL cannot be read.
    """
    if "://" not in name:
        return name
    source = Folder(name, options)
    files = _files(source)
    whole = cache_folder() / "models" / f"{source.path.rsplit('/', 1)[-1]}-{_digest(source.path, files)}"
    if weights or whole.is_dir():
        return str(_fetched(source, files, whole))
    light = [f for f in files if Path(f.name).suffix not in WEIGHTS]
    return str(_fetched(source, light, whole.with_name(f"{whole.name}-without-weights")))


def cache_folder() -> Path:
    """EXSPEC_CACHE, or exspec in the user's cache folder. It should lie on a disk of the node itself."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EXSPEC_CACHE") or Path(user) / "exspec")


def model_digest(name: str, revision: str | None, options: dict[str, Any]) -> str:
    """What identifies a model's files: for a hub id its commit, for a URL a digest of names, sizes and etags, for a
    folder one of names, sizes and contents, of large files their two ends."""
    if "://" in name:
        return _digest("", _files(Folder(name, options)))
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=revision)
        return Path(found).parent.name if isinstance(found, str) else str(revision)
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        digest.update(json.dumps([path.relative_to(folder).as_posix(), size]).encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _files(source: Folder) -> list[File]:
    def listing() -> dict[str, dict[str, Any]]:
        source.fs.invalidate_cache()
        return dict(source.fs.find(source.path, detail=True))

    try:
        found = attempt(listing)
    except JobError:
        raise
    except Exception as error:  # an unreachable or refusing store has many names
        raise JobError(f"{source.url}: cannot be listed: {type(error).__name__}: {error}") from error
    files = [
        File(path[len(source.path) :].lstrip("/"), int(info["size"]), etag(info))
        for path, info in sorted(found.items())
        if info["type"] == "file" and not path.endswith("/")
    ]
    if not any(file.name == "config.json" for file in files):
        raise JobError(f"{source.url}: expected a folder with a model's files, and found no config.json in it")
    return files


def _digest(place: str, files: list[File]) -> str:
    content = json.dumps([place, *([f.name, f.size, f.etag] for f in files)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _fetched(source: Folder, files: list[File], target: Path) -> Path:
    """The folder with the files. It is there whole or not at all: it gets its name when the last file is in it."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_dir():
            return target
        partial = target.with_name(f"{target.name}.partial")
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda file: _fetch(source, file, partial / file.name), files))
        if not set(files) <= set(_files(source)):
            raise JobError(f"{source.url}: the model changed while it was fetched; start again")
        partial.rename(target)
    return target


def _fetch(source: Folder, file: File, path: Path) -> None:
    """One file, unless an earlier download has finished it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    incoming = path.with_name(f"{path.name}.incoming")
    attempt(lambda: source.fs.get_file(f"{source.path}/{file.name}", str(incoming)))
    with incoming.open("rb") as written:
        os.fsync(written.fileno())
        size = os.fstat(written.fileno()).st_size
    if size != file.size:
        raise JobError(f"{source.url}/{file.name}: {size} bytes came, expected {file.size}")
    incoming.rename(path)
