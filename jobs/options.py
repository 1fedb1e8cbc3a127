"""Makes command-line options from the fields of a settings class, with the same names, defaults and help texts."""

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


def demo_models(kind: type[Job]) -> dict[str, str]:
    """The demo target, and the demo draft if jobs of this kind may draft."""
    return {"target": DEMO_PAIR["target"]} if kind.reads else DEMO_PAIR


def with_settings(model: type[Job]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every setting that fits on the command line, and `--job FILE` for all settings.

    The command is called with a valid `job` and its own parameters. A wrong setting is reported before anything heavy
    is loaded.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        every = grouped(model.model_fields)
        fields = {name: option for name, field in every.items() if (option := _option(name, field))}
        pair = demo_models(model)

        def run(job: Path | None = None, **values: Any) -> None:
            flags = {n: values.pop(n) for n in list(values) if n in fields}
            given = {n: getattr(v, "value", v) for n, v in flags.items() if v is not None and v != []}
            command(job=load_job(model, job, given, pair), **values)

        file = Annotated[Path | None, typer.Option("--job", help="YAML file of settings. Flags override it.")]
        parameters = [_parameter(n, o) for n, o in {"job": file, **fields}.items()]
        run.settings = model  # type: ignore[attr-defined]
        return _signed(run, command, [*parameters, *_own(command, "job")])

    return decorate


def with_flags(model: type, shape: Iterable[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every setting of a dataclass, and for the engine's settings named in `shape`.

    The command is called with an instance of the dataclass as `settings`, and with its own arguments. The field `shape`
    of the instance has the engine's settings by name.
    """
    own, engines = settings_of(model), {name: SETTINGS[name] for name in shape}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        arguments = _own(command, "settings")

        def run(**values: Any) -> None:
            passed = {p.name: values.pop(p.name) for p in arguments}
            given = {n: tuple(v) if isinstance(v, list) else getattr(v, "value", v) for n, v in values.items()}
            engine = {"shape": {n: given.pop(n) for n in engines}} if engines else {}
            command(settings=model(**given, **engine), **passed)

        parameters = [_parameter(n, _flag(known), _usual(known)) for n, known in (own | engines).items()]
        return _signed(run, command, [*arguments, *parameters])

    return decorate


def _own(command: Callable[..., None], made: str) -> list[inspect.Parameter]:
    """The parameters of a command except `made`, as keywords."""
    parameters = inspect.signature(command).parameters.values()
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters if p.name != made]


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _signed(
    run: Callable[..., None], command: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """`run` with the name and help of a command, and with a signature that typer reads."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _flag(known: Setting) -> Any:
    """The annotated type of a flag for an engine's or a benchmark's setting."""
    kind = _choice(known.name, known.choices) if known.choices else known.kind
    kind = list[str] if get_origin(kind) is tuple else kind
    option = typer.Option(help=known.help, min=known.limits.get("ge"))
    return Annotated[kind | None if known.default is None else kind, option]


def _usual(known: Setting) -> Any:
    return list(known.default) if isinstance(known.default, tuple) else known.default


def _choice(name: str, choices: Iterable[str]) -> Any:
    return StrEnum(name, [(choice, choice) for choice in choices])


class GroupedCommand(TyperCommand):
    """A command whose help lists its options by group and ends with examples."""

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
        """Write the examples without wrapping them, so that they can be copied."""
        formatter.write_paragraph()
        formatter.write("\n".join([*(self.epilog or "").splitlines(), ""]))


def _option(name: str, field: Any) -> Any:
    """The annotated type of an option for a field of a job, or None if the field can be set in a job file only."""
    extra = field.json_schema_extra or {}
    kind = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kinds = [a for a in get_args(kind) if a is not type(None)]
        kind = kinds[0] if len(kinds) == 1 else str  # of several kinds, the settings class parses the text
    kind = str if kind is Function else kind
    if get_origin(kind) is Literal:
        kind = _choice(name, get_args(kind))
    if get_origin(kind) is list and get_origin(get_args(kind)[0]) is list:
        return None
    if get_origin(kind) is dict:
        if not extra.get("flag"):
            return None
        kind = list[str]  # of NAME=VALUE, which the settings class parses
    note = "" if field.is_required() or field.default in (None, [], {}) else f" [default: {_shown(field.default)}]"
    details = {"help": f"{field.description}{note}", "rich_help_panel": extra["group"]}
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"--{_dashed(name)}/--no-{_dashed(name)}", **details)]
    if not isinstance(kind, EnumType):
        details["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
    option = typer.Option(f"--{_dashed(name)}", **details)
    return Annotated[list[str] | None, option] if get_origin(kind) is list else Annotated[kind | None, option]


def _shown(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(getattr(value, "value", value))


def _dashed(name: str) -> str:
    return name.replace("_", "-")
