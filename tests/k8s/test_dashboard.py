"""The dashboard's queries use the names and labels that a job exports."""

import json
import re
import time
import urllib.request
from typing import Any

import ray

from exspec.actors.engine import EngineStatistics
from exspec.pipeline.cluster.metrics import COUNTED, RayMeter
from tests.k8s.manifests import K8S, combine, needs_renderer, of_kind, one

DASHBOARD = json.loads((K8S / "components" / "grafana" / "exspec.json").read_text())
NAME = re.compile(r"\bray_exspec_\w+")
SAMPLE = re.compile(r"^(ray_exspec_\w+)\{(.*)\} ", re.MULTILINE)
PATIENCE = 120  # seconds until the exporter has every metric
PODMONITOR = {"ray_io_cluster"}  # labels that the scrape adds


def queries() -> list[str]:
    variables = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    return [*variables, *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])]


def exported(url: str) -> dict[str, set[str]]:
    """The labels of each of the job's metrics."""
    with urllib.request.urlopen(url) as answer:
        samples = SAMPLE.findall(answer.read().decode())
    return {name: {label.partition("=")[0] for label in labels.split(",") if "=" in label} for name, labels in samples}


@ray.remote(num_cpus=0)
class Reporter:
    """Reports a committed chunk and a chunk that was set aside, like a generator."""

    def report(self) -> None:
        meter = RayMeter()
        chunk: dict[str, Any] = dict.fromkeys(COUNTED, 3)
        chunk |= {"drafted_by_position": [3, 2], "accepted_by_position": [2, 1]}
        meter.report("dashboard", "host", {"set_aside": "", "file": {"chunks": [chunk]}}, EngineStatistics())
        meter.report("dashboard", "host", {"set_aside": "why"}, EngineStatistics())


def test_the_dashboard_shows_every_metric(ray_session: str) -> None:
    reporter = Reporter.remote()  # type: ignore[attr-defined]
    ray.get(reporter.report.remote())
    wanted = {name for query in queries() for name in NAME.findall(query)}
    until = time.monotonic() + PATIENCE
    while not wanted <= set(found := exported(ray_session)) and time.monotonic() < until:
        time.sleep(0.5)
    assert wanted == set(found)
    for query in queries():
        labels = {label for group in re.findall(r"\{([^{}]*)\}", query) for label in re.findall(r"(\w+)=~", group)}
        labels |= {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
        for name in NAME.findall(query):
            assert labels <= found[name] | PODMONITOR, query


def test_only_counters_have_a_rate() -> None:
    for query in queries():
        for name in NAME.findall(query):
            if not query.startswith("label_values"):
                rated = re.search(rf"(rate|increase)\({name}\b", query)
                assert bool(rated) == name.endswith("_total"), query


def test_panels_have_titles_and_units_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"]
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        cells = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert x + w <= 24
        assert not cells & taken
        taken |= cells


@needs_renderer
def test_the_scrape_adds_the_label_that_identifies_a_cluster() -> None:
    objects = combine(("grafana",))
    labels = one(objects, "PodMonitor")["spec"]["podTargetLabels"]
    assert {re.sub(r"\W", "_", label) for label in labels} >= PODMONITOR
    (made,) = (item for item in of_kind(objects, "ConfigMap") if item["metadata"]["name"] == "exspec-dashboard")
    assert json.loads(made["data"]["exspec.json"]) == DASHBOARD
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
