"""Renders the folders under k8s/ with kustomize, and finds things in the result."""

import copy
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
Manifest = dict[str, Any]
RENDERERS = (("kubectl", "kustomize", "version", "--client"), ("kustomize", "build", "version"))


class RenderError(Exception):
    """kustomize cannot render a folder."""


@functools.cache
def renderer() -> list[str] | None:
    """The command that renders a folder, or None if no installed version supports components."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    for name, verb, *version in RENDERERS:
        if found := shutil.which(name, path=places):
            lines = subprocess.run([found, *version], capture_output=True, text=True).stdout.splitlines()
            if lines and (number := re.search(r"(\d+)\.\d+", lines[-1])) and int(number[1]) >= 5:
                return [found, verb]
    return None


needs_renderer = pytest.mark.skipif(
    renderer() is None, reason="neither a kubectl with kustomize 5 nor a kustomize 5 is here"
)


@functools.cache
def _render(folder: Path) -> str:
    command = renderer()
    assert command, "no kustomize is installed"
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise RenderError(done.stderr)
    return done.stdout


def render(folder: Path) -> list[Manifest]:
    """The objects of a kustomization."""
    return list(yaml.safe_load_all(_render(folder)))


def folder_of(name: str) -> Path:
    return K8S / "overlays" / name if name != "base" else K8S / "base"


def overlay(name: str) -> list[Manifest]:
    return render(folder_of(name))


def combine(components: tuple[str, ...], job: str | None = None, **more: Any) -> list[Manifest]:
    """The base with components in this order, as in a user's kustomization. Raises RenderError.

    more: further fields of the kustomization.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        top = os.path.relpath(K8S, folder)
        text: Manifest = {
            "resources": [f"{top}/base"],
            "components": [f"{top}/components/{name}" for name in components],
            **more,
        }
        if job is not None:
            (folder / "job.yaml").write_text(job)
            text["configMapGenerator"] = [
                {"name": "exspec-job", "namespace": "exspec", "behavior": "replace", "files": ["job.yaml"]}
            ]
            text["generatorOptions"] = {"disableNameSuffixHash": True}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
        return render(folder)


def suffixed(name: str, suffix: str) -> list[Manifest]:
    """An overlay with a name suffix, for several jobs in one namespace."""
    place = folder_of(name)
    text = yaml.safe_load((place / "kustomization.yaml").read_text())
    parts = tuple(Path(part).name for part in text.get("components", []))
    job = (place / "job.yaml" if (place / "job.yaml").exists() else K8S / "base" / "job.yaml").read_text()
    return combine(parts, job, nameSuffix=suffix)


def of_kind(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [found for found in objects if found["kind"] == kind]


def one(objects: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    found = [item for item in of_kind(objects, kind) if name in (None, item["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} objects {kind} {name or ''}"
    return found[0]


def pod_templates(objects: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod template and its name, as the operator makes the pods, with the autoscaler in the head."""
    for item in objects:
        name, spec = f"{item['kind']}/{item['metadata']['name']}", item.get("spec", {})
        if item["kind"] == "CronJob":
            yield name, spec["jobTemplate"]["spec"]["template"]
        elif item["kind"] == "RayJob":
            yield f"{name} submitter", spec["submitterPodTemplate"]
            cluster = spec["rayClusterSpec"]
            head = copy.deepcopy(cluster["headGroupSpec"]["template"])
            if cluster.get("enableInTreeAutoscaling"):
                options = cluster.get("autoscalerOptions", {})
                beside = {k: options.get(k, empty) for k, empty in BESIDE.items()}
                image = head["spec"]["containers"][0]["image"]
                head["spec"]["containers"].append({"name": "autoscaler", "image": image, **beside})
            yield f"{name} head", head
            for group in cluster["workerGroupSpecs"]:
                yield f"{name} {group['groupName']}", group["template"]


BESIDE: Manifest = {"env": [], "envFrom": [], "resources": {}, "securityContext": {}, "volumeMounts": []}


def containers(template: Manifest) -> list[Manifest]:
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def job_file(objects: list[Manifest]) -> str:
    """The job file in the head's /etc/exspec."""
    head = of_kind(objects, "RayJob")[0]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (name,) = (v["configMap"]["name"] for v in head["volumes"] if v["name"] == "job")
    return str(one(objects, "ConfigMap", name)["data"]["job.yaml"])


def values(container: Manifest) -> dict[str, str]:
    """The variables with a value in the manifest, with $(NAME) expanded as by the kubelet."""
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        if "value" in variable:
            known = re.compile("|".join(re.escape(f"$({name})") for name in found) or "(?!)")
            found[variable["name"]] = known.sub(lambda m: found[m[0][2:-1]], variable["value"])
    return found


def environment(objects: list[Manifest], container: Manifest, secrets: dict[str, dict[str, str]]) -> dict[str, str]:
    """A container's variables as the kubelet resolves them. secrets: keys and values by the Secret's name."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            found |= one(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
        else:
            found |= secrets[source["secretRef"]["name"]]
    for variable in container.get("env", []):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
            continue
        reference = variable["valueFrom"]["secretKeyRef"]
        secret = secrets.get(reference["name"], {})
        if reference["key"] in secret:
            found[variable["name"]] = secret[reference["key"]]
        else:
            assert reference.get("optional"), f"{variable['name']}: no Secret {reference['name']}"
    return found


def combinations() -> dict[tuple[str, str], bool]:
    """Which two overlays go together: all but those that k8s/README.md lists."""
    text = (K8S / "README.md").read_text()
    found = re.search(r"^The overlays \(([^)]*)\)", text, re.MULTILINE)
    assert found, "k8s/README.md has no line that begins with `The overlays (`"
    names = re.findall(r"`([\w-]+)`", found[1])
    refused = set(map(frozenset, re.findall(r"^- `([\w-]+)` and `([\w-]+)`: ", text, re.MULTILINE)))
    assert refused, "k8s/README.md lists no two overlays that do not go together"
    table = {pair: frozenset(pair) not in refused for pair in itertools.combinations(names, 2)}
    assert refused == {frozenset(pair) for pair, together in table.items() if not together}, "an unknown overlay"
    return table
