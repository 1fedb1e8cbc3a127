"""For all tests: offline, one thread, several tests at a time, the transformers' talk turned down."""

import os
import socket
from collections import defaultdict
from itertools import combinations
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin as they wait would take the core of another test

# What is compiled outlives a session of tests, and does not lie among what the user's own jobs compile.
os.environ["EXSPEC_CACHE"] = os.environ.get("EXSPEC_TEST_CACHE") or str(Path(__file__).parents[1] / ".test_cache")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
# Ray gives its workers little of a CPU that other tests use too.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
# What workers import must be what the tests import.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

from collections.abc import Iterable, Iterator

import pytest
import torch
from transformers.utils import logging

logging.disable_progress_bar()


@pytest.hookimpl(wrapper=True)  # before all that goes by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Tests that share the one Ray run in one process.

    Of a test with many cases some are fast, some slow, and the rest is rare: see the marks `fast` and `cover`.
    """
    grids: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if "ray_session" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("ray"))
        if item.get_closest_marker("fast") or item.get_closest_marker("cover"):
            grids[item.nodeid.partition("[")[0]].append(item)
    for grid in grids.values():
        rows = [{name: repr(value) for name, value in item.callspec.params.items()} for item in grid]
        if mark := grid[0].get_closest_marker("fast"):
            fast = {i for i, item in enumerate(grid) if item.callspec.id in mark.args}
            slow = cover(rows, mark.kwargs.get("slow", 1), fast)
        else:
            fast = cover(rows, grid[0].get_closest_marker("cover").args[0])
            slow = cover(rows, 2, fast)
        for i in set(range(len(grid))) - fast:
            grid[i].add_marker(pytest.mark.slow if i in slow else pytest.mark.rare)
    yield


def cover(rows: list[dict[str, str]], size: int, given: Iterable[int] = ()) -> set[int]:
    """Numbers of a few rows that together, and with the given ones, hold every value (size 1), or every pair of values
    (size 2), of all rows.

    Greedy: the row with the most that is still missing comes next.
    """
    parts = [set(combinations(sorted(row.items()), size)) for row in rows]
    left = set().union(*parts).difference(*(parts[i] for i in given))
    kept = set[int]()
    while left:
        best = max(range(len(rows)), key=lambda i: len(parts[i] & left))
        left -= parts[best]
        kept.add(best)
    return kept


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The models are so small that a second thread costs more than it saves. A job or a benchmark that ran in this
    process may have set another number."""
    torch.set_num_threads(1)


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
