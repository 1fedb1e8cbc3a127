"""Rules that no schema has: those of KubeRay 1.7's operator, of Kueue's webhook, and of the job itself."""

import re
from typing import Any

import yaml

from tests.k8s.manifests import Manifest, containers, job_file, of_kind, pod_templates, values

RAYJOB_NAME = 47  # characters; the cluster's name has six more, and the names of its services must be labels
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
QUEUE = "kueue.x-k8s.io/queue-name"
GPU = "nvidia.com/gpu"
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
ORDER = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")


def quantity(text: Any) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def expected(conditions: dict[str, Any]) -> list[str]:
    """A problem for every condition that does not hold."""
    return [f"expected {text}" for text, holds in conditions.items() if not holds]


def problems(objects: list[Manifest]) -> list[str]:
    """What the operator, Kueue or the job would refuse, and what would never start."""
    found = []
    for item in of_kind(objects, "RayJob"):
        found += [f"{item['metadata']['name']}: {text}" for text in (*_operator(item), *_cluster(item), *_kueue(item))]
        found += _actors(item, yaml.safe_load(job_file(objects)))
    return found + _nightly(objects) + _references(objects)


def _operator(item: Manifest) -> list[str]:
    name, spec = item["metadata"]["name"], item["spec"]
    shutdown, strategy = spec.get("shutdownAfterJobFinishes", False), spec.get("deletionStrategy")
    rules = (strategy or {}).get("deletionRules", [])
    conditions = {
        f"a name of at most {RAYJOB_NAME} characters": len(name) <= RAYJOB_NAME,
        "a name that is a DNS label": DNS_LABEL.fullmatch(name),
        "TTL only with shutdown": shutdown or not spec.get("ttlSecondsAfterFinished"),
        "suspend only with shutdown": shutdown or not spec.get("suspend"),
        "deletion rules or shutdown": not (rules and shutdown),
        "deletion rules in their strategy": strategy is None or rules,
        "a deadline that is positive": spec.get("activeDeadlineSeconds", 1) > 0,
        "a backoff limit that is not negative": spec.get("backoffLimit", 0) >= 0,
        "a submitter pod": spec.get("submissionMode") == "K8sJobMode",
        "its own cluster": "rayClusterSpec" in spec and "clusterSelector" not in spec,
    }
    return expected(conditions) + _rules(item, rules)


def _rules(item: Manifest, rules: list[Manifest]) -> list[str]:
    found, times = [], {}
    for rule in rules:
        state = rule["condition"].get("jobStatus") or rule["condition"]["jobDeploymentStatus"]
        if (state, rule["policy"]) in times:
            found.append(f"two rules {rule['policy']} on {state}")
        times[state, rule["policy"]] = rule["condition"].get("ttlSeconds", 0)
        if rule["policy"] == "DeleteWorkers" and item["spec"]["rayClusterSpec"].get("enableInTreeAutoscaling"):
            found.append("DeleteWorkers does not go with autoscaling")
    for state in {state for state, _ in times}:
        stages = [times[state, policy] for policy in ORDER if (state, policy) in times]
        if stages != sorted(stages):
            found.append(f"deletion on {state} is out of order: {stages}")
    return found


