"""The folder for what later processes on this machine reuse."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """EXSPEC_CACHE, or exspec in the user's cache folder. It should be on a local disk of the node."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EXSPEC_CACHE") or Path(user) / "exspec")
