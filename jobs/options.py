"""Command-line options from the fields of a settings class: one name, one default, one help text for both."""

import inspect
from collections import defaultdict
from collections.abc import Callable
from enum import EnumType
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from exspec.jobs.demo import DEMO_PAIR
from exspec.pipeline.functions import Function
from exspec.pipeline.job import Job, load_job


def with_settings(model: type[Job]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every setting that fits on a line, and `--job FILE` for all of them.

    The command is called with the `job` that they make, and its own parameters: what is wrong with a setting is said
    before anything heavy is loaded.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in inspect.signature(command).parameters.values()
            if p.name != "job"
        ]
        fields = {name: option for name, field in model.model_fields.items() if (option := _option(name, field))}

        def run(job: Path | None = None, **values: Any) -> None:
            flags = {n: values.pop(n) for n in list(values) if n in fields}
            given = {n: v for n, v in flags.items() if v is not None and v != []}
            command(job=load_job(model, job, given, DEMO_PAIR), **values)

        file = Annotated[Path | None, typer.Option("--job", help="YAML file of settings; flags override it.")]
        parameters = [inspect.Parameter("job", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=file)]
        parameters += [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=o) for n, o in fields.items()
        ]
        run.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*parameters, *own)}
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        run.settings = model  # type: ignore[attr-defined]
        return run

    return decorate


class GroupedCommand(TyperCommand):
    """A command whose help lists its options by group, in full, and ends with examples as they stand."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups = defaultdict(list)
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups[getattr(parameter, "rich_help_panel", None) or kind].append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """As it stands: examples are to be copied."""
        formatter.write_paragraph()
        formatter.write("\n".join([*(self.epilog or "").splitlines(), ""]))


def _option(name: str, field: Any) -> Any:
    """The annotated type of a field's option, or None where it needs the job file."""
    extra = field.json_schema_extra or {}
    kind = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kinds = [a for a in get_args(kind) if a is not type(None)]
        kind = kinds[0] if len(kinds) == 1 else str  # several: the settings class reads the text
    kind = str if kind is Function else kind
    if get_origin(kind) is list and get_origin(get_args(kind)[0]) is list:
        return None
    if get_origin(kind) is dict:
        if not extra.get("flag"):
            return None
        kind = list[str]  # of NAME=VALUE, which the settings class reads
    note = "" if field.is_required() or field.default in (None, [], {}) else f" [default: {_shown(field.default)}]"
    told = {"help": f"{field.description}{note}", "rich_help_panel": extra["group"]}
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"--{_dashed(name)}/--no-{_dashed(name)}", **told)]
    if not isinstance(kind, EnumType):
        told["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
    option = typer.Option(f"--{_dashed(name)}", **told)
    return Annotated[list[str] | None, option] if get_origin(kind) is list else Annotated[kind | None, option]


def _shown(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(getattr(value, "value", value))


def _dashed(name: str) -> str:
    return name.replace("_", "-")
