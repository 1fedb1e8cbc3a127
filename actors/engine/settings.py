"""A setting: a field of a config, with its range, its help, and whether it may change when a job is run again.

Job files, flags and documentation pages are generated from these fields, without torch.
"""

import inspect
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

# The value in a later run of a job. "the same": the setting decides the output. "any": it only decides where and how
# the job runs. "any if exact": with fixed shapes the target alone decides every token, so the setting may change.
Later = Literal["the same", "any", "any if exact"]


@dataclass(frozen=True)
class Setting:
    """default: of an engine. measured: a job may leave the value to calibration. unset: a job has no default.

    kind: the type of the value, without None. choices: the possible values of a Literal, else empty. limits: the bounds
    `ge`, `gt` and `lt`.
    """

    name: str
    kind: Any
    default: Any
    help: str
    later: Later
    measured: bool
    unset: bool
    limits: dict[str, float]

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def check(self, value: Any) -> None:
        """Raise ValueError naming the setting if a value is out of range."""
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"{self.name}: expected one of {', '.join(self.choices)}, not {value!r}")
        elif value is not None and not self._within(value):
            raise ValueError(f"{self.name}: expected {self._range()}, not {value}")

    def _within(self, value: Any) -> bool:
        tests = {
            "ge": lambda limit: value >= limit,
            "gt": lambda limit: value > limit,
            "lt": lambda limit: value < limit,
        }
        return all(tests[name](limit) for name, limit in self.limits.items())

    def _range(self) -> str:
        if self.limits == {"ge": 1}:
            return "a positive number"
        words = {"ge": "from", "gt": "above", "lt": "below"}
        return "a number " + " and ".join(f"{words[name]} {limit:g}" for name, limit in self.limits.items())


def setting(
    default: Any,
    help: str,
    later: Later = "the same",
    *,
    measured: bool = False,
    unset: bool = False,
    **limits: float,
) -> Any:
    """A field of a config that users set."""
    values = {"help": help, "later": later, "measured": measured, "unset": unset, "limits": limits}
    return field(default=default, metadata={"setting": values})


def settings_of(config: type) -> dict[str, Setting]:
    """The settings of a config, by name."""
    hints = get_type_hints(config)
    own = inspect.get_annotations(config)
    ordered = sorted(fields(config), key=lambda f: f.name not in own)  # drafters' settings come last
    declared = {f.name: f for f in ordered if "setting" in f.metadata}
    return {name: Setting(name, _kind(hints[name]), f.default, **f.metadata["setting"]) for name, f in declared.items()}


def numbers(name: str, text: str, kind: type = int) -> tuple[Any, ...]:
    """The numbers in a setting that is a list of them. Raises ValueError naming its flag."""
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError as error:
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(f"{flag}: expected numbers with commas between them, not {text!r}") from error


def _kind(hint: Any) -> Any:
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if type(None) in get_args(hint) else hint
