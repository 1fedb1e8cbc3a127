"""What the engine says about faults."""

import logging
from functools import cache


def first_line(fault: Exception) -> str:
    """The message of an exception without the lines on where a library raised it; its class if there is none."""
    return next(iter(str(fault).strip().splitlines()), type(fault).__name__)


@cache
def warn_once(line: str) -> None:
    """Log a warning once per process: what falls back, and why."""
    logging.getLogger(__name__).warning(line)
