"""`exspec submit`: checks a command and its arguments here, and sends them to a Ray cluster as a job."""

import inspect
import json
import os
import re
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from exspec.jobs.cluster.client import MARK, Cluster
from exspec.jobs.cluster.package import copy_package
from exspec.jobs.options import demo_models
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import load_job, read_job_file
from exspec.pipeline.secrets import anonymous

COMMANDS = ("run", "label", "score", "embed", "audit")
PATHS = ("input", "output", "target", "draft", "adapter", "adapters")  # settings and arguments that may be paths
ARGUMENTS = "arguments.json"  # the file with the command line, in the job's folder


@dataclass(frozen=True)
class Call:
    """A command for the cluster: its arguments, the files that they name, and the paths that the dashboard may show."""

    command: str
    arguments: list[str]
    files: dict[str, bytes]
    shown: dict[str, str]


def submit(
    call: Call, cluster: Cluster, name: str | None, detach: bool, send: bool, env: list[str], gpus: float
) -> int:
    """Send the call, follow the log and return the exit code. With `detach`, return 0 without following."""
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
        if send:
            environment["py_modules"] = [str(copy_package(Path(temporary), folder))]
        job = cluster.submit(
            entrypoint=f"python -m exspec.jobs.cluster.submitted {ARGUMENTS}",
            submission_id=name or f"exspec-{call.command}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
            runtime_env=environment,
            metadata={MARK: version("exspec"), "command": call.command, **call.shown},
            entrypoint_num_gpus=gpus or None,
        )
    if detach:
        print(f"sent. To follow it: exspec logs {job} --follow. To stop it: exspec cancel {job}", file=sys.stderr)
        print(job)
        return 0
    print(f"{job}: Ctrl-C leaves it running. To follow it again: exspec logs {job} --follow", file=sys.stderr)
    return cluster.follow(job)


def parse(context: Any, name: str, arguments: list[str]) -> Call:
    """Parse the arguments as the command itself would, and check them.

    context: the command line's context of `submit`. Raises JobError.
    """
    if name not in COMMANDS:
        raise JobError(f"submit {name}: expected one of {', '.join(COMMANDS)}, after the options of submit itself")
    command = context.parent.command.commands[name]
    own = {option for parameter in context.command.params for option in parameter.opts}
    known = {option for parameter in command.params for option in parameter.opts}
    if misplaced := [word for word in arguments if word.partition("=")[0] in own - known - {"--help"}]:
        option = misplaced[0].partition("=")[0]
        raise JobError(f"{option}: is an option of submit; put it before {name}: exspec submit {option} ... {name} ...")
    return check(command, command.make_context(name, list(arguments), parent=context).params, arguments)


def check(command: Any, values: dict[str, Any], arguments: list[str]) -> Call:
    """Check all that can be checked before a job is sent: its settings, and that its paths are valid on the cluster.

    command: the command line's own object. values: the parameters parsed from `arguments`. Raises JobError.
    """
    arguments, files = _with_files(command, values, arguments)
    model = getattr(command.callback, "settings", None)
    if model is not None:
        file = Path(values["job"]) if values["job"] is not None else None
        flags = {n: _plain(v) for n, v in values.items() if n in model.model_fields and v not in (None, (), [])}
        job = load_job(model, file, flags, demo_models(model))
        if job.ray_address is not None:
            raise JobError("ray_address: leave it out; a submitted job runs on the cluster that it is sent to")
        for setting, value in job.inlined.items():
            arguments += [f"--{setting.replace('_', '-')}", value]
        values = read_job_file(file) | flags
    shown = {}
    for key in PATHS:
        paths = values.get(key) or []
        if key == "adapters":  # NAME=FOLDER, or by name in a job file
            paths = paths.values() if isinstance(paths, dict) else [text.partition("=")[2] for text in paths]
        paths = [paths] if isinstance(paths, str) else paths
        for path in paths:
            _check_path(key, path)
        if key in ("input", "output") and paths:
            shown[key] = " ".join(anonymous(path) for path in paths)
    return Call(command.name, arguments, files, shown)


def _with_files(command: Any, values: dict[str, Any], arguments: list[str]) -> tuple[list[str], dict[str, bytes]]:
    """The arguments with each file's path replaced by its name in the job's folder, and the contents of the files."""
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


def _check_path(key: str, path: str) -> None:
    if "://" in path or (key in ("target", "draft") and not Path(path).is_dir()):
        return  # a URL or a hub id
    if not Path(path).is_absolute():
        raise JobError(
            f"{key} {path}: a cluster cannot resolve a relative path; expected a URL such as s3://bucket/folder, or "
            "the absolute path of a folder that all nodes share"
        )
    print(f"{key} {path}: assumed to be a folder that all nodes of the cluster share", file=sys.stderr)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given and name not in os.environ:
        raise JobError(f"--env {name}: the variable is not set; set it, or pass --env {name}=VALUE")
    return name, value if given else os.environ[name]
