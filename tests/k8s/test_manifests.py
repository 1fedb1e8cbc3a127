"""Every overlay, and every pair of them that the README allows, is what the API server and the operators accept."""

import copy
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
from tests.k8s import policy, rules, schemas
from tests.k8s.manifests import (
    K8S,
    OVERLAYS,
    Manifest,
    RenderError,
    combinations,
    combine,
    job_file,
    needs_renderer,
    of_kind,
    one,
    overlay,
    pod_templates,
    render,
)

ALL = ("base", *OVERLAYS)
PAIRS = list(itertools.combinations(OVERLAYS, 2))


SETTINGS: dict[str, type[Job]] = {"run": Job, "label": LabelJob}  # by command


def invalid(objects: list[Manifest]) -> list[str]:
    return [f"{item['kind']} {item['metadata']['name']}: {text}" for item in objects for text in schemas.problems(item)]


def at(item: Any, path: str) -> Any:
    for key in path.split("."):
        item = item[int(key) if key.isdigit() else key]
    return item


def test_the_overlays_are_those_that_the_readme_speaks_of() -> None:
    table = combinations()
    assert {name for pair in table for name in pair} == set(OVERLAYS)
    assert {frozenset(pair) for pair in table} == {frozenset(pair) for pair in PAIRS}


@needs_renderer
@pytest.mark.parametrize("name", ALL)
def test_every_object_is_valid(name: str) -> None:
    assert invalid(overlay(name)) == []


@needs_renderer
@pytest.mark.parametrize("name", ALL)
def test_the_operators_accept_it(name: str) -> None:
    assert rules.problems(overlay(name)) == []


@needs_renderer
def test_the_schemas_of_kuberay_are_at_hand() -> None:
    if not schemas.CRDS.is_dir():
        pytest.skip(f"no KubeRay CRDs in {schemas.CRDS} (EXSPEC_K8S_CRDS): RayJobs were checked by rules and as pods")
    (item,) = of_kind(overlay("base"), "RayJob")
    item["spec"]["nonsense"] = 1
    assert any("nonsense" in text for text in schemas.problems(item))


def own_job(pair: tuple[str, ...]) -> str:
    """A job file as the person writes it who combines two overlays: for the device and the workers that they give."""
    folder = K8S / "overlays" / "cpu" if "cpu" in pair else K8S / "base"
    job = yaml.safe_load((folder / "job.yaml").read_text())
    if "autoscale" in pair:
        job["actors"] = "1:4"
    return yaml.safe_dump(job)


@needs_renderer
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_the_table_of_combinations_is_true(pair: tuple[str, str]) -> None:
    """A pair that goes together renders in both orders to the same objects, with nothing wrong; another does not."""
    table = combinations()
    wrong, made = [], []
    for order in (pair, pair[::-1]):
        try:
            objects = combine(order, own_job(pair))
        except RenderError as error:
            wrong.append(str(error))
        else:
            wrong += [*invalid(objects), *rules.problems(objects), *policy.problems(objects)]
            made.append({(item["kind"], item["metadata"]["name"]): item for item in objects})
    if made[1:] and made[0] != made[1]:
        wrong.append("the order makes a difference")
    assert table.get(pair, table.get(pair[::-1])) == (not wrong), wrong


TYPOS = [
    ("RayJob", "spec.backoffLimits", 1),
    ("RayJob", "spec.rayClusterSpec.headGroupSpec.rayStartParam", {}),
    ("RayJob", "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.toleration", []),
    ("RayJob", "spec.submitterPodTemplate.spec.containers.0.resource", {}),
    (
        "RayJob",
        "spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.securityContext.readOnlyRootFileSystem",
        True,
    ),
    ("RayJob", "spec.activeDeadlineSeconds", "2 days"),
    ("NetworkPolicy", "spec.egres", []),
    ("PodDisruptionBudget", "spec.minAvailble", 1),
    ("PodMonitor", "spec.podMetricEndpoints", []),
    ("Namespace", "metadata.label", {}),
]


@needs_renderer
@pytest.mark.parametrize(("kind", "path", "value"), TYPOS, ids=[path for _, path, _ in TYPOS])
def test_a_typo_is_found(kind: str, path: str, value: Any) -> None:
    if path.startswith("spec.") and kind == "RayJob" and ".spec." not in path and not schemas.CRDS.is_dir():
        pytest.skip("the field is KubeRay's, whose CRDs are not at hand")
    item = of_kind(overlay("base"), kind)[0]
    assert schemas.problems(item) == []
    parent, _, key = path.rpartition(".")
    at(item, parent)[key] = value
    assert schemas.problems(item) != []


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
    ("base", "spec.submissionMode", "SidecarMode", "no submitter of its own"),
    ("autoscale", "spec.rayClusterSpec.workerGroupSpecs.0.minReplicas", 5, "minReplicas <= replicas"),
    ("autoscale", "spec.rayClusterSpec.workerGroupSpecs.0.maxReplicas", 8, "the job says 1:4"),
    ("autoscale", "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.restartPolicy", "Always", "not restarted"),
    ("base", "spec.rayClusterSpec.workerGroupSpecs.0.rayStartParams.object-store-memory", "9000000000", "/dev/shm"),
    ("base", "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", "4", "a head without work"),
    ("base", "spec.rayClusterSpec.rayVersion", "2.40.0", "a Ray version"),
    ("base", "spec.submitterPodTemplate.spec.serviceAccountName", "other", "no ServiceAccount other"),
    ("cron", "spec.suspend", False, "its template would run"),
]


