"""Command-line options from the fields of a settings class: one name, one default, one help text for both."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel


def with_settings(model: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every field of the model that fits on a line, and `--job FILE` for all of them.

    The command is called with `job`, the settings that were given as `flags`, and its own parameters.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in inspect.signature(command).parameters.values()
            if p.name not in ("job", "flags")
        ]
        fields = {name: option for name, field in model.model_fields.items() if (option := _option(name, field))}

        def run(job: Path | None = None, **values: Any) -> None:
            flags = {n: values.pop(n) for n in list(values) if n in fields}
            given = {n: v for n, v in flags.items() if v is not None and v != []}
            command(job=job, flags=given, **values)

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


def _option(name: str, field: Any) -> Any:
    """The annotated type of a field's option, or None where a mapping needs the job file."""
    kind = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kinds = [a for a in get_args(kind) if a is not type(None)]
        kind = kinds[0] if len(kinds) == 1 else str  # several: the settings class reads the text
    if get_origin(kind) is dict:
        if not (field.json_schema_extra or {}).get("flag"):
            return None
        kind = list[str]  # of NAME=VALUE, which the settings class reads
    note = "" if field.is_required() or field.default in (None, []) else f" [default: {_shown(field.default)}]"
    help_ = f"{field.description}{note}"
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"--{_dashed(name)}/--no-{_dashed(name)}", help=help_)]
    option = typer.Option(f"--{_dashed(name)}", help=help_)
    return Annotated[list[str] | None, option] if get_origin(kind) is list else Annotated[kind | None, option]


def _shown(value: Any) -> str:
    return str(getattr(value, "value", value))


def _dashed(name: str) -> str:
    return name.replace("_", "-")
