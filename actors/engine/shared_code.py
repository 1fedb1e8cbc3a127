"""Files of compiled code, so that other machines of the same kind need not compile it again.

Their names contain a hash of all that they were compiled from. Nothing checks what the code does, so a process may take
it only from processes that may run code in it anyway.
"""

import gzip
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path

from exspec.actors.engine.cache import cache_folder, write_whole
from exspec.actors.engine.faults import first_line, warn_once
from exspec.actors.engine.layers.programs import CODE
from exspec.actors.engine.native import digest

MAPS = Path("/proc/self/maps")  # what this process has mapped; only Linux has it


def machine() -> str:
    """Equal on machines that run each other's code. Torch itself keeps the code of different GPUs apart."""
    return "-".join((platform.python_version(), *platform.libc_ver(), digest()))


def names() -> set[str]:
    """The files of the code that this process has compiled or found in its cache, below its folders."""
    folders = _folders()
    return {name for path in {*_mapped(), *_graphs(folders["compiled"])} if (name := _name(path, folders))}


def read(wanted: Iterable[str]) -> dict[str, bytes]:
    """The content of files, compressed. Files that are gone are left out."""
    found = {}
    for name in wanted:
        with suppress(FileNotFoundError):
            found[name] = gzip.compress(_place(name).read_bytes(), 1)
    return found


def own(wanted: Callable[[str, Set[str]], Set[str]] = lambda _, names: names) -> tuple[str, dict[str, bytes]] | None:
    """The kind of this machine, and the wanted files of this process's code. wanted: given the kind and all files.

    None if there are none, and with a warning if they cannot be read: others compile the code again.
    """
    try:
        here = machine()
        files = wanted(here, names())
        return (here, read(files)) if files else None
    except Exception as error:
        warn_once(f"compiled code is not shared: {first_line(error)}")
        return None


def fetch(known: Callable[[str], Set[str]], code: Callable[[str, Set[str]], Mapping[str, bytes]]) -> None:
    """Take over the code of other processes. known: the files for a kind of machine. code: their content.

    Warns if that fails: this process compiles the code again.
    """
    try:
        here = machine()
        if missing := {name for name in known(here) if not _place(name).exists()}:
            keep(code(here, missing))
    except Exception as error:
        warn_once(f"compiled code of other actors cannot be used: {first_line(error)}")


def keep(files: Mapping[str, bytes]) -> None:
    """Put files of another process where this one looks for code. Raises OSError."""
    for name, content in files.items():
        if not (path := _place(name)).exists():
            write_whole(path, gzip.decompress(content))


def _folders() -> dict[str, Path]:
    """The folder of torch's compiler, and that of the engine's own kernels, which by default contains it. Reading
    CODE.folder also sets it for torch."""
    return {"compiled": CODE.folder.resolve(), "kernels": (cache_folder() / "kernels").resolve()}


def _name(path: Path, folders: Mapping[str, Path]) -> str | None:
    """None if the file is in none of the folders."""
    found = ((kind, folder) for kind, folder in folders.items() if path.is_relative_to(folder))
    return next((f"{kind}/{path.relative_to(folder)}" for kind, folder in found), None)


def _place(name: str) -> Path:
    """Raises ValueError for a name that leaves the folders."""
    kind, _, rest = name.partition("/")
    folders = _folders()
    path = (folders[kind] / rest).resolve()
    if _name(path, folders) != name:
        raise ValueError(f"{name}: not a file of the cache")
    return path


def _mapped() -> Iterator[Path]:
    """The libraries that this process has loaded."""
    lines = os.fsdecode(MAPS.read_bytes()).splitlines() if MAPS.exists() else []
    return (Path(line.split(maxsplit=5)[-1]) for line in lines if line.endswith(".so"))


def _graphs(compiled: Path) -> Iterator[Path]:
    """What torch's compiler needs to find the libraries of this process's graphs."""
    keys = [getattr(code, "_fx_graph_cache_key", None) for code in list(CODE.kept.values())]
    for key in filter(None, keys):
        yield from (compiled / "fxgraph" / key[1:3] / key).glob("[!.]*")
    if keys:  # it first runs small libraries to see which instructions the CPU has
        yield from (path for path in compiled.glob("*/*.so") if not path.name.endswith(".main.so"))
