"""The policy finds each violation, in every pod template."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.k8s import policy
from tests.k8s.manifests import Manifest, containers, needs_renderer, one, overlay


def worker(objects: list[Manifest]) -> Any:
    return one(objects, "RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]


def head(objects: list[Manifest]) -> Any:
    return one(objects, "RayJob")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]


def submitter(objects: list[Manifest]) -> Any:
    return one(objects, "RayJob")["spec"]["submitterPodTemplate"]


def security(template: Manifest) -> Any:
    return containers(template)[0]["securityContext"]


GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
BREAKS: dict[str, Callable[[list[Manifest]], object]] = {
    "a user that is not root": lambda o: head(o)["spec"]["securityContext"].update(runAsUser=0),
    "no change to the root user": lambda o: security(worker(o)).update(runAsUser=0),
    "no privilege": lambda o: security(worker(o)).update(privileged=True),
    "no escalation": lambda o: security(submitter(o)).pop("allowPrivilegeEscalation"),
    "all capabilities dropped": lambda o: security(head(o)).update(
        capabilities={"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    ),
    "a read-only root": lambda o: security(head(o)).update(readOnlyRootFilesystem=False),
    "RuntimeDefault seccomp": lambda o: worker(o)["spec"]["securityContext"].pop("seccompProfile"),
    "a repository with a tag, not latest": lambda o: containers(worker(o))[0].update(image="example.com/exspec:latest"),
    "a repository with a tag": lambda o: containers(submitter(o))[0].update(image="example.com/exspec"),
    "CPU and memory requested": lambda o: containers(head(o))[0]["resources"].pop("requests"),
    "a memory request like its limit": lambda o: containers(head(o))[0]["resources"]["requests"].update(memory="1Gi"),
    "tolerations on GPU workers, and only there": lambda o: head(o)["spec"].update(tolerations=[GPU_TOLERATION]),
    "a GPU's pod with guaranteed": lambda o: containers(worker(o))[0]["resources"]["requests"].update(cpu="1"),
    "volumes that the restricted": lambda o: head(o)["spec"]["volumes"].append(
        {"name": "h", "hostPath": {"path": "/"}}
    ),
    "no namespace of the host": lambda o: head(o)["spec"].update(hostNetwork=True),
    "no secret in plain text": lambda o: containers(head(o))[0]["env"].append({"name": "HF_TOKEN", "value": "hf_x"}),
    "AWS_SECRET_ACCESS_KEY in plain text": lambda o: one(o, "ConfigMap", "exspec-environment")["data"].update(
        AWS_SECRET_ACCESS_KEY="x"
    ),
    "secrets are not in the manifests": lambda o: o.append({"kind": "Secret", "metadata": {"name": "s"}, "data": {}}),
    "a namespace that enforces": lambda o: one(o, "Namespace")["metadata"].pop("labels"),
    "in another namespace": lambda o: one(o, "ServiceAccount")["metadata"].update(namespace="default"),
    "head, autoscaler: expected a read-only root": lambda o: one(o, "RayJob")["spec"]["rayClusterSpec"][
        "autoscalerOptions"
    ]["securityContext"].pop("readOnlyRootFilesystem"),
    "a writable home": lambda o: containers(head(o))[0].update(volumeMounts=[]),
}


@needs_renderer
@pytest.mark.parametrize("text", BREAKS)
def test_a_violation_is_a_problem(text: str) -> None:
    objects = overlay("autoscale")
    BREAKS[text](objects)
    assert any(text in problem for problem in policy.problems(objects)), policy.problems(objects)
