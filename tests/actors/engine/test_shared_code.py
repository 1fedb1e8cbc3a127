"""Compiled code that goes from one process to another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exspec.actors.engine import shared_code
from exspec.actors.engine.layers.programs import FOLDER
from tests import tiny

PROCESS = """
import sys
from pathlib import Path
import torch
from exspec.actors.engine import shared_code
from exspec.actors.engine.layers import programs
from exspec.actors.engine.native import load_kernels

given = Path(sys.argv[1])
if given.exists():
    shared_code.unpack(given.read_bytes())
load_kernels()
assert programs.compiler_trial(torch.device("cpu")) is None
assert shared_code.pieces() == 3, "the kernels, a graph and its library"
if not given.exists():
    given.write_bytes(shared_code.pack())
"""


def libraries(folder: Path) -> dict[str, int]:
    """When each was written."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*.so")}


@pytest.mark.slow
def test_another_host_compiles_nothing(tmp_path: Path) -> None:
    tiny.need("in_place", "compiled")
    for host in ("one", "other"):
        environment = {name: value for name, value in os.environ.items() if name != FOLDER}
        environment["EXSPEC_CACHE"] = str(tmp_path / host)
        subprocess.run([sys.executable, "-c", PROCESS, tmp_path / "code"], env=environment, check=True)
    one, other = (libraries(tmp_path / host) for host in ("one", "other"))
    assert other.keys() <= one.keys()
    assert sum(name.endswith(".main.so") for name in other) == 1
    assert all(other[name] // 10**9 == one[name] // 10**9 for name in other), "unpacked, not compiled"


def test_code_of_another_kind_of_machine_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = shared_code.machine()
    assert here == shared_code.machine()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert shared_code.machine() != here


def test_nothing_is_written_outside_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import tarfile

    monkeypatch.setenv("EXSPEC_CACHE", str(tmp_path / "cache"))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        entry = tarfile.TarInfo("../outside.so")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(tarfile.OutsideDestinationError):
        shared_code.unpack(packed.getvalue())
    assert not (tmp_path / "outside.so").exists()
