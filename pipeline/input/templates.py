"""Templates that end. Rendering has a budget of steps and characters, counted alike on every machine."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import TemplateRuntimeError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

BUDGET = 10**8  # of one rendering: a character costs 1
STEP = 200  # costs a call, a filter, an operation and an iteration of a loop
# Methods and filters whose result may be as long as the product of two arguments.
GROWING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "format", "format_map", "batch", "slice"}
GROWING |= {"wordwrap", "replace", "join", "translate", "tojson", "lipsum", "generate_lorem_ipsum", "to_bytes"}
_budget = threading.local()


@contextmanager
def bounded() -> Iterator[None]:
    """This thread's templates share one budget inside the block. Beyond it they raise TemplateRuntimeError."""
    _budget.left = BUDGET
    try:
        yield
    finally:
        _budget.left = None


def bound_chat_templates() -> None:
    """Chat templates are bounded too: transformers makes their environment by this name, and has no setting for it."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedChatEnvironment  # type: ignore[attr-defined]


class _Generator(CodeGenerator):
    """Compiles templates so that they pay for iterations, calls of macros, and joined texts."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:  # noqa: N802
        parts: Iterator[Any] = node.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
        for part in parts:
            cost = STEP + sum(len(text.data) for text in part.find_all(nodes.TemplateData))
            pay = nodes.Call(nodes.EnvironmentAttribute("pay"), [nodes.Const(cost)], [], None, None)
            statement = nodes.ExprStmt(pay, lineno=part.lineno).set_lineno(part.lineno)
            part.body.insert(0, statement.set_environment(self.environment))
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self.write("environment.paid(")
        super().visit_Concat(node, frame)
        self.write(")")


class _Bounded(SandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, finalize=self.paid, **options)
        self.filters = {name: self._filter(name, made) for name, made in self.filters.items()}

    def pay(self, cost: int) -> None:
        """Take a cost from the budget, if there is one. Raises TemplateRuntimeError if too little is left."""
        if (left := getattr(_budget, "left", None)) is not None:
            _budget.left = left - cost
            if cost > left:
                raise TemplateRuntimeError("the template runs too long, or makes too long a text")

    def paid(self, value: Any) -> Any:
        """A value that is paid for by its size."""
        self.pay(_size(value))
        return value

    def _pay_call(self, name: str, values: list[Any]) -> None:
        if name in GROWING:
            first, *others = (_amount(value) for value in values)
            self.pay(first * max(others, default=1))
        self.pay(STEP)

    def _filter(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        passed = 1 if hasattr(made, "jinja_pass_arg") else 0  # a context or an environment

        @wraps(made)
        def bounded_filter(*args: Any, **options: Any) -> Any:
            self._pay_call(name, [*args[passed:], *options.values()])
            return self.paid(made(*args, **options))

        return bounded_filter

    def call(self, __context: Any, __obj: Any, *args: Any, **options: Any) -> Any:
        values = [getattr(__obj, "__self__", None), *args, *options.values()]
        self._pay_call(getattr(__obj, "__name__", ""), values)
        return self.paid(super().call(__context, __obj, *args, **options))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        whole = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and whole:
            self.pay(left.bit_length() * abs(right))
        elif operator == "*":
            self.pay(_size(left) * _size(right) if whole else _amount(left) * _amount(right))
        elif operator == "%" and isinstance(left, str):
            self.pay(_amount(left) + _amount(right))
        self.pay(STEP)
        return self.paid(super().call_binop(context, operator, left, right))


class BoundedEnvironment(_Bounded):
    """For a job's own templates."""


class BoundedChatEnvironment(_Bounded, ImmutableSandboxedEnvironment):
    """For chat templates."""


def _size(value: Any) -> int:
    """Roughly the characters, bytes or bits of a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 32
    if isinstance(value, dict):
        return 1 + sum(_size(item) for item in value.values())
    return 1 + sum(map(_size, value)) if isinstance(value, list | tuple) else 1


def _amount(value: Any) -> int:
    """The size that a value may give to a text: its own, its value, or the largest number in it, as in `%99d`."""
    if isinstance(value, int):
        return 1 + abs(value)
    if isinstance(value, float):
        return 1 + int(min(abs(value), BUDGET))
    if isinstance(value, list | tuple):
        return 1 + sum(map(_amount, value))
    numbers = re.findall(r"\d{5,}", value) if isinstance(value, str) and ("%" in value or "{" in value) else []
    return _size(value) + sum(min(int(number[:12]), BUDGET) for number in numbers)
