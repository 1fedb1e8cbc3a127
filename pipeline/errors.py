"""Errors that a person can act on."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class JobError(ValueError):
    """A job that cannot start. Each problem names what is wrong and what was expected.

    code: the exit code of the command.
    """

    code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(self.problems)


class BrokenOffError(JobError):
    """A job that started and did not come to its end; run again, it resumes."""

    code = 1


class StoppedError(BrokenOffError):
    """A job that was interrupted; run again, it resumes."""

    code = 130


def no_column(name: str, columns: Iterable[str]) -> str:
    """What to say of a column that the input does not have."""
    return f"{name!r} is not in the input, which has {', '.join(columns)}{meant(name, columns)}"


def meant(name: str, known: Iterable[str]) -> str:
    """The name that was meant, perhaps, as the end of a sentence; empty where none is like it."""
    near = get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


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
