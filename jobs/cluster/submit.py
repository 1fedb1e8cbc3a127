"""`exspec submit`: a command with its arguments, checked here and sent to a Ray cluster as a job."""

import inspect
import json
import os
import re
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from exspec.jobs.cluster.client import MARK, Cluster
from exspec.jobs.cluster.submitted import ARGUMENTS
from exspec.jobs.cluster.wheel import build_wheel
from exspec.jobs.demo import DEMO_PAIR
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import load_job, read_job_file
from exspec.pipeline.secrets import anonymous

COMMANDS = ("run", "label", "audit")
PLACES = ("input", "output", "target", "draft")  # settings and arguments that may be paths


@dataclass(frozen=True)
class Call:
    """A command as the cluster will run it: its arguments, the files that they name, and what may be shown of it."""

    command: str
    arguments: list[str]
    files: dict[str, bytes]
    shown: dict[str, str]


def submit(
    call: Call, cluster: Cluster, name: str | None, detach: bool, wheel: bool, env: list[str], gpus: float
) -> int:
    """Send the call and follow its log; returns the exit code, 0 at once with `detach`."""
    if name is not None and not re.fullmatch(r"[\w.-]+", name):
        raise JobError(f"--name {name!r}: expected letters, digits and any of _ . -")
    variables = dict(_variable(text) for text in env)
    with tempfile.TemporaryDirectory(prefix="exspec-") as temporary:
        folder = Path(temporary, "job")
        folder.mkdir()
        (folder / ARGUMENTS).write_text(json.dumps([call.command, *call.arguments]), encoding="utf-8")
        for file, content in call.files.items():
            (folder / file).write_bytes(content)
        environment: dict[str, Any] = {"working_dir": str(folder), "env_vars": variables}
        if wheel:
            environment["py_modules"] = [str(build_wheel(Path(temporary)))]
        job = cluster.submit(
            entrypoint="python -m exspec.jobs.cluster.submitted",
            submission_id=name or f"exspec-{call.command}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
            runtime_env=environment,
            metadata={MARK: version(), "command": call.command, **call.shown},
            entrypoint_num_gpus=gpus or None,
        )
    if detach:
        print(f"sent; follow it: exspec logs {job} --follow; stop it: exspec cancel {job}", file=sys.stderr)
        print(job)
        return 0
    print(f"{job}: Ctrl-C leaves it running; see it again: exspec logs {job} --follow", file=sys.stderr)
    return cluster.follow(job)


def version() -> str:
    from importlib.metadata import version as installed

    return installed("exspec")


def check(command: Any, values: dict[str, Any], arguments: list[str]) -> Call:
    """Everything about a call that can be known here: its settings, and that its paths mean something elsewhere.

    command: as the command line knows it. values: its parameters as parsed from `arguments`. Raises JobError.
    """
    arguments, files = _with_files(command, values, arguments)
    model = getattr(command.callback, "settings", None)
    places = values
    if model is not None:
        file = Path(values["job"]) if values["job"] is not None else None
        flags = {n: _plain(v) for n, v in values.items() if n in model.model_fields and v not in (None, (), [])}
        checked = load_job(model, file, flags, DEMO_PAIR)
        if checked.ray_address is not None:
            raise JobError("ray_address: a job that is submitted runs on the cluster that it is sent to; leave it out")
        places = read_job_file(file) | flags
        arguments += [
            word for name, value in checked.inlined.items() for word in (f"--{name.replace('_', '-')}", value)
        ]
    shown = {}
    for key in PLACES:
        given = places.get(key) or []
        for place in [given] if isinstance(given, str) else given:
            _check_place(key, place)
        if key in ("input", "output") and given:
            shown[key] = anonymous(given if isinstance(given, str) else " ".join(given))
    return Call(command.name, arguments, files, shown)


def _with_files(command: Any, values: dict[str, Any], arguments: list[str]) -> tuple[list[str], dict[str, bytes]]:
    """The arguments with the names that their files have in the job's folder, and the contents of those files."""
    arguments, files = list(arguments), {}
    annotations = {p.name: p.annotation for p in inspect.signature(command.callback).parameters.values()}
    for parameter in command.params:
        value = values.get(parameter.name)
        if value is None or not _is_path(annotations.get(parameter.name)):
            continue
        try:
            content = Path(value).read_bytes()
        except OSError as error:
            raise JobError(f"{parameter.opts[0]} {value}: {error.strerror}") from error
        name = f"{parameter.name}{Path(value).suffix}"
        files[name] = content
        for i, argument in enumerate(arguments):
            for option in parameter.opts:
                if argument == option:
                    arguments[i + 1] = name
                elif argument.startswith(f"{option}="):
                    arguments[i] = f"{option}={name}"
    return arguments, files


def _is_path(annotation: Any) -> bool:
    return annotation is Path or any(_is_path(part) for part in get_args(annotation))


def _check_place(key: str, place: str) -> None:
    if "://" in place or (key in ("target", "draft") and not Path(place).is_dir()):
        return  # a URL or a hub id
    if not Path(place).is_absolute():
        raise JobError(
            f"{key} {place}: a relative path means nothing on a cluster; expected a URL such as s3://bucket/folder, or "
            "the whole path of a folder that all nodes share"
        )
    print(f"{key} {place}: taken for a folder that all nodes of the cluster share", file=sys.stderr)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given and name not in os.environ:
        raise JobError(f"--env {name}: it is not set here; set it, or give --env {name}=VALUE")
    return name, value if given else os.environ[name]
