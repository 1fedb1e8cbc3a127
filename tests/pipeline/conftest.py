from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline import jobs, s3
from tests.pipeline.in_process import in_process


@pytest.fixture(autouse=True)
def _in_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Jobs run in this process, unless the test asks for Ray."""
    if "ray_session" in request.fixturenames:
        yield
        return
    with in_process():
        yield


@pytest.fixture(scope="session")
def moto() -> Iterator[dict[str, Any]]:
    """The options of an S3 server, which all tests of a process share."""
    with s3.moto() as options:
        yield options


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> jobs.Pair:
    return jobs.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    jobs.write_shards(tmp_path / "in", rows=60)
    return tmp_path / "in"
