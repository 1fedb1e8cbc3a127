"""The pages of the commands: `python -m tests.jobs.docs` writes the generated part of each page, from the command line.

The generated part, between two marks, holds synopsis, help and options; the rest of a page is written by hand. The
fields of a batch request are a table in the page of formats. The settings of a job, which several commands take, have a
page of their own. A command without a page gets one with only the generated part, and a test fails until somebody has
written the rest.
"""

import inspect
import re
from collections.abc import Iterable
from enum import EnumType
from functools import cache
from pathlib import Path
from typing import Any, get_args

import typer.main

from exspec.jobs.cli import app
from exspec.pipeline.input.batch import Body
from exspec.pipeline.job.kinds import KINDS
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.job.settings import Auto, Job, grouped

FOLDER = Path(__file__).parents[2] / "jobs" / "docs"
INDEX, SETTINGS, FORMATS = "README.md", "settings.md", "formats.md"
BEGIN, END = "<!-- generated: python -m tests.jobs.docs -->", "<!-- end -->"
HEADINGS = ("## Examples", "## What it writes", "## When it goes wrong")
EXIT_CODES = ("## Exit codes\n", "\nExit codes: ")  # by hand, or in the command's help
STAY = "- Must stay the same: every other setting. Two of them [help a retry](output.md#rows-with-an-error)."
LATER = {"any": "May change", "any if exact": "May change if the job is exact"}


@cache
def commands() -> dict[str, Any]:
    """The commands that a person may see, by name."""
    group: Any = typer.main.get_command(app)
    return {name: command for name, command in sorted(group.commands.items()) if not command.hidden}


def examples(command: Any) -> list[str]:
    """Command lines at the end of a command's help."""
    return [line.strip() for line in (command.epilog or "").splitlines()[1:]]


def settings(command: Any) -> dict[str, Any]:
    """The settings of the job that a command takes; none where it takes no job."""
    model: type[Job] | None = getattr(command.callback, "settings", None)
    return dict(model.model_fields) if model else {}


@cache
def reference(name: str, command: Any) -> str:
    """The generated part of a command's page: everything but the settings of its job, and the help's first sentence,
    which the index has."""
    known = settings(command)
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name not in known]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    names = [f"{_argument(p)}{'...' if p.nargs == -1 else ''}" for p in arguments]
    text = command.help.removeprefix(_first_sentence(command.help)).removeprefix(".").strip()
    if name != "run":
        codes = commands()["run"].help.rpartition("\n\n")[2]
        text = text.replace(codes, "Exit codes: those of [run](run.md#reference).")
    lines = ["## Reference", "", f"    exspec {' '.join([name, *names, '[OPTIONS]'])}"]
    if text:
        lines += ["", text]

    if arguments:
        lines += ["", *(f"- `{_argument(p)}`: {_line(p.help)}" for p in arguments)]
    if known:
        lines += ["", f"The [settings of a job]({SETTINGS}) are options too."]
    homes = {p.name: _home(name, p) for p in options}
    lines += _by_group(name, [p for p in options if not homes[p.name]])
    for home in dict.fromkeys(filter(None, homes.values())):
        each = [f"`{p.opts[0]}`{_brackets(_default(p))}" for p in options if homes[p.name] == home]
        lines += ["", f"As in [{home.removesuffix('.md')}]({home}): {', '.join(each)}."]
    return "\n".join(lines)


def _home(name: str, option: Any) -> str | None:
    """The other page that describes an option of this meaning."""
    for home, command in ((SETTINGS, LabelJob.kind), ("run.md", "run"), ("submit.md", "submit")):
        known = commands()[command]
        for p in known.params:
            described = home != SETTINGS or p.name in settings(known)
            if command != name and described and p.name == option.name and _help(p) == _help(option):
                return home
    return None


def settings_reference() -> str:
    """The generated part of the page of settings: those of all kinds of jobs, by group."""
    kinds = [kind for kind in KINDS.values() if kind is not Job]
    options = {p.name: (kind.kind, p) for kind in reversed(kinds) for p in commands()[kind.kind].params}
    groups: dict[str, list[str]] = {}
    later: dict[str, list[str]] = {}
    for key, field in grouped({n: f for kind in kinds for n, f in kind.model_fields.items()}).items():
        if key in options:
            name, option = options[key]
            flag, row = f"`{option.opts[0]}`", _row(name, option)
        else:
            kind = "list of lists" if isinstance(field.default, list) else "mapping"
            flag, row = f"`{key}`", f"- `{key}` ({kind}, only in the job file): {_line(str(field.description))}"
        groups.setdefault(_group(field), []).append(row)
        later.setdefault(field.json_schema_extra["later"], []).append(flag)  # type: ignore[index, arg-type]
    lines = ["## Reference"]
    for group, rows in groups.items():
        own = [kind for kind in KINDS.values() if any(_group(f) == group for f in kind.model_fields.values())]
        alone = "" if Job in own else f" (of `exspec {own[0].kind}` alone)"
        lines += ["", f"### {group}{alone}", "", *rows]
    changes = [f"- {rule}: {', '.join(later[name])}" for name, rule in LATER.items()]
    return "\n".join([*lines, "", "### In a later run", "", *changes, STAY])


