"""Errors that a user can act on."""

import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from exspec.pipeline.secrets import redacted


class JobError(ValueError):
    """A job that cannot start. Each problem says what is wrong and what was expected, without the secrets of its URLs.

    code: the exit code.
    """

    code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(redacted, problems))
        super().__init__(*self.problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


class BrokenOffError(JobError):
    """A job that started and did not finish. Running it again resumes it."""

    code = 1


class StoppedError(BrokenOffError):
    """A job that was interrupted. Running it again resumes it."""

    code = 130


def no_column(name: str, columns: Iterable[str]) -> str:
    """The message for a column that the input does not have."""
    return f"{name!r} is not in the input, which has {', '.join(columns)}{did_you_mean(name, columns)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion to end a message with; empty if no known name is similar."""
    near = get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


@contextmanager
def job_errors(what: str) -> Iterator[None]:
    """Turn any exception into a JobError that begins with `what`, but leave a JobError as it is.

    For calls of stores and libraries, whose exceptions are of many types.
    """
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        raise JobError(f"{what}: {type(error).__name__}: {error}") from error


@contextmanager
def started() -> Iterator[None]:
    """For a job that has started: a JobError inside the block breaks it off, with exit code 1."""
    try:
        yield
    except BrokenOffError:
        raise
    except JobError as error:
        raise BrokenOffError(*error.problems) from error


def kept_traceback(error: BaseException) -> str:
    """Write the traceback, without secrets, to a new file. Returns its path."""
    with tempfile.NamedTemporaryFile("w", prefix="exspec-", suffix=".log", delete=False, errors="replace") as file:
        file.write(redacted("".join(traceback.format_exception(error))))
    return file.name


def counted(count: int, noun: str) -> str:
    """The number with its noun: "1 row", "2 rows", "2 processes"."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"
