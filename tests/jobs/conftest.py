"""Fixtures of the tests of the commands."""

from pathlib import Path

import pytest

from tests.jobs.calls import succeed
from tests.pipeline.conftest import _in_process, pair  # noqa: F401


@pytest.fixture(scope="session")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 demo messages in two shards."""
    folder = tmp_path_factory.mktemp("messages")
    succeed("messages", folder, "--rows", 24, "--shards", 2)
    return folder