def _cluster(item: Manifest) -> list[str]:
    cluster = item["spec"]["rayClusterSpec"]
    head, groups = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    elastic = cluster.get("enableInTreeAutoscaling", False)
    conditions = {
        "token authentication with a named Secret": cluster.get("authOptions", {}).get("mode") == "token"
        and cluster["authOptions"].get("secretName"),
        "a Ray version that has it": tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0),
        "a head without work": head["rayStartParams"].get("num-cpus") == "0",
        "start parameters that are text": all(
            isinstance(value, str) for group in (head, *groups) for value in group["rayStartParams"].values()
        ),
        "no labels in start parameters": all("labels" not in group["rayStartParams"] for group in (head, *groups)),
        "autoscaler options with autoscaling only": elastic or "autoscalerOptions" not in cluster,
        "pods that are not restarted, for autoscaler v2": not elastic
        or all(g["template"]["spec"].get("restartPolicy", "Never") == "Never" for g in (head, *groups)),
    }
    for group in groups:
        low, now, high = group["minReplicas"], group["replicas"], group["maxReplicas"]
        conditions[f"{group['groupName']}: 1 <= minReplicas <= replicas <= maxReplicas"] = 1 <= low <= now <= high
        conditions[f"{group['groupName']}: other bounds only with autoscaling"] = elastic or low == high
    for name, group in (("head", head), *((g["groupName"], g) for g in groups)):
        spec = group["template"]["spec"]
        memory = quantity(spec["containers"][0]["resources"]["limits"]["memory"])
        shm = [v["emptyDir"] for v in spec["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
        room = quantity(shm[0]["sizeLimit"]) if len(shm) == 1 else 0
        store = int(group["rayStartParams"]["object-store-memory"])
        conditions[f"{name}: object store < /dev/shm < memory"] = store < room < memory
    return expected(conditions)


def _kueue(item: Manifest) -> list[str]:
    if QUEUE not in item["metadata"].get("labels", {}):
        return []
    spec = item["spec"]
    groups = spec["rayClusterSpec"]["workerGroupSpecs"]
    conditions = {
        "shutdown": spec.get("shutdownAfterJobFinishes"),
        "a suspended job, which Kueue starts": spec.get("suspend"),
        "no autoscaling": not spec["rayClusterSpec"].get("enableInTreeAutoscaling"),
        "at most 7 worker groups, none called head": len(groups) <= 7
        and "head" not in {g["groupName"] for g in groups},
    }
    return [f"Kueue: {text}" for text in expected(conditions)]


def _actors(item: Manifest, job: Manifest) -> list[str]:
    """The job has as many actors as the workers have room for."""
    (group,) = item["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    per_worker = int(limits[GPU]) // int(job.get("num_gpus", 1)) if GPU in limits else 1
    low, high = (per_worker * group[bound] for bound in ("minReplicas", "maxReplicas"))
    wanted = str(high) if low == high else f"{low}:{high}"
    device = "cuda" if GPU in limits else "cpu"
    found = [f"actors: the workers have room for {wanted}, the job says {job['actors']}"] * (job["actors"] != wanted)
    return found + [f"device: the workers have {device}, the job says {job['device']}"] * (job["device"] != device)


def _nightly(objects: list[Manifest]) -> list[str]:
    found = []
    for item in of_kind(objects, "CronJob"):
        given = values(containers(item["spec"]["jobTemplate"]["spec"]["template"])[0])
        templates = [j for j in of_kind(objects, "RayJob") if j["metadata"]["name"] == given["TEMPLATE"]]
        if not templates:
            found.append(f"CronJob: no RayJob {given['TEMPLATE']}")
        for template in templates:
            if not template["spec"].get("suspend"):
                found.append("CronJob: the template would run")
            if QUEUE in template["metadata"].get("labels", {}):
                found.append("CronJob: Kueue would start the template")
        if len(f"{given['PREFIX']}-20260101") > RAYJOB_NAME:
            found.append("CronJob: the prefix is too long")
    return found


def _references(objects: list[Manifest]) -> list[str]:
    """ConfigMaps, ServiceAccounts, priority classes and volumes that a pod names but that do not exist."""
    existing = {(item["kind"], item["metadata"]["name"]) for item in objects}
    found = []
    for place, template in pod_templates(objects):
        spec = template["spec"]
        needed = [("ServiceAccount", spec["serviceAccountName"]), ("PriorityClass", spec["priorityClassName"])]
        needed += [("ConfigMap", v["configMap"]["name"]) for v in spec["volumes"] if "configMap" in v]
        for container in containers(template):
            sources = [s["configMapRef"]["name"] for s in container.get("envFrom", []) if "configMapRef" in s]
            needed += [("ConfigMap", name) for name in sources]
            unknown = {m["name"] for m in container["volumeMounts"]} - {v["name"] for v in spec["volumes"]}
            found += [f"{place}: no volume {name}" for name in unknown]
        found += [f"{place}: no {kind} {name}" for kind, name in needed if (kind, name) not in existing]
    return found
