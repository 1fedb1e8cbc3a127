"""A job on two nodes, one of which is lost: `python -m tests.pipeline.lost_node JOB.json SECONDS`.

A separate process, because a simulated cluster conflicts with the Ray of the other tests.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from exspec.pipeline.job.settings import Job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.pipeline import jobs
from tests.pipeline.generators import generators

# The head has room for both actors and the readers.
NODE = {"num_cpus": 3, "object_store_memory": 100 * 2**20}
IMPATIENT = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_timeout_ms": 2000,
             "health_check_failure_threshold": 3}  # fmt: skip


def lose(cluster: Cluster, node: Any, output: Path) -> None:
    """Kill the node when an actor runs on it and some chunks are done."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    while len(list(output.glob("part-*"))) < 4 or not generators(raylet):
        time.sleep(0.02)
    cluster.remove_node(node, allow_graceful=False)
    print(f"node lost after {len(list(output.glob('part-*')))} chunks", flush=True)


if __name__ == "__main__":
    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": IMPATIENT}
    )
    second = cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    threading.Thread(target=lose, args=(cluster, second, Path(job.output)), daemon=True).start()
    code = execute(prepare(job), load=jobs.ArithmeticLoader(float(sys.argv[2])))
    ray.shutdown()
    cluster.shutdown()
    sys.exit(code)
