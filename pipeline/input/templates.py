"""Bounds on templates: one that never ends, or makes a huge text, must not hang a reader or fill its memory."""

import resource
import sys
import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

STEPS = 2_000_000  # executed lines and calls of a template for one row
SECONDS = 60.0  # for one row: a bound on steps that are slow, far above what the others need on a slow machine
LONGEST = 1 << 28  # characters or bits of one value
GROWTH = 2 << 30  # bytes of memory
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of ru_maxrss
WIDE = {"center", "ljust", "rjust", "zfill"}  # methods of text that make it longer


class BoundError(Exception):
    """A template that takes too long, or makes too much."""


class Sandbox(SandboxedEnvironment):
    """A sandbox in which one product, power or margin cannot fill the memory: once begun, it cannot be stopped."""

    intercepted_binops = frozenset({"*", "**", "%"})  # these are not computed when the template is compiled either

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for value, count in ((left, right), (right, left)):
            size = len(value) if isinstance(value, Sized) else 0
            if operator == "**" and isinstance(left, int):
                size = left.bit_length()
            if operator != "%" and isinstance(count, int) and size * count > LONGEST:
                raise BoundError(f"a value has more than {LONGEST} characters or bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *values: Any, **named: Any) -> Any:
        if getattr(function, "__name__", "") in WIDE and any(isinstance(v, int) and v > LONGEST for v in values):
            raise BoundError(f"a value has more than {LONGEST} characters or bits")
        return super().call(context, function, *values, **named)


@contextmanager
def bounded() -> Iterator[None]:
    """Raises BoundError if templates that are rendered inside take too many steps, too much time or memory.

    Steps, unlike seconds, are the same on every machine. They are counted by tracing, because the code of a model's
    template is made by transformers, and because signals reach only the main thread.
    """
    before, steps, most, end = sys.gettrace(), 0, _peak() + GROWTH, time.monotonic() + SECONDS

    def trace(frame: FrameType, _event: str, _value: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > STEPS:
            raise BoundError(f"it takes more than {STEPS} steps")
        if frame.f_code.co_filename != "<template>":
            return None
        check()
        return trace

    def check() -> None:
        if time.monotonic() > end:
            raise BoundError(f"it takes longer than {SECONDS:g} s")
        if _peak() > most:
            raise BoundError(f"it takes more than {GROWTH >> 30} GiB of memory")

    sys.settrace(trace)
    try:
        yield
        check()
    finally:
        sys.settrace(before)


def _peak() -> int:
    """The largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT
