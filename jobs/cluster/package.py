"""Copies the running package for a Ray cluster, which puts it on the path of one job."""

import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import exspec
from exspec.pipeline.errors import JobError

FOLDERS = ("actors", "jobs", "pipeline")  # the checkout of an editable install has other folders too


def copy_package(folder: Path, beside: Path) -> Path:
    """Copy the package into `folder`, and its metadata into `beside`; returns the copy. Raises JobError if it is not
    installed.

    A folder, not a wheel: Ray identifies a wheel by its file name, so all jobs share it. When a node joins, Ray
    installs the wheel for several jobs at once. The second installation fails and removes the first, and no job can
    use the node again. Ray unpacks a folder once. The copy declares no dependencies: the image provides torch and Ray.
    """
    try:
        number = version("exspec")
    except PackageNotFoundError as error:
        raise JobError("exspec is not installed, so its version is unknown; install it, or use --no-send") from error
    root, copy = Path(exspec.__file__).parent, folder / "exspec"
    copy.mkdir()
    for path in (*root.glob("*.py"), root / "py.typed"):
        shutil.copy(path, copy)
    for top in FOLDERS:
        shutil.copytree(root / top, copy / top, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (information := beside / f"exspec-{number}.dist-info").mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: exspec\nVersion: {number}\n")
    return copy
