"""Errors that a person can act on."""


class JobError(ValueError):
    """A job that cannot start; the message names what is wrong and what was expected. code: the command's exit code."""

    code = 2


class BrokenOffError(JobError):
    """A job that started and did not come to its end; run again, it resumes."""

    code = 1
