"""Local files of models: fsspec URLs are copied to this node's cache folder; folders and hub ids stay as they are.

transformers downloads hub ids itself, to its own cache (HF_HOME), with a lock per file.
"""

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from filelock import FileLock
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from exspec.actors.engine.cache import cache_folder, write_whole
from exspec.actors.engine.faults import first_line
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import Job
from exspec.pipeline.secrets import anonymous, redacted
from exspec.pipeline.storage import Folder, at_once, attempt, etag

OFFLINE = constants.HF_HUB_OFFLINE  # whether the user asks for it
HUB_PATIENCE = 20  # seconds to wait for the hub to resolve a revision
SAFE = ".safetensors"
WEIGHTS = {SAFE, ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"}


@dataclass(frozen=True)
class ModelFile:
    """A file of a model behind a URL. name: the path below the model's folder."""

    name: str
    size: int
    etag: str


def local_model(name: str, options: dict[str, Any], weights: bool = True, config: str = "config.json") -> str:
    """What transformers can load a model from: a hub id, a folder, or for a URL a folder on this node.

    The first process on a node that needs a model downloads it; the others wait. If the files behind the URL change,
    they are another model in another folder. An interrupted download resumes with the files that it finished.

    options: for fsspec. weights: False downloads configuration and tokenizer only. config: a file that must be there.
    Raises JobError if the URL cannot be read.
    """
    if "://" not in name:
        return name
    source = Folder(name, options)
    files = _files(source, config)
    whole = cache_folder() / "models" / f"{source.path.rsplit('/', 1)[-1]}-{_digest(source.path, files)}"
    if weights or whole.is_dir():
        return str(_fetched(source, files, whole))
    light = [f for f in files if Path(f.name).suffix not in WEIGHTS]
    return str(_fetched(source, light, whole.with_name(f"{whole.name}-without-weights")))


def resolved(job: Job) -> Job:
    """The job with revisions of hub ids replaced by their present commits, so that all processes load the same.

    Folders and URLs stay as they are. Raises JobError for a hub id if the local cache does not have it and the hub
    cannot be reached.
    """
    commits, problems = {}, []
    _work_offline(OFFLINE)
    for role in ("target", "draft"):
        name, revision = getattr(job, role), getattr(job, f"{role}_revision")
        if name is not None and "://" not in name and not Path(name).is_dir():
            try:
                commits[f"{role}_revision"] = _commit(name, revision)
            except JobError as error:
                problems.append(f"{role} {error}")
    if problems:
        raise JobError(*problems)
    return job.model_copy(update=commits)


def model_digest(name: str, revision: str | None, options: dict[str, Any], config: str = "config.json") -> str:
    """What identifies a model's files: the commit of a hub id; for a folder a digest of names and contents; for a URL a
    digest of names, sizes and etags."""
    if "://" in name:
        return _digest("", _files(Folder(name, options), config))
    folder = Path(name)
    if not folder.is_dir():
        return str(_cached_commit(name, revision) or revision)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = at_once(_content, paths)
    names = [path.relative_to(folder).as_posix() for path in paths]
    listed = json.dumps(list(zip(names, contents, strict=True)))
    return f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}"


def weight_bytes(name: str, options: dict[str, Any]) -> int | None:
    """Bytes of a model's weights in safetensors; None for a hub id."""
    if "://" in name:
        return sum(file.size for file in _files(Folder(name, options)) if file.name.endswith(SAFE))
    return sum(file.stat().st_size for file in Path(name).glob(f"*{SAFE}")) if Path(name).is_dir() else None


