"""The Dockerfile passes its linter and follows our rules for images, and the build context has only the package."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.k8s.manifests import K8S, ROOT, containers, needs_renderer, overlay, pod_templates

DOCKERFILE = (K8S / "Dockerfile").read_text()
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL))


def lint(text: str) -> subprocess.CompletedProcess[str]:
    if HADOLINT is None:
        pytest.skip("no hadolint for this platform")
    return subprocess.run([HADOLINT, "--failure-threshold", "style", "-"], input=text, capture_output=True, text=True)


def test_the_linter_finds_nothing() -> None:
    done = lint(DOCKERFILE)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ubuntu:24.04 AS base-cpu", "ubuntu:latest AS base-cpu"),
        ("USER 10001:10001", "USER root"),
        ("apt-get install --yes --no-install-recommends ca", "apt-get install --yes ca"),
        ("WORKDIR /home/exspec", "WORKDIR home"),
    ],
)
def test_the_linter_finds_mistakes(old: str, new: str) -> None:
    assert old in DOCKERFILE
    assert lint(DOCKERFILE.replace(old, new)).returncode != 0


def test_each_variant_has_a_base_with_a_version() -> None:
    bases = dict(re.findall(r"^FROM (\S+) AS (base-\S+)", DOCKERFILE, re.MULTILINE))
    assert set(bases.values()) == {"base-cuda", "base-cpu"}
    assert all(re.search(r":\d+\.\d+", name) for name in bases)
    assert STAGES.keys() == {"base-cuda", "base-cpu", "build", "final"}


def test_the_last_stage_builds_nothing_and_does_not_run_as_root() -> None:
    final = STAGES["final"]
    installed = re.findall(r"install --yes --no-install-recommends ([^\\]*)", final)[0].split()
    assert installed == ["ca-certificates", "g++", "python3.12", "python3.12-dev"], "jobs compile kernels"
    assert "COPY --from=build /opt/exspec /opt/exspec" in final
    assert not re.search(r"\bpip\b|-venv", final)
    assert re.search(r"^USER 10001:10001$", final, re.MULTILINE)
    assert final.index("USER 10001") < final.index("exspec --help"), "the final user runs the check"


@needs_renderer
@pytest.mark.parametrize("name", ["base", "cpu", "cron"])
def test_the_pods_run_as_the_images_user(name: str) -> None:
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert user
    tag = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for _, template in pod_templates(overlay(name)):
        security = template["spec"]["securityContext"]
        assert (str(security["runAsUser"]), str(security["runAsGroup"])) == user.groups()
        variant = "cpu" if name == "cpu" else "cuda"
        assert {c["image"].rpartition(":")[2] for c in containers(template)} == {f"{tag}-{variant}"}


def test_the_context_has_only_the_package() -> None:
    """BuildKit prefers the ignore file next to a Dockerfile to the one at the top."""
    lines = [line for line in (K8S / "Dockerfile.dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.split(".")[1] for name in project["tool"]["setuptools"]["packages"] if "." in name}
    files = {project["project"]["readme"], *project["project"]["license-files"]}
    assert allowed == packages | files | {
        "__init__.py", "constraints.txt", "k8s/install.sh", "py.typed", "pyproject.toml",
    }  # fmt: skip
    assert all((ROOT / name).exists() for name in allowed)


def test_the_ray_of_the_image_is_the_ray_of_the_manifest() -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    stated = re.search(r"rayVersion: (\S+)", (K8S / "base" / "rayjob.yaml").read_text())
    assert pinned
    assert stated
    assert pinned[1] == stated[1]
