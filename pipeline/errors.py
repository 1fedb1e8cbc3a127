"""Errors that a person can act on."""

from collections.abc import Iterator
from contextlib import contextmanager


class JobError(ValueError):
    """A job that cannot start; the message names what is wrong and what was expected. code: the command's exit code."""

    code = 2


class BrokenOffError(JobError):
    """A job that started and did not come to its end; run again, it resumes."""

    code = 1


@contextmanager
def told(what: str) -> Iterator[None]:
    """Whatever is raised inside becomes a JobError that begins with `what`; a JobError stays as it is.

    For what calls a store or a library: one that cannot be reached, or refuses, has many names.
    """
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        raise JobError(f"{what}: {type(error).__name__}: {error}") from error


def first_line(error: Exception) -> str:
    """What an error says, without the lines that tell where a library raised it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
