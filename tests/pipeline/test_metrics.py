"""What Prometheus reads from Ray's exporter."""

import os
import re
import time
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq

from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.pipeline import jobs

SAMPLE = re.compile(r"^ray_exspec_(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
PATIENCE = 120  # seconds until the exporter has all values


def scrape(url: str, actors: set[str], host: str) -> dict[str, float]:
    """The metrics of these actors on this host, summed."""
    with urllib.request.urlopen(url) as answer:
        samples = SAMPLE.findall(answer.read().decode())
    sums: dict[str, float] = {}
    for name, labels, value in samples:
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if tags["actor"] in actors and tags["host"] == host:
            sums[name] = sums.get(name, 0) + float(value)
    return sums


def test_counters_and_gauges_reach_the_exporter(
    ray_session: str, pair: jobs.Pair, source: Path, tmp_path: Path
) -> None:
    job = jobs.job(pair, source, tmp_path / "out", id_column=None, max_new_tokens_column=None, max_new_tokens=9)
    assert execute(prepare(job)) == 0
    rows = [row for path in (tmp_path / "out").glob("part-*") for row in pq.read_table(path).to_pylist()]
    report = jobs.report(tmp_path / "out")
    actors, (host,) = set(report["rows_by_actor"]), report["hosts"]
    assert host == os.uname().nodename
    expected = {
        f"{name}_total": sum(row[name] for row in rows) for name in ("completion_tokens", "drafted", "accepted")
    }
    expected["rows_total"] = 60
    until = time.monotonic() + PATIENCE
    while (found := scrape(ray_session, actors, host)).get("rows_total") != 60 and time.monotonic() < until:
        time.sleep(0.5)
    assert {name: found.get(name) for name in expected} == expected
    assert 0 < found["occupancy"] <= len(actors)
