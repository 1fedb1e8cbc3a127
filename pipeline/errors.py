"""Errors that a person can act on."""


class JobError(ValueError):
    """A job that cannot start; the message names what is wrong and what was expected."""