@needs_renderer
@pytest.mark.parametrize(("name", "path", "value", "text"), BROKEN, ids=[f"{n}-{t}" for n, _, _, t in BROKEN])
def test_what_an_operator_refuses_is_found(name: str, path: str, value: Any, text: str) -> None:
    objects = overlay(name)
    parent, _, key = path.rpartition(".")
    place = at(one(objects, "RayJob"), parent)
    place[int(key) if key.isdigit() else key] = value
    assert any(text in problem for problem in rules.problems(objects)), rules.problems(objects)


@needs_renderer
@pytest.mark.parametrize("name", ALL)
def test_the_job_file_is_one_that_its_command_takes(name: str, tmp_path: Path) -> None:
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


@needs_renderer
@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("identity", IDENTITIES)
def test_a_cloud_s_identity_goes_with_every_overlay(identity: str, name: str) -> None:
    objects = combine((name, identity, "no-monitor"), own_job((name,)))
    assert invalid(objects) == rules.problems(objects) == policy.problems(objects) == []
    assert IDENTITIES[identity] in one(objects, "ServiceAccount", "exspec")["metadata"]["annotations"]
    assert not of_kind(objects, "PodMonitor")


@needs_renderer
def test_azure_s_webhook_finds_the_pods_that_read_and_write() -> None:
    for place, template in pod_templates(of_kind(combine(("azure-identity",)), "RayJob")):
        used = template["metadata"]["labels"].get("azure.workload.identity/use")
        assert used == (None if place.endswith("submitter") else "true"), place


@needs_renderer
def test_the_metadata_server_is_open_to_google_s_identity_alone() -> None:
    opened = {item["metadata"]["name"]: item["spec"] for item in of_kind(combine(("gcp-identity",)), "NetworkPolicy")}
    spec = opened["metadata-server"]
    assert spec["podSelector"] == opened["storage-and-hub"]["podSelector"]
    places = {(rule["to"][0]["ipBlock"]["cidr"], port["port"]) for rule in spec["egress"] for port in rule["ports"]}
    ports = {"169.254.169.252/32": (987, 988), "169.254.169.254/32": (80, 8080, 53)}
    assert places == {(address, port) for address, open_ones in ports.items() for port in open_ones}


@needs_renderer
@pytest.mark.parametrize("name", ALL)
def test_nothing_goes_in_or_out_but_by_a_policy(name: str) -> None:
    """The default is to deny; Ray's ports are open to Ray's pods alone, and the internet to HTTPS out of them."""
    policies = {item["metadata"]["name"]: item["spec"] for item in of_kind(overlay(name), "NetworkPolicy")}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ray = {
        "app.kubernetes.io/part-of": "exspec",
        "app.kubernetes.io/instance": "exspec",
        "ray.io/is-ray-node": "yes",
    }
    for spec in policies.values():
        for rule in spec.get("ingress", []):
            assert rule["from"], "from everywhere"
            inside = all(source == {"podSelector": {"matchLabels": ray}} for source in rule["from"])
            assert inside or {port["port"] for port in rule["ports"]} <= {8080, 8265}
        for rule in spec.get("egress", []):
            inside = rule.get("to") == [{"podSelector": {"matchLabels": ray}}]
            assert inside or {port["port"] for port in rule["ports"]} <= {53, 443, 6443, 8265, 9000}
    for block in (to["ipBlock"] for to in policies["storage-and-hub"]["egress"][0]["to"]):
        assert block["cidr"] == "2000::/3" or "169.254.0.0/16" in block["except"], "the metadata service is open"


@needs_renderer
def test_spot_workers_and_an_on_demand_head() -> None:
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


def test_validation_leaves_its_object_alone() -> None:
    item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"a": "b"}}
    before = copy.deepcopy(item)
    assert schemas.problems(item) == []
    assert item == before


@needs_renderer
def test_the_readme_s_own_folder_renders(tmp_path: Path) -> None:
    text = (K8S / "README.md").read_text()
    found = re.search(r"^    # mine/kustomization.yaml\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert found
    folder = tmp_path.resolve()
    mine = found[1].replace("../k8s", os.path.relpath(K8S, folder)).replace("REGISTRY", "registry.example.com")
    (folder / "kustomization.yaml").write_text(textwrap.dedent(mine))
    (folder / "job.yaml").write_text((K8S / "base" / "job.yaml").read_text())
    objects = render(folder)
    assert invalid(objects) == rules.problems(objects) == policy.problems(objects) == []
    assert one(objects, "ConfigMap", "exspec-environment")["data"]["AWS_ENDPOINT_URL"] == "https://s3.example.com"
