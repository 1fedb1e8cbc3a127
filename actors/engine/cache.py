"""What later processes on this machine reuse."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """EXSPEC_CACHE, or exspec in the user's cache folder. It should be on a local disk of the node."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EXSPEC_CACHE") or Path(user) / "exspec")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of the cache in one step: other processes read all of it or the file before it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    incoming = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        incoming.write_bytes(content)
        incoming.replace(path)
    except OSError:
        incoming.unlink(missing_ok=True)
        raise