def _commit(name: str, revision: str | None) -> str | None:
    """The commit of a hub id. Raises JobError if neither the hub nor the local cache can be asked for it.

    Without a network this process and its children use the cache only: the hub's client would try for half a minute to
    download each file that the cache lacks.
    """
    cached = _cached_commit(name, revision)
    if cached and cached == revision:
        return revision
    try:
        return HfApi().model_info(name, revision=revision, timeout=HUB_PATIENCE).sha or revision
    except (HfHubHTTPError, HFValidationError):  # the cache may have it; else loading it raises the error
        return cached or revision
    except Exception as error:  # of many types
        if cached is None:
            place = f"{name} at {revision}" if revision else name
            raise JobError(
                f"{place}: no such folder, not in the local cache of the hub, and the hub cannot be reached "
                f"({first_line(error)}); correct the name, or connect to the hub"
            ) from error
        _work_offline(True)
        return cached


def _work_offline(offline: bool) -> None:
    constants.HF_HUB_OFFLINE = offline
    os.environ["HF_HUB_OFFLINE"] = str(int(offline))


def _cached_commit(name: str, revision: str | None) -> str | None:
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a hub id; loading it raises the error
        return None
    return Path(found).parent.name if isinstance(found, str) else None


def _content(path: Path) -> str:
    """The sha256 of a file. The cache holds it by the file's present stat, so that the file is read once.

    Concurrent writers write the same digest, each in one step. A cached text that is not a digest is ignored.
    """
    state = path.stat()
    key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    note = cache_folder() / "digests" / "-".join(map(str, key))
    with suppress(OSError, UnicodeDecodeError):
        if re.fullmatch("[0-9a-f]{64}", noted := note.read_text(encoding="ascii")):
            return noted
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with suppress(OSError):  # a cache that cannot be written only costs time
        write_whole(note, digest.encode())
    return digest


def _files(source: Folder, config: str | None = None) -> list[ModelFile]:
    """The files behind a URL. config: one that must be there. Raises JobError."""

    def listing() -> dict[str, dict[str, Any]]:
        source.fs.invalidate_cache()
        return dict(source.fs.find(source.path, detail=True))

    try:
        found = attempt(listing)
    except JobError:
        raise
    except Exception as error:  # stores raise errors of many types
        place, reason = anonymous(source.url), type(error).__name__
        if place == source.url:  # else the message may contain a password
            reason = f"{reason}: {redacted(str(error))}"
        raise JobError(f"{place}: cannot be listed: {reason}") from None
    files = [
        ModelFile(_checked(path.removeprefix(source.path).removeprefix("/"), source), int(info["size"]), etag(info))
        for path, info in sorted(found.items())
        if info["type"] == "file" and not path.endswith("/") and path != source.path
    ]
    if config and not any(file.name == config for file in files):
        raise JobError(f"{anonymous(source.url)}: expected a folder with a model's files, but it has no {config}")
    return files


def _checked(name: str, source: Folder) -> str:
    """The name, if it stays below the download folder: keys of a store can be anything."""
    if {"", ".", ".."} & set(name.split("/")) or "\\" in name or "\0" in name or PureWindowsPath(name).drive:
        raise JobError(f"{anonymous(source.url)}: invalid file name {name!r}; expected a path below the folder")
    return name


def _digest(place: str, files: list[ModelFile]) -> str:
    content = json.dumps([place, *([f.name, f.size, f.etag] for f in files)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _fetched(source: Folder, files: list[ModelFile], target: Path) -> Path:
    """The folder with the files. It gets its name when it is complete."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_dir():
            return target
        partial = target.with_name(f"{target.name}.partial")
        at_once(lambda file: _fetch(source, file, partial / file.name), files)
        if not set(files) <= set(_files(source)):
            raise JobError(f"{anonymous(source.url)}: the model changed during the download; start again")
        partial.rename(target)
    return target


def _fetch(source: Folder, file: ModelFile, path: Path) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    incoming = path.with_name(f"{path.name}.incoming")
    attempt(lambda: source.fs.get_file(f"{source.path}/{file.name}", str(incoming)))
    with incoming.open("rb") as written:
        os.fsync(written.fileno())
        size = os.fstat(written.fileno()).st_size
    if size != file.size:
        raise JobError(f"{anonymous(source.url)}/{file.name}: received {size} bytes, expected {file.size}")
    incoming.rename(path)