def batch_reference() -> str:
    """The generated part of the page of formats: the fields of a batch request's body."""
    rows = [f"| `{name}` | {field.description} |" for name, field in Body.model_fields.items()]
    return "\n".join(["| field | value |", "|---|---|", *rows])


def _group(field: Any) -> str:
    return str(field.json_schema_extra["group"])


def _by_group(name: str, options: Iterable[Any]) -> list[str]:
    """Lists of options, with a heading for each group that has a name, as in the help."""
    groups: dict[str, list[str]] = {}
    for option in options:
        groups.setdefault(getattr(option, "rich_help_panel", None) or "", []).append(_row(name, option))
    lines = []
    for group, rows in groups.items():
        lines += ["", *([f"### {group}", ""] if group else []), *rows]
    return lines


def _row(name: str, p: Any) -> str:
    """`--rows` (number, default `512`): Messages in all."""
    return f"- {_flags(p)}{_brackets(_value(name, p), _default(p))}: {_help(p)}"


def _brackets(*words: str) -> str:
    noted = "; ".join(word for word in words if word)
    return f" ({noted})" if noted else ""


def index() -> str:
    """The generated part of the list of all pages."""
    return "\n".join(f"- [{name}]({name}.md): {_first_sentence(c.help)}" for name, c in commands().items())


def _first_sentence(text: str) -> str:
    return text.splitlines()[0].partition(". ")[0].removesuffix(".")


def _argument(p: Any) -> str:
    return str(p.metavar or p.name).upper()


def _flags(p: Any) -> str:
    return " ".join(f"`{flag}`" for flag in (*p.opts, *p.secondary_opts))


def _value(name: str, p: Any) -> str:
    """What an option takes, read from its function's signature: what typer makes of that differs between versions."""
    (function,) = (
        c.callback for c in app.registered_commands if c.callback and (c.name or c.callback.__name__) == name
    )
    kind: Any = inspect.signature(function).parameters[p.name].annotation if p.name != "help" else bool
    field = settings(commands()[name]).get(p.name)
    if field is not None and field.annotation == Auto:
        return "number or `auto`"
    while (inner := [a for a in get_args(kind) if a is not type(None)]) and not isinstance(kind, EnumType):
        kind = inner[0]  # out of Annotated, Optional and list
    if kind is bool:
        return ""
    if isinstance(kind, EnumType):
        return ", ".join(f"`{choice.value}`" for choice in kind)  # type: ignore[var-annotated]
    word = {int: "number", float: "number", Path: "path"}.get(kind, "text")
    value = word if p.metavar in (None, "N", "X", "TEXT") else p.metavar
    return f"{value}{', repeatable' if p.multiple else ''}"


def _default(p: Any) -> str:
    """The default of an option, unless it is off. A setting of a job has it in its help: the command line leaves it
    unset."""
    if p.required:
        return "required"
    default = _noted(p) or getattr(p.default, "value", p.default)
    if default is None or default is False or default in ("off", []):
        return ""
    return "default on" if default is True or default == "on" else f"default `{default}`"


def _noted(p: Any) -> str:
    _, _, noted = (p.help or "").rpartition(" [default: ")
    return noted.removesuffix("]") if (p.help or "").endswith("]") else ""


def _help(p: Any) -> str:
    return _line((p.help or "").removesuffix(f" [default: {_noted(p)}]"))


def _line(text: str) -> str:
    return text.replace("\n", " ")


def renewed(page: str, part: str) -> str:
    """A page with its generated part replaced. Raises ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"expected the marks {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def pages() -> dict[Path, str]:
    """Every page as it should be."""
    made = {}
    for name, command in commands().items():
        path = FOLDER / f"{name}.md"
        page = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
        made[path] = renewed(page, reference(name, command))
    for name, part in ((INDEX, index()), (SETTINGS, settings_reference()), (FORMATS, batch_reference())):
        made[FOLDER / name] = renewed((FOLDER / name).read_text(encoding="utf-8"), part)
    return made


def guides() -> set[Path]:
    """Pages that are written by hand: those that the index names."""
    text = (FOLDER / INDEX).read_text(encoding="utf-8").partition(END)[2]
    listed = re.findall(r"\]\((\w+\.md)\)", text)
    return {FOLDER / name for name in listed} - set(pages())


def main() -> None:
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"renewed {path}")


if __name__ == "__main__":
    main()
