"""What a platform admits to a cluster: the restricted profile of Pod Security, and further rules."""

import re

from tests.k8s.manifests import Manifest, containers, of_kind, pod_templates
from tests.k8s.rules import GPU, expected, quantity

SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)
VOLUMES = {"configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
TAGGED = re.compile(r"[a-z0-9.-]+(:\d+)?(/[a-z0-9._-]+)+(:(?!latest)[\w][\w.-]*|@sha256:[0-9a-f]{64})")
HOST = ("hostNetwork", "hostPID", "hostIPC", "hostUsers")


def problems(objects: list[Manifest]) -> list[str]:
    found = [
        f"Secret {item['metadata']['name']}: secrets are not in the manifests" for item in of_kind(objects, "Secret")
    ]
    for item in of_kind(objects, "ConfigMap"):
        found += [
            f"ConfigMap {item['metadata']['name']}: {key} in plain text" for key in item["data"] if SECRET.search(key)
        ]
    for place, template in pod_templates(objects):
        found += [f"{place}: {text}" for text in _pod(template)]
        for container in containers(template):
            found += [f"{place}, {container['name']}: {text}" for text in _container(container)]
    return found + _hosts(objects)


def _pod(template: Manifest) -> list[str]:
    spec = template["spec"]
    security = spec.get("securityContext", {})
    gpu = any(GPU in c["resources"].get("limits", {}) for c in containers(template))
    accelerated = [t for t in spec.get("tolerations", []) if t["key"] == GPU]
    return expected(
        {
            "a user that is not root": security.get("runAsNonRoot") is True and security.get("runAsUser", 0) > 0,
            "a group that is not root": security.get("runAsGroup", 0) > 0,
            "RuntimeDefault seccomp": security.get("seccompProfile") == {"type": "RuntimeDefault"},
            "no namespace of the host": not any(spec.get(key) for key in HOST),
            "volumes that the restricted profile allows": all(set(v) - {"name"} <= VOLUMES for v in spec["volumes"]),
            "a size limit per emptyDir": all("sizeLimit" in v["emptyDir"] for v in spec["volumes"] if "emptyDir" in v),
            "tolerations on GPU workers, and only there": bool(accelerated) == gpu
            and (gpu or not spec.get("tolerations")),
            "a ServiceAccount and a priority class": spec.get("serviceAccountName") and spec.get("priorityClassName"),
            "a setting for the API token": "automountServiceAccountToken" in spec,
            "no service links in the environment": spec.get("enableServiceLinks") is False,
        }
    )


def _container(container: Manifest) -> list[str]:
    security, resources = container.get("securityContext", {}), container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    return expected(
        {
            "a repository with a tag, not latest": TAGGED.fullmatch(container["image"]),
            "no privilege": security.get("privileged", False) is False,
            "no escalation": security.get("allowPrivilegeEscalation") is False,
            "all capabilities dropped": security.get("capabilities") == {"drop": ["ALL"]},
            "a read-only root": security.get("readOnlyRootFilesystem") is True,
            "no change to the root user": security.get("runAsUser", 1) > 0 and security.get("runAsNonRoot", True),
            "no seccomp of its own": "seccompProfile" not in security,
            "CPU and memory requested": {"cpu", "memory"} <= set(requests),
            "CPU and memory limited": {"cpu", "memory"} <= set(limits),
            "a memory request like its limit": requests.get("memory") == limits.get("memory"),
            "requests within limits": all(
                quantity(requests[k]) <= quantity(limits[k]) for k in requests if k in limits
            ),
            "a GPU's pod with guaranteed quality of service": GPU not in limits or requests == limits,
            "no secret in plain text": not any(
                SECRET.search(v["name"]) for v in container.get("env", []) if "value" in v
            ),
            "a writable home and /tmp": _writable(container),
        }
    )


def _writable(container: Manifest) -> bool:
    """Whether HOME and /tmp are mounted writable, if HOME is set."""
    homes = [v["value"] for v in container.get("env", []) if v["name"] == "HOME"]
    mounted = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
    return not homes or {*homes, "/tmp"} <= mounted


def _hosts(objects: list[Manifest]) -> list[str]:
    """Every object is in a namespace of the manifests, and the namespace enforces the restricted profile."""
    found = []
    for item in of_kind(objects, "Namespace"):
        labels = item["metadata"].get("labels", {})
        profile, version = (labels.get(f"pod-security.kubernetes.io/enforce{part}") for part in ("", "-version"))
        pinned = profile == "restricted" and version not in (None, "latest")
        found += expected({"a namespace that enforces a version of the restricted profile": pinned})
    names = {item["metadata"]["name"] for item in of_kind(objects, "Namespace")}
    found += [
        f"{item['kind']} {item['metadata']['name']}: in another namespace"
        for item in objects
        if item["kind"] in ("RayJob", "CronJob", "ConfigMap", "ServiceAccount", "NetworkPolicy")
        and item["metadata"].get("namespace") not in names
    ]
    return found
