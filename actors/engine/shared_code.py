"""Compiled code as bytes, so that other machines of the same kind need not compile it again.

The compiler finds code by a hash of all that it was compiled from. Nothing checks what the code does, so a process may
take it only from processes that may run code in it anyway.
"""

import io
import platform
import tarfile
import tempfile
from pathlib import Path

import torch

from exspec.actors.engine.cache import cache_folder
from exspec.actors.engine.layers.programs import CODE
from exspec.actors.engine.native import digest

GRAPHS = "graphs"  # name of what torch itself packs


def machine() -> str:
    """Equal on machines that run each other's code for CPUs. Torch itself keeps the code of different GPUs apart."""
    return f"{platform.python_version()}-{digest()}"


def loaded() -> list[Path]:
    """The compiled libraries of the cache that this process has loaded; none where there is no /proc."""
    maps, folder = Path("/proc/self/maps"), str(cache_folder().resolve())
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    return sorted(Path(path) for path in paths if path.startswith(folder) and path.endswith(".so"))


def pieces() -> int:
    """How many graphs and libraries this process has compiled or found in its cache."""
    return len(CODE.kept) + len(loaded())


def pack() -> bytes:
    """The code that this process has compiled or found in its cache. Raises OSError, and RuntimeError while another
    thread compiles."""
    packed, folder = io.BytesIO(), cache_folder().resolve()
    # Before it looks for code, torch's compiler runs small libraries to see which instructions the CPU has.
    trials = {path.resolve() for path in CODE.folder.glob("*/*.so") if not path.name.endswith(".main.so")}
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in {*loaded(), *trials}:
            if path.is_relative_to(folder):
                archive.add(path, str(path.relative_to(folder)))
        if made := torch.compiler.save_cache_artifacts():
            entry = tarfile.TarInfo(GRAPHS)
            entry.size = len(made[0])
            archive.addfile(entry, io.BytesIO(made[0]))
    return packed.getvalue()


def unpack(content: bytes) -> None:
    """Put the code of another process where this one looks for it. Raises OSError, and tarfile.TarError."""
    folder = cache_folder()
    for needed in (folder, CODE.folder):  # which also tells torch its folder
        needed.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place, tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(place, filter="data")
        graphs = Path(place) / GRAPHS
        if graphs.exists():
            torch.compiler.load_cache_artifacts(graphs.read_bytes())
            graphs.unlink()
        for made in Path(place).rglob("*.so"):  # another process may do the same
            there = folder / made.relative_to(place)
            there.parent.mkdir(parents=True, exist_ok=True)
            made.replace(there)
