"""Strict validation with Kubernetes' schemas from kubernetes-validate, KubeRay's CRDs, or the schemas below."""

import functools
import os
import re
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from tests.k8s.manifests import ROOT, Manifest, pod_templates

KUBERNETES = "1.32"
STRICT = f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
CRDS = Path(os.environ.get("EXSPEC_K8S_CRDS", ROOT.parent / "shared" / "k8s-crds"))


def problems(item: Manifest) -> list[str]:
    """What is wrong with an object. An unknown field is wrong."""
    group = item["apiVersion"].partition("/")[0]
    if group == "ray.io":
        return _ray(item) + _pods(item)
    if group in ("kueue.x-k8s.io", "monitoring.coreos.com"):
        return _errors(Draft202012Validator(OTHERS[item["kind"]]), item)
    return _kubernetes(item)


def _kubernetes(item: Manifest) -> list[str]:
    return _errors(_validator(item["kind"], item["apiVersion"]), item)


@functools.cache
def _validator(kind: str, version: str) -> Draft202012Validator:
    """Like kubernetes_validate.validate, which reads all definitions again for every object."""
    name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", version)
    schema = schema_contents(f"{STRICT}/{kind.lower()}-{name}.json", KUBERNETES)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions())


@functools.cache
def _definitions() -> Registry[Any]:
    definitions = Resource.from_contents(schema_contents(f"{STRICT}/_definitions.json", KUBERNETES))
    return (definitions @ Registry()).crawl()


def _pods(item: Manifest) -> list[str]:
    """Problems of the pod templates in an object. CRDs have fewer rules for a pod than Kubernetes."""
    found = []
    for place, template in pod_templates([item]):
        pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "x", **template.get("metadata", {})}}
        found += [f"{place}: {problem}" for problem in _kubernetes(pod)]
    return found


def _ray(item: Manifest) -> list[str]:
    return _errors(_crd(item["kind"]), item) if CRDS.is_dir() else []


def read(file: Path) -> Any:
    """A large YAML file, parsed by libyaml, which is ten times as fast as Python."""
    return yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@functools.cache
def _crd(kind: str) -> Draft202012Validator:
    definition = read(CRDS / f"ray.io_{kind.lower()}s.yaml")
    (version,) = (v for v in definition["spec"]["versions"] if v["name"] == "v1")
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = METADATA
    return Draft202012Validator(_strict(schema))


def _strict(schema: Any) -> Any:
    """A structural schema as a JSON schema that rejects unknown fields."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {k: _strict(v) if k != "properties" else {n: _strict(s) for n, s in v.items()} for k, v in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def _errors(validator: Draft202012Validator, item: Manifest) -> list[str]:
    return [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in validator.iter_errors(item)]


def _object(required: str = "", **properties: Any) -> Any:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _many(item: Any) -> Any:
    return {"type": "array", "items": item}


TEXT, NUMBER, TEXTS = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "object", "additionalProperties": {"type": "string"}},
)
QUANTITY = {"type": ["integer", "string"]}
METADATA = _object("name", name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)
SELECTOR = _object(matchLabels=TEXTS)
TAINT = _object("key effect", key=TEXT, value=TEXT, effect={"enum": ["NoSchedule", "NoExecute", "PreferNoSchedule"]})
QUOTA = _object("name nominalQuota", name=TEXT, nominalQuota=QUANTITY)


def _kind(spec: Any, **properties: Any) -> Any:
    more = {"spec": spec} if spec else {}
    return _object("apiVersion kind metadata", apiVersion=TEXT, kind=TEXT, metadata=METADATA, **more, **properties)


# No library has these schemas. They have the fields that the manifests use, as the projects document them.
OTHERS = {
    "ResourceFlavor": _kind(_object(nodeLabels=TEXTS, nodeTaints=_many(TAINT))),
    "ClusterQueue": _kind(
        _object(
            "resourceGroups",
            namespaceSelector=SELECTOR,
            queueingStrategy={"enum": ["StrictFIFO", "BestEffortFIFO"]},
            preemption=_object(withinClusterQueue={"enum": ["Never", "LowerPriority", "LowerOrNewerEqualPriority"]}),
            resourceGroups=_many(
                _object(
                    "coveredResources flavors",
                    coveredResources=_many(TEXT),
                    flavors=_many(_object("name resources", name=TEXT, resources=_many(QUOTA))),
                )
            ),
        )
    ),
    "LocalQueue": _kind(_object("clusterQueue", clusterQueue=TEXT)),
    "WorkloadPriorityClass": _kind(None, value=NUMBER, description=TEXT),
    "PodMonitor": _kind(
        _object(
            "selector podMetricsEndpoints",
            selector=SELECTOR,
            podTargetLabels=_many(TEXT),
            podMetricsEndpoints=_many(_object(port=TEXT, interval=TEXT, path=TEXT)),
        )
    ),
}
