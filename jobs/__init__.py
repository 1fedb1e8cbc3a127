"""The user interface: the command line, and `generate` for notebooks."""

from exspec.jobs.api import generate

__all__ = ["generate"]
