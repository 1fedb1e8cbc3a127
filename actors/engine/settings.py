"""What a setting is: one field of a config, with its range, its help, and what it may be when a job is run again.

Job files, flags and pages are made of these fields, without torch.
"""

import inspect
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

# In a later run of a job: the same, for it decides the output; any, for it decides where and how the job runs; or any
# with fixed shapes, where the target alone decides every token.
Later = Literal["the same", "any", "any if exact"]


@dataclass(frozen=True)
class Setting:
    """default: in an engine. measured: a job may leave it to what is measured. unset: a job has no default of it.

    kind: what it takes, without None. choices: all that it may be, if they are few. ge, gt, lt: its limits.
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
        """Raise ValueError naming the setting where a value is out of its range."""
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
    told = {"help": help, "later": later, "measured": measured, "unset": unset, "limits": limits}
    return field(default=default, metadata={"setting": told})


def settings_of(config: type) -> dict[str, Setting]:
    """The settings of a config, by name."""
    hints = get_type_hints(config)
    own = inspect.get_annotations(config)
    ordered = sorted(fields(config), key=lambda f: f.name not in own)  # then those of drafters
    declared = {f.name: f for f in ordered if "setting" in f.metadata}
    return {name: Setting(name, _kind(hints[name]), f.default, **f.metadata["setting"]) for name, f in declared.items()}


def _kind(hint: Any) -> Any:
    """A hint without None."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if type(None) in get_args(hint) else hint
