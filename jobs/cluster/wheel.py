"""Builds a wheel of the running package, which a Ray cluster installs for one job."""

import hashlib
import zipfile
from base64 import urlsafe_b64encode
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import exspec
from exspec.pipeline.errors import JobError

FOLDERS = ("actors", "jobs", "pipeline")  # the checkout of an editable install has other folders too
DATE = (1980, 1, 1, 0, 0, 0)  # of every file, so that equal files give an equal wheel


def build_wheel(folder: Path) -> Path:
    """Write the wheel into the folder. Raises JobError if the package is not installed.

    The wheel declares no dependencies. Ray installs it with pip into a folder for the job, and pip would install a
    second torch and a second Ray there; the cluster's image provides them. The build tag is a digest of the files,
    because Ray identifies a wheel by its name alone.
    """
    try:
        number = version("exspec")
    except PackageNotFoundError as error:
        raise JobError("exspec is not installed, so its version is unknown; install it, or use --no-wheel") from error
    root = Path(exspec.__file__).parent
    found = [*root.glob("*.py"), root / "py.typed", *(p for top in FOLDERS for p in (root / top).rglob("*"))]
    files = {f"exspec/{p.relative_to(root).as_posix()}": p.read_bytes() for p in sorted(found) if _belongs(p, root)}
    information = f"exspec-{number}.dist-info"
    files[f"{information}/METADATA"] = f"Metadata-Version: 2.1\nName: exspec\nVersion: {number}\n".encode()
    files[f"{information}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: exspec\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{information}/RECORD"] = f"{record}{information}/RECORD,,\n".encode()
    build = hashlib.sha256(record.encode()).hexdigest()[:12]
    wheel = folder / f"exspec-{number}-0_{build}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, DATE), content, zipfile.ZIP_DEFLATED)
    return wheel


def _belongs(path: Path, root: Path) -> bool:
    names = path.relative_to(root).parts
    return path.is_file() and not any(name == "__pycache__" or name.startswith(".") for name in names)


def _digest(content: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
