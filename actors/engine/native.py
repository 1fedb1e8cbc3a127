"""The engine's kernels in C++ for CPUs. The first process on a machine compiles them for its CPU."""

import hashlib
import os
import platform
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from exspec.actors.engine.cache import cache_folder

SOURCES = tuple(Path(__file__).parent / name for name in ("kv/attention.cpp", "layers/product.cpp"))
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared")


@lru_cache
def load_kernels() -> None:
    """Load the kernels, which gives their operators an implementation on CPUs.

    Raises OSError without a compiler or a writable folder, and RuntimeError with the compiler's last line.
    """
    if torch.__version__ < "2.10":
        raise RuntimeError(f"torch {torch.__version__} lacks the interface for kernels; expected 2.10 or later")
    path = cache_folder() / "kernels" / f"kernels-{digest()}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may do this at once; each renames a complete file into place.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            done = subprocess.run([*_command(), "-o", str(built)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(next(reversed(done.stderr.splitlines()), f"c++ ended with {done.returncode}"))
            built.replace(path)
    torch.ops.load_library(path)


def _command() -> list[str]:
    torch_folder = Path(torch.__file__).parent
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    compiler = os.environ.get("CXX") or "c++"
    return [compiler, *FLAGS, f"-I{torch_folder / 'include'}", *map(str, SOURCES), *libraries]


@lru_cache
def _version(compiler: str) -> str:
    """What a compiler says of itself; nothing if there is none."""
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ""


def digest() -> str:
    """A hash of all that the compiled file depends on. CPUs of the same name may differ in their instructions."""
    cpu = Path("/proc/cpuinfo")
    described = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    names = ("model name", "flags", "Features", "CPU part")
    parts = {line for line in described if line.startswith(names)} if cpu.exists() else set(described)
    sources = [source.read_text() for source in SOURCES]
    command = _command()
    text = "\n".join([*sources, torch.__version__, platform.machine(), *command, _version(command[0]), *sorted(parts)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
