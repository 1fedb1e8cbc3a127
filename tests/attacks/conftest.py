"""Fixtures of the attacks: jobs run in the test's process unless it asks for Ray."""

from tests.pipeline.conftest import _in_process, moto, pair  # noqa: F401
