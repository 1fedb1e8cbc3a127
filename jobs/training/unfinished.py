"""The folder of a training that may be stopped and goes on later."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from exspec.pipeline.errors import JobError
from exspec.pipeline.secrets import anonymous

WORK = "_training"  # of the folder: what an unfinished training needs to go on
ASKED = "asked.json"


def asked_of(output: str, settings: Any) -> dict[str, Any]:
    """What was asked for, without secrets."""
    asked = {"output": output} | asdict(settings)
    return {name: anonymous(value) if isinstance(value, str) else value for name, value in asked.items()}


def check_folder(folder: Path, asked: dict[str, Any]) -> None:
    """Raise JobError if results may not be written there."""
    file = folder / WORK / ASKED
    if file.exists():
        before: dict[str, Any] = json.loads(file.read_text())
        if other := [name for name, value in asked.items() if before.get(name) != value]:
            raise JobError(
                f"{folder}: holds an unfinished training with {other[0]} {before.get(other[0])!r}, not "
                f"{asked[other[0]]!r}; ask for the same to go on, or choose a new folder"
            )
    elif not (folder / WORK).exists() and folder.exists() and any(folder.iterdir()):
        raise JobError(f"{folder}: holds something; expected an empty or a new folder, or an unfinished training")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """No other command works in the folder. Raises JobError if one does."""
    try:
        with FileLock(folder / WORK / "lock", timeout=0):
            yield
    except Timeout as error:
        raise JobError(f"{folder}: another command trains into this folder") from error


def note(folder: Path, asked: dict[str, Any], learned: str) -> None:
    """From now on the folder holds an unfinished training. learned: digest of its rows. Raises JobError if it began
    with others."""
    file = folder / WORK / ASKED
    if file.exists():
        if json.loads(file.read_text())["learned"] != learned:
            raise JobError(f"{folder}: its training began with other rows of the job; choose a new folder")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, asked | {"learned": learned})


def write(file: Path, values: Any, indent: int | None = 2) -> None:
    """Write values as JSON. A kill leaves no half of the file."""
    part = file.with_suffix(".part")
    try:
        part.write_text(json.dumps(values, indent=indent) + "\n")
    except OSError as error:  # of a full disk: without the file's name
        raise OSError(error.errno, error.strerror, str(part)) from error
    part.replace(file)
