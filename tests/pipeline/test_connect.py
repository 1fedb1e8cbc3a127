"""A local Ray serves only the process that started it, and connections of a job outlast cuts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

STARTED = """
import ipaddress, json, os, subprocess, sys
import psutil, ray
from exspec.pipeline.cluster.connect import connect
from exspec.pipeline.job.settings import Job

def joined(address):
    # A client first asks for the version of the cluster; joining itself would retry for long.
    code = '''import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_get(b"x", b"n", 5)
    print("answered")
except Exception as error:
    print(type(error).__name__, error)'''
    own = [sys.executable, "-c", code, address]
    return subprocess.run(own, capture_output=True, text=True, timeout=100).stdout

def in_a_worker():
    return os.getpid()

job, before, found = Job(target="t", input="in", output="out"), dict(os.environ), []
for turn in range(2):  # as in a notebook
    connect(job)
    assert ray.get(ray.remote(in_a_worker).remote()) != os.getpid()
    me = psutil.Process()
    sockets = [c for p in [me, *me.children(recursive=True)] for c in p.net_connections("inet")]
    listening = {c.laddr.ip for c in sockets if c.status == "LISTEN"}
    stranger = joined(ray.get_runtime_context().gcs_address) if turn == 0 else ""
    found.append({"listening": sorted(listening), "joined": stranger})
    ray.shutdown()
same = {k: v for k, v in os.environ.items() if "AUTH" in k} == {k: v for k, v in before.items() if "AUTH" in k}
written = os.path.exists(os.path.expanduser("~/.ray"))
# Another Ray of this process, with its own token or none.
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.2")
another = ray.get(ray.remote(in_a_worker).remote()) != os.getpid()
ray.shutdown()
print(json.dumps({"found": found, "same": same, "written": written, "another": another}))
"""


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, marks=pytest.mark.rare),
        {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "another cluster's"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another cluster's"},
    ],
)
def test_a_local_ray_listens_on_loopback_and_asks_for_a_token(given: dict[str, str], tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_A")} | {"HOME": str(tmp_path), **given}
    started = subprocess.run(
        [sys.executable, "-c", STARTED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert started.returncode == 0, started.stderr[-3000:]
    result: dict[str, Any] = json.loads(started.stdout.splitlines()[-1])
    for found in result["found"]:
        assert found["listening"]
        assert [ip for ip in found["listening"] if not ip.removeprefix("::ffff:").startswith("127.")] == []
    assert result["found"][0]["joined"].startswith("AuthenticationError"), result["found"][0]["joined"]
    assert result["same"], "the environment is as it was"
    assert result["another"], "another Ray can be started afterwards"
    assert not result["written"], "no token file was written"


PATIENCE = """
import os, socket, subprocess, sys

def patience():
    # Milliseconds after which this process's server gives up a silent connection. Ray sets them on its sockets.
    found = set()
    for file in os.listdir("/proc/self/fd"):
        try:
            own = socket.socket(fileno=os.dup(int(file)))
        except OSError:  # not a socket
            continue
        with own:
            if own.family == socket.AF_INET6 and own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return sorted(found)

if address := "".join(sys.argv[1:]):
    from exspec.pipeline.cluster.connect import connect
    from exspec.pipeline.job.settings import Job
    connect(Job(target="t", input="in", output="out", ray_address=address))
import ray
if not address:  # a node without the setting
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    command = [sys.executable, __file__, ray.get_runtime_context().gcs_address]
    subprocess.run(command, check=True)
    subprocess.run(command, check=True, env=os.environ | {"RAY_grpc_keepalive_timeout_ms": "500000"})
print(patience(), ray.get(ray.remote(patience).remote()))
"""


def test_connections_of_a_job_outlast_cuts_on_any_cluster(tmp_path: Path) -> None:
    """The servers of driver and workers give up a silent connection after 10 minutes, or as the driver's environment
    says, not after Ray's 20 seconds."""
    forgotten = ("RAY_A", "RAY_grpc")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(forgotten)} | {"HOME": str(tmp_path)}
    program = tmp_path / "program.py"
    program.write_text(PATIENCE)
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["[600000] [600000]", "[500000] [500000]", "[20000] [20000]"]
