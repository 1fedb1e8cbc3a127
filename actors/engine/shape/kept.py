"""Measurements that later processes on this machine start with: seconds of forwards, and the shape that was chosen."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from exspec.actors.engine.cache import cache_folder, write_whole
from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.faults import warn_once

OWN = ("pages", "attention", "capacity", "devices")  # of each job
NAMES = {field.name for field in fields(EngineConfig)} - set(OWN)
PACKAGES = ("exspec", "torch", "transformers")  # whose versions may change the speed


class Kept:
    """The measurements of one pair of models on this kind of machine, in a file of the cache folder.

    about: what they are valid for; its hash names the file. Another process may replace the file at any time.
    """

    def __init__(self, about: dict[str, Any], folder: Path) -> None:
        text = json.dumps(about, sort_keys=True)
        self.path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
        self.about = about

    @classmethod
    def of(cls, models: dict[str, str], dtype: str, machine: dict[str, str], threads: int) -> Self:
        """models: what identifies the files of target and draft. machine: what decides the speed of its forwards."""
        versions = {name: version(name) for name in PACKAGES}
        about = {"models": models, "dtype": dtype, "machine": machine, "threads": threads, "versions": versions}
        return cls(about, cache_folder() / "measured")

    def seconds(self, form: str) -> dict[str, float]:
        """Seconds of forwards by name. form: the settings that they were measured with."""
        return dict(self._read()["seconds"].get(form, {}))

    def keep_seconds(self, form: str, seconds: dict[str, float]) -> None:
        found = self._read()
        found["seconds"].setdefault(form, {}).update(seconds)
        self._write(found)

    def shape(self) -> dict[str, Any] | None:
        """The settings of the shape that the last calibration chose; None if there was none."""
        found: dict[str, Any] | None = self._read()["shape"]
        return found if found and set(found) == NAMES else None

    def keep_shape(self, config: EngineConfig) -> None:
        shape = {name: value for name, value in asdict(config).items() if name in NAMES}
        self._write(self._read() | {"shape": shape})

    def _read(self) -> dict[str, Any]:
        """What the file holds; a file that is not there or cannot be read holds nothing."""
        found: dict[str, Any] = {"about": self.about, "seconds": {}, "shape": None}
        with suppress(OSError, ValueError):
            found |= json.loads(self.path.read_text(encoding="utf-8"))
        return found

    def _write(self, found: dict[str, Any]) -> None:
        try:
            write_whole(self.path, json.dumps(found, indent=1).encode())
        except OSError as error:
            warn_once(f"measurements are not kept for later jobs: {error}")
