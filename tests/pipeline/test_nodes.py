"""A cluster that loses a node during a job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline import jobs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

ROOT = Path(__file__).parents[2]


def test_a_node_lost_with_its_actor_and_its_chunks(pair: jobs.Pair, tmp_path: Path) -> None:
    """Its chunks run again on the other node: every row once, exit code 0."""
    jobs.write_shards(tmp_path / "in", rows=120)
    job = jobs.job(pair, tmp_path / "in", tmp_path / "out", actors="2", attempts=20)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "tests.pipeline.lost_node", str(tmp_path / "job.json"), "0.05"]
    # The cluster of this test must not use a token of the tests' environment.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_A")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "node lost after" in done.stdout
    jobs.assert_complete(tmp_path / "out", 120)
    assert jobs.report(tmp_path / "out")["repeated_chunks"] > 0, "nothing was in flight on the lost node"
