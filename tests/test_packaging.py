"""The package holds every folder with code, and imports only what it needs."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_folder_with_python_is_packaged() -> None:
    """A folder that is not listed would be missing in the wheel, without an error."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        path.parent.relative_to(ROOT) for top in ("actors", "jobs", "pipeline") for path in (ROOT / top).rglob("*.py")
    }
    assert set(listed) == {"exspec", *(f"exspec.{'.'.join(folder.parts)}" for folder in folders)}


def test_every_file_beside_the_code_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in (ROOT / "/".join(package.split(".")[1:])).glob(pattern)
    }
    found = {path for top in ("actors", "jobs", "pipeline") for path in (ROOT / top).rglob("*") if path.is_file()}
    assert {path for path in found if path.suffix not in (".py", ".pyc", ".md")} <= listed


def output_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; sys.argv = ['exspec', '--help']\n"
        "from exspec.jobs.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert "bench" in output_of(code)


def test_the_engine_imports_nothing_for_ray_files_or_text() -> None:
    code = (
        "import sys, exspec.actors.engine.shape.calibration\n"
        "from exspec.actors.engine import Engine, EngineThread\n"
        "from exspec.actors.engine.drafters.lookup import drafter_class\n"
        "from exspec.actors.engine.drafters.registry import DRAFTERS\n"
        "assert all(map(drafter_class, DRAFTERS)) and 'torch' in sys.modules\n"
        "found = {m.split('.')[0] for m in sys.modules} & {'ray', 'pyarrow', 'fsspec', 's3fs'}\n"
        "ours = {m for m in sys.modules if m.startswith('exspec.') and not m.startswith('exspec.actors')}\n"
        "assert not found | ours, found | ours\n"
    )
    output_of(code)
