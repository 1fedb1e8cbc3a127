"""For all tests: offline, two threads at most, the transformers' talk turned down."""

import os
import shutil
import socket
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

os.environ["EXSPEC_CACHE"] = tempfile.mkdtemp(prefix="exspec-cache-")  # no test fills the cache of who runs it
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
# What workers import must be what the tests import.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

from collections.abc import Iterator

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    logging.disable_progress_bar()
    # The models here are so small that a second thread costs more than it does.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _cache() -> Iterator[None]:
    folder = os.environ["EXSPEC_CACHE"]
    yield
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[str]:
    """One Ray for all tests, on loopback, with more logical CPUs than the machine may have; the URL of its metrics."""
    import ray

    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    ray.init(
        address="local",  # whatever else runs on this machine
        num_cpus=6,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.2",
        _metrics_export_port=port,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    yield f"http://127.0.0.2:{port}/metrics"
    ray.shutdown()
