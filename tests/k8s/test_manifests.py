"""The API server, the operators and the policy accept every overlay, and every pair that the README allows."""

import itertools
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from exspec.jobs.demo import DEMO_PAIR
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.job.settings import Job, load_job
from tests.k8s import checks, rules, schemas
from tests.k8s.manifests import (
    K8S,
    OVERLAYS,
    RenderError,
    combinations,
    combine,
    folder_of,
    job_file,
    needs_renderer,
    of_kind,
    one,
    overlay,
    pod_templates,
    render,
)

pytestmark = needs_renderer

ALL = ("base", *OVERLAYS)
PAIRS = list(itertools.combinations(OVERLAYS, 2))
SETTINGS: dict[str, type[Job]] = {"run": Job, "label": LabelJob}  # by command


def at(item: Any, path: str) -> Any:
    """The value at a path with dots."""
    for key in path.split("."):
        item = item[int(key) if key.isdigit() else key]
    return item


def change(item: Any, path: str, value: Any) -> None:
    parent, _, key = path.rpartition(".")
    at(item, parent)[int(key) if key.isdigit() else key] = value


@pytest.mark.parametrize("name", ALL)
def test_every_overlay_is_accepted(name: str) -> None:
    objects = overlay(name)
    assert len(list(pod_templates(objects))) >= 3
    assert checks.problems(objects) == []


def own_job(pair: tuple[str, ...]) -> str:
    """A user's job file for two overlays, with their device and their number of workers."""
    job = yaml.safe_load((folder_of("cpu" if "cpu" in pair else "base") / "job.yaml").read_text())
    if "autoscale" in pair:
        job["actors"] = "1:4"
    return yaml.safe_dump(job)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_the_table_of_combinations_is_true(pair: tuple[str, str]) -> None:
    """A pair that goes together renders to the same accepted objects in both orders. Other pairs do not."""
    table = combinations()
    wrong, made = [], []
    for order in (pair, pair[::-1]):
        try:
            objects = combine(order, own_job(pair))
        except RenderError as error:
            wrong.append(str(error))
        else:
            wrong += checks.problems(objects)
            made.append({(item["kind"], item["metadata"]["name"]): item for item in objects})
    if made[1:] and made[0] != made[1]:
        wrong.append("the order matters")
    assert table.get(pair, table.get(pair[::-1])) == (not wrong), wrong


TYPOS = [
    ("RayJob", "spec.backoffLimits", 1),
    ("RayJob", "spec.rayClusterSpec.headGroupSpec.rayStartParam", {}),
    ("RayJob", "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.toleration", []),
    ("RayJob", "spec.submitterPodTemplate.spec.containers.0.resource", {}),
    (
        "RayJob",
        "spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.securityContext.readOnlyRootFileSystem",
        1,
    ),
    ("RayJob", "spec.activeDeadlineSeconds", "2 days"),
    ("NetworkPolicy", "spec.egres", []),
    ("PodDisruptionBudget", "spec.minAvailble", 1),
    ("PodMonitor", "spec.podMetricEndpoints", []),
    ("Namespace", "metadata.label", {}),
]


@pytest.mark.parametrize(("kind", "path", "value"), TYPOS, ids=[path for _, path, _ in TYPOS])
def test_a_typo_is_found(kind: str, path: str, value: Any) -> None:
    if path.startswith("spec.") and kind == "RayJob" and ".spec." not in path and not schemas.CRDS.is_dir():
        pytest.skip(f"no KubeRay CRDs in {schemas.CRDS} (EXSPEC_K8S_CRDS)")
    item = of_kind(overlay("base"), kind)[0]
    assert schemas.problems(item) == []
    change(item, path, value)
    assert any(path.rpartition(".")[2] in text for text in schemas.problems(item))


BROKEN = [
    ("base", "metadata.name", "x" * 48, "at most 47"),
    ("base", "metadata.name", "Exspec", "DNS label"),
    ("base", "spec.shutdownAfterJobFinishes", False, "TTL only with shutdown"),
    ("debug", "spec.shutdownAfterJobFinishes", True, "deletion rules or shutdown"),
    ("debug", "spec.deletionStrategy.deletionRules.0.condition.ttlSeconds", 10**6, "out of order"),
    ("debug", "spec.deletionStrategy.deletionRules.1.policy", "DeleteWorkers", "two rules"),
    ("debug", "spec.rayClusterSpec.enableInTreeAutoscaling", True, "does not go with autoscaling"),
    ("kueue", "spec.shutdownAfterJobFinishes", False, "Kueue: expected shutdown"),
    ("kueue", "spec.rayClusterSpec.enableInTreeAutoscaling", True, "Kueue: expected no autoscaling"),
    ("kueue", "spec.rayClusterSpec.workerGroupSpecs.0.groupName", "head", "none called head"),
    ("base", "spec.submissionMode", "SidecarMode", "a submitter pod"),
    ("autoscale", "spec.rayClusterSpec.workerGroupSpecs.0.minReplicas", 5, "minReplicas <= replicas"),
    ("autoscale", "spec.rayClusterSpec.workerGroupSpecs.0.maxReplicas", 8, "the job says 1:4"),
    ("autoscale", "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.restartPolicy", "Always", "not restarted"),
    ("base", "spec.rayClusterSpec.workerGroupSpecs.0.rayStartParams.object-store-memory", "9000000000", "/dev/shm"),
    ("base", "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", "4", "a head without work"),
    ("base", "spec.rayClusterSpec.rayVersion", "2.40.0", "a Ray version"),
    ("base", "spec.submitterPodTemplate.spec.serviceAccountName", "other", "no ServiceAccount other"),
    ("cron", "spec.suspend", False, "the template would run"),
]


