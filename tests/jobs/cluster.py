"""Starts a real Ray head for the tests, on loopback, with a dashboard and a token."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil

PATIENCE = 180  # seconds until the dashboard answers
SETTINGS = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True)
class Head:
    """address: of the dashboard. token: the file with the token. process: the parent of all processes of the head."""

    address: str
    token: Path
    process: psutil.Process

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a user of the cluster."""
        return _bare() | {"RAY_API_SERVER_ADDRESS": self.address, "RAY_AUTH_TOKEN_PATH": str(self.token)} | more


def _bare() -> dict[str, str]:
    """This process's environment without variables about a cluster."""
    return {name: value for name, value in os.environ.items() if name not in SETTINGS}


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:  # all open at once, so that no port comes twice
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


@contextmanager
def ray_head(folder: Path) -> Iterator[Head]:
    """Start a head, and kill all its processes at the end. folder: a short path, because sockets are in it."""
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    dashboard, gcs, agent, client = free_ports(4)
    programs = Path(sys.executable).parent
    path = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
    command = [
        programs / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.2", f"--port={gcs}",
        "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}", "--num-cpus=6",
        "--min-worker-port=0", "--max-worker-port=0", f"--object-store-memory={100 * 2**20}",
        f"--temp-dir={folder / 'r'}", "--disable-usage-stats",
    ]  # fmt: skip
    environment = _bare() | {
        "RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_MODE": "token", "PATH": path, "EXSPEC_CACHE": str(folder / "cache")
    }  # fmt: skip
    with (folder / "head.log").open("wb") as log:
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    head = Head(f"http://127.0.0.1:{dashboard}", token, psutil.Process(started.pid))
    try:
        until = time.monotonic() + PATIENCE
        while not _answers(head.address):
            assert started.poll() is None, (folder / "head.log").read_text()
            assert time.monotonic() < until, (folder / "head.log").read_text()
            time.sleep(0.2)
        yield head
    finally:
        _end(started)


def _answers(address: str) -> bool:
    try:
        with urlopen(f"{address}/api/gcs_healthz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _end(started: subprocess.Popen[bytes]) -> None:
    """Kill the head's processes by id, because `ray stop` would stop every Ray on the machine."""
    processes = [psutil.Process(started.pid)]
    processes += processes[0].children(recursive=True)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
