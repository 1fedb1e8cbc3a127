"""Packages of a host that differ from the driver's: it neither renders prompts nor decodes."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from exspec.actors.engine import EngineConfig
from exspec.pipeline import versions
from exspec.pipeline.cluster.graph import PairLoader
from exspec.pipeline.errors import JobError
from exspec.pipeline.input import reader
from exspec.pipeline.input.reader import Reader
from tests.pipeline import jobs


@pytest.mark.parametrize("package", versions.PACKAGES)
def test_a_host_with_another_version_does_no_work(
    package: str, pair: jobs.Pair, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another build of the same version is no other version."""
    job, unused = jobs.job(pair, source, tmp_path / "out"), Mock()
    load, read = PairLoader(job, EngineConfig(), "cpu"), Reader(job, pa.schema([]), unused)
    here, real = os.uname().nodename, versions.version
    monkeypatch.setattr(versions, "version", lambda name: f"{real(name)}+build")
    assert load.versions == versions.versions()
    monkeypatch.setattr(versions, "version", lambda name: "1.2.3" if name == package else real(name))
    with pytest.raises(JobError, match=f"^{here} has .*{package} 1.2.3.*, the driver has .*, and tokens may differ"):
        load(1)
    monkeypatch.setattr(reader, "RETRY", 0.0)
    ended: Any = Mock(side_effect=SystemExit)
    monkeypatch.setattr(reader.os, "_exit", ended)
    with pytest.raises(SystemExit):
        next(read(pa.table({"tasks": [b""]})))
    ended.assert_called_once_with(1)
