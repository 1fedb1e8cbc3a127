"""A job on several hosts gives the rows of an undisturbed one, whatever fails. The faults are in `faults.py`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.cluster import Cluster, cluster
from tests.hosts.faults import FAULTS, play, undisturbed
from tests.hosts.network import Network, unavailable, until
from tests.pipeline.s3 import VARIABLE, external

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if reason := unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster and an undisturbed job, on the S3 server in EXSPEC_TEST_S3 or on moto's."""
    options: dict[str, Any] | None = external() if VARIABLE in os.environ else None
    with cluster(tmp_path_factory.mktemp("hosts"), options) as made:
        undisturbed(made)
        yield made


# The others take an hour: `python -m tests.hosts.faults`.
PLAYED = "worker cut off for 90 s, staging", "driver cut off from the store, and another run takes over"


@pytest.mark.parametrize("name", PLAYED)
def test_rows_are_those_of_an_undisturbed_job(hosts: Cluster, name: str) -> None:
    play(hosts, name, f"out-{list(FAULTS).index(name)}")


def test_links_of_the_network_fail_and_heal(tmp_path: Path) -> None:
    """The faults do what they say: else the test above would prove nothing."""
    network = Network(tmp_path / "hosts", ["a", "b", "c"])
    a, b, c = network.hosts.values()

    def reached(one: Any, other: Any) -> bool:
        program = f"import socket; socket.create_connection(({other.address!r}, 7000), 1)"
        try:
            one.run("python3", "-c", program)
        except OSError:
            return False
        return True

    serve = "import socket, time; s = socket.create_server(('', 7000)); time.sleep(99)"
    try:
        for host in (a, b, c):
            with (tmp_path / "log").open("wb") as log:
                host.start(log, "python3", "-c", serve)
        until(lambda: all(reached(one, other) for one in (a, b, c) for other in (a, b, c)), 30, "servers")
        with network.parted(a, [b]):
            assert (reached(a, b), reached(b, a), reached(a, c), reached(c, b)) == (False, False, True, True)
        with network.pulled(c):
            assert (reached(a, b), reached(b, c), reached(c, a)) == (True, False, False)
        assert (reached(a, b), reached(b, a), reached(c, a)) == (True, True, True)
        a.end()
        assert not reached(b, a)
    finally:
        network.close()
