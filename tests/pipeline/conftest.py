from pathlib import Path

import pytest

from tests.pipeline import jobs


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return jobs.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    jobs.write_shards(tmp_path / "in", rows=60)
    return tmp_path / "in"
