"""Compiled code that goes from one process to another."""

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exspec.actors.engine import shared_code
from exspec.actors.engine.layers.programs import FOLDER
from tests import tiny

PROCESS = """
import pickle, sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from exspec.actors.engine import shared_code
from exspec.actors.engine.layers import programs
from exspec.actors.engine.native import load_kernels

given = Path(sys.argv[1])
if given.exists():
    shared_code.keep(pickle.loads(given.read_bytes()))
load_kernels()
assert programs.compiler_trial(torch.device("cpu")) is None
assert counters["inductor"]["fxgraph_cache_hit"] == given.exists()
if not given.exists():
    given.write_bytes(pickle.dumps(shared_code.read(shared_code.names())))
"""


# Torch precompiles a header for each host, even if it then compiles nothing.
COMPILER = r"""#!/bin/sh
[ "$FORBIDDEN" ] && echo "$*" | grep -qE -e ' -o \S+\.s?o( |$)' && exit 1
exec {real} "$@"
"""


@pytest.mark.slow
def test_another_host_needs_no_compiler(tmp_path: Path) -> None:
    tiny.need("in_place", "compiled")
    for name in ("c++", "g++"):
        if real := shutil.which(name):
            (tmp_path / name).write_text(COMPILER.format(real=real))
            (tmp_path / name).chmod(0o755)
    for host, forbidden in (("one", ""), ("other", "yes")):
        environment = {name: value for name, value in os.environ.items() if name not in (FOLDER, "CXX")}
        environment |= {"EXSPEC_CACHE": str(tmp_path / host), "FORBIDDEN": forbidden}
        environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
        subprocess.run([sys.executable, "-c", PROCESS, tmp_path / "code"], env=environment, check=True)


def test_code_of_another_kind_of_machine_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = shared_code.machine()
    assert here == shared_code.machine()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert shared_code.machine() != here


@pytest.mark.parametrize(
    "name", ["kernels/../../outside.so", "compiled//outside.so", "kernels/compiled/x.so", "else/x.so"]
)
def test_nothing_is_written_outside_the_folders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last but one has another name."""
    monkeypatch.setenv("EXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache" / "kernels" / "compiled"))
    with pytest.raises((ValueError, KeyError)):
        shared_code.keep({name: gzip.compress(b"x")})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    shared_code.keep({"compiled/ab/x.so": gzip.compress(b"x")})
    assert (tmp_path / "cache" / "kernels" / "compiled" / "ab" / "x.so").read_bytes() == b"x"


def test_a_file_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes have mapped it."""
    monkeypatch.setenv("EXSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv(FOLDER, str(tmp_path / "kernels" / "compiled"))
    shared_code.keep({"kernels/x.so": gzip.compress(b"one")})
    shared_code.keep({"kernels/x.so": gzip.compress(b"other")})
    assert (tmp_path / "kernels" / "x.so").read_bytes() == b"one"
    assert gzip.decompress(shared_code.read(["kernels/x.so", "kernels/gone.so"])["kernels/x.so"]) == b"one"
    assert shared_code.read(["kernels/gone.so"]) == {}
