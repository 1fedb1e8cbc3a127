"""Command-line options from the fields of a settings class: one name, one default, one help text for both."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import EnumType, StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from exspec.actors.engine.config import SETTINGS
from exspec.actors.engine.settings import Setting, settings_of
from exspec.jobs.demo import DEMO_PAIR
from exspec.pipeline.job.functions import Function
from exspec.pipeline.job.settings import Job, grouped, load_job


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
        every = grouped(model.model_fields)
        fields = {name: option for name, field in every.items() if (option := _option(name, field))}

        def run(job: Path | None = None, **values: Any) -> None:
            flags = {n: values.pop(n) for n in list(values) if n in fields}
            given = {n: getattr(v, "value", v) for n, v in flags.items() if v is not None and v != []}
            command(job=load_job(model, job, given, DEMO_PAIR), **values)

        file = Annotated[Path | None, typer.Option("--job", help="YAML file of settings; flags override it.")]
        parameters = [inspect.Parameter("job", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=file)]
        parameters += [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=o) for n, o in fields.items()
        ]
        run.settings = model  # type: ignore[attr-defined]
        return _signed(run, command, [*parameters, *own])

    return decorate


def with_flags(model: type, shape: Iterable[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every setting of a dataclass, and for settings of the engine by the names in `shape`.

    The command is called with the `settings` that the flags make, and with its own arguments. The engine's settings
    are the field `shape`.
    """
    own, engines = settings_of(model), {name: SETTINGS[name] for name in shape}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        arguments = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]

        def run(**values: Any) -> None:
            passed = {p.name: values.pop(p.name) for p in arguments}
            given = {n: tuple(v) if isinstance(v, list) else getattr(v, "value", v) for n, v in values.items()}
            engine = {"shape": {n: given.pop(n) for n in engines}} if engines else {}
            command(settings=model(**given, **engine), **passed)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in arguments]
        parameters += [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=_usual(known), annotation=_flag(known))
            for n, known in (own | engines).items()
        ]
        return _signed(run, command, parameters)

    return decorate


def _signed(
    run: Callable[..., None], command: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """`run` under the name and help of a command, with these parameters for typer to read."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _flag(known: Setting) -> Any:
    """The annotated type of a setting's flag."""
    kind = _choice(known.name, known.choices) if known.choices else known.kind
    kind = list[str] if get_origin(kind) is tuple else kind
    option = typer.Option(help=known.help, min=known.limits.get("ge"))
    return Annotated[kind | None if known.default is None else kind, option]


def _usual(known: Setting) -> Any:
    return list(known.default) if isinstance(known.default, tuple) else known.default


def _choice(name: str, choices: Iterable[str]) -> Any:
    return StrEnum(name, [(choice, choice) for choice in choices])


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
    if get_origin(kind) is Literal:
        kind = _choice(name, get_args(kind))
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