@pytest.mark.parametrize(("name", "path", "value", "text"), BROKEN, ids=[f"{n}-{t}" for n, _, _, t in BROKEN])
def test_what_an_operator_refuses_is_a_problem(name: str, path: str, value: Any, text: str) -> None:
    objects = overlay(name)
    change(one(objects, "RayJob"), path, value)
    assert any(text in problem for problem in rules.problems(objects)), rules.problems(objects)


@pytest.mark.parametrize("name", ALL)
def test_the_command_accepts_the_job_file(name: str, tmp_path: Path) -> None:
    objects = overlay(name)
    program, command, *arguments = one(objects, "RayJob")["spec"]["entrypoint"].split()
    assert (program, arguments[:2]) == ("exspec", ["--job", "/etc/exspec/job.yaml"])
    file = tmp_path / "job.yaml"
    file.write_text(job_file(objects))
    job = load_job(SETTINGS[command], file, {"ray_address": "auto"}, DEMO_PAIR)
    assert job.ray_address == arguments[arguments.index("--ray-address") + 1] == "auto"


IDENTITIES = {
    "aws-identity": "eks.amazonaws.com/role-arn",
    "gcp-identity": "iam.gke.io/gcp-service-account",
    "azure-identity": "azure.workload.identity/client-id",
}


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("identity", IDENTITIES)
def test_every_overlay_works_with_a_clouds_identity(identity: str, name: str) -> None:
    objects = combine((name, identity, "no-monitor"), own_job((name,)))
    assert checks.problems(objects) == []
    assert IDENTITIES[identity] in one(objects, "ServiceAccount", "exspec")["metadata"]["annotations"]
    assert not of_kind(objects, "PodMonitor")


def test_pods_that_read_and_write_have_azures_label() -> None:
    for place, template in pod_templates(of_kind(combine(("azure-identity",)), "RayJob")):
        used = template["metadata"]["labels"].get("azure.workload.identity/use")
        assert used == (None if place.endswith("submitter") else "true"), place


def test_only_googles_identity_opens_the_metadata_server() -> None:
    opened = {item["metadata"]["name"]: item["spec"] for item in of_kind(combine(("gcp-identity",)), "NetworkPolicy")}
    spec = opened["metadata-server"]
    assert spec["podSelector"] == opened["storage-and-hub"]["podSelector"]
    found = {(rule["to"][0]["ipBlock"]["cidr"], port["port"]) for rule in spec["egress"] for port in rule["ports"]}
    ports = {"169.254.169.252/32": (987, 988), "169.254.169.254/32": (80, 8080, 53)}
    assert found == {(address, port) for address, numbers in ports.items() for port in numbers}


@pytest.mark.parametrize("name", ALL)
def test_only_named_traffic_goes_in_or_out(name: str) -> None:
    """The default is to deny. Ray's ports are open to Ray's pods only, which may send HTTPS to the internet."""
    policies = {item["metadata"]["name"]: item["spec"] for item in of_kind(overlay(name), "NetworkPolicy")}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ray = {f"app.kubernetes.io/{key}": "exspec" for key in ("part-of", "instance")} | {"ray.io/is-ray-node": "yes"}
    for spec in policies.values():
        for rule in spec.get("ingress", []):
            assert rule["from"], "open to every source"
            inside = all(source == {"podSelector": {"matchLabels": ray}} for source in rule["from"])
            assert inside or {port["port"] for port in rule["ports"]} <= {8080, 8265}
        for rule in spec.get("egress", []):
            inside = rule.get("to") == [{"podSelector": {"matchLabels": ray}}]
            assert inside or {port["port"] for port in rule["ports"]} <= {53, 443, 6443, 8265, 9000}
    for block in (to["ipBlock"] for to in policies["storage-and-hub"]["egress"][0]["to"]):
        assert block["cidr"] == "2000::/3" or "169.254.0.0/16" in block["except"], "the metadata service is open"


def test_spot_workers_and_a_head_on_demand() -> None:
    cluster = one(overlay("spot"), "RayJob")["spec"]["rayClusterSpec"]
    place = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
    (head,) = at(cluster["headGroupSpec"]["template"], place)
    refused = {(e["key"], *e["values"]) for e in head["matchExpressions"] if e["operator"] == "NotIn"}
    wanted = {
        (expression["key"], *expression["values"])
        for term in at(cluster["workerGroupSpecs"][0]["template"], place)
        for expression in term["matchExpressions"]
    }
    assert wanted
    assert wanted <= refused


def test_the_folder_in_the_readme_is_accepted(tmp_path: Path) -> None:
    text = (K8S / "README.md").read_text()
    found = re.search(r"^    # mine/kustomization.yaml\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert found
    folder = tmp_path.resolve()
    mine = found[1].replace("../k8s", os.path.relpath(K8S, folder)).replace("REGISTRY", "registry.example.com")
    (folder / "kustomization.yaml").write_text(textwrap.dedent(mine))
    (folder / "job.yaml").write_text((K8S / "base" / "job.yaml").read_text())
    objects = render(folder)
    assert checks.problems(objects) == []
    assert one(objects, "ConfigMap", "exspec-environment")["data"]["AWS_ENDPOINT_URL"] == "https://s3.example.com"
