"""Two jobs in one namespace that differ only in their `nameSuffix`: neither touches the other."""

from typing import Any

import pytest

from tests.k8s import checks
from tests.k8s.manifests import OVERLAYS, Manifest, containers, needs_renderer, of_kind, pod_templates, suffixed, values

pytestmark = needs_renderer

SHARED = {("Namespace", "exspec")}
FOLLOWED = {"ConfigMap", "ServiceAccount", "Role", "CronJob"}  # other objects refer to them by name
SECRETS = {"exspec-ray-token", "exspec-hub", "exspec-s3"}
RAY = {  # labels that the operator gives a pod
    "head": {"ray.io/is-ray-node": "yes", "ray.io/node-type": "head"},
    "worker": {"ray.io/is-ray-node": "yes", "ray.io/node-type": "worker"},
    "submitter": {},
}


def named(objects: list[Manifest]) -> set[tuple[str, str]]:
    return {(item["kind"], item["metadata"]["name"]) for item in objects}


def texts(item: Any) -> list[str]:
    """Every string in an object."""
    if isinstance(item, dict):
        return [text for value in item.values() for text in texts(value)]
    if isinstance(item, list):
        return [text for value in item for text in texts(value)]
    return [item] if isinstance(item, str) else []


def pods(objects: list[Manifest]) -> dict[str, dict[str, str]]:
    """Labels of the RayJob's pods."""
    found = {}
    for place, template in pod_templates(of_kind(objects, "RayJob")):
        role = place.rsplit(" ", 1)[-1]
        found[role] = template["metadata"]["labels"] | RAY.get(role, RAY["worker"])
    return found


def selectors(item: Any) -> list[dict[str, str]]:
    """Selectors of exspec's pods. `{}` selects every pod, and other labels are those of other pods."""
    if isinstance(item, list):
        return [found for value in item for found in selectors(value)]
    if not isinstance(item, dict):
        return []
    own = [item["matchLabels"]] if "app.kubernetes.io/part-of" in item.get("matchLabels", {}) else []
    return own + [found for value in item.values() for found in selectors(value)]


@pytest.fixture(params=["base", *OVERLAYS])
def jobs(request: pytest.FixtureRequest) -> dict[str, list[Manifest]]:
    return {suffix: suffixed(request.param, suffix) for suffix in ("-a", "-b")}


def test_both_are_valid(jobs: dict[str, list[Manifest]]) -> None:
    for objects in jobs.values():
        assert checks.problems(objects) == []


def test_they_share_only_the_namespace_and_the_secrets(jobs: dict[str, list[Manifest]]) -> None:
    assert named(jobs["-a"]) & named(jobs["-b"]) == SHARED
    for suffix, objects in jobs.items():
        original = {name.removesuffix(suffix) for kind, name in named(objects) if kind in FOLLOWED} - {"exspec"}
        used = {text for item in objects for text in texts(item)}
        assert not original & used, "a reference without the suffix"
        assert {text for text in used if text.removesuffix(suffix) in SECRETS} <= SECRETS
        assert "exspec-ray-token" in used


def test_every_selector_selects_only_pods_of_its_job(jobs: dict[str, list[Manifest]]) -> None:
    others = {"-a": "-b", "-b": "-a"}
    for suffix, objects in jobs.items():
        own, foreign = pods(objects), pods(jobs[others[suffix]])
        night = [t["metadata"]["labels"] for _, t in pod_templates(of_kind(objects, "CronJob"))]
        for kind in ("NetworkPolicy", "PodDisruptionBudget", "PodMonitor"):
            for selector in (found for item in of_kind(objects, kind) for found in selectors(item)):
                assert any(selector.items() <= labels.items() for labels in [*own.values(), *night]), selector
                assert not any(selector.items() <= labels.items() for labels in foreign.values()), selector
        for item in of_kind(objects, "PodMonitor"):
            (selector,) = selectors(item)
            scraped = {role for role, labels in own.items() if selector.items() <= labels.items()}
            assert scraped == {*own} - {"submitter"}


def test_the_objects_of_a_job_have_its_label(jobs: dict[str, list[Manifest]]) -> None:
    for suffix, objects in jobs.items():
        for item in objects:
            if item["kind"] != "Namespace":
                labels = item["metadata"]["labels"]
                assert labels["app.kubernetes.io/instance"] == f"exspec{suffix}", item["metadata"]["name"]


def test_a_nightly_job_has_the_suffix() -> None:
    (cron,) = of_kind(suffixed("cron", "-b"), "CronJob")
    (container,) = containers(cron["spec"]["jobTemplate"]["spec"]["template"])
    assert (values(container)["TEMPLATE"], values(container)["PREFIX"]) == ("exspec-b", "exspec-b-label")
