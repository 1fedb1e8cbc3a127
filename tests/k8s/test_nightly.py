"""The CronJob's program with an imitated Kubernetes API, and with the variables of the manifest."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.k8s import rules, schemas
from tests.k8s.manifests import Manifest, containers, needs_renderer, one, overlay, values

PATH = "/apis/ray.io/v1/namespaces/exspec/rayjobs"

pytestmark = needs_renderer


class Api(BaseHTTPRequestHandler):
    """RayJobs by name. Each GET of a created RayJob takes the next of `states`; 0 is a failed request."""

    rayjobs: dict[str, Any]
    states: list[Any]
    tokens: set[str | None]

    def do_GET(self) -> None:
        self.tokens.add(self.headers["Authorization"])
        found = self.rayjobs.get(self.path.removeprefix(f"{PATH}/"))
        if found is None:
            return self._answer(404, {"message": "not found"})
        if found["metadata"]["name"] != "exspec" and self.states:
            state = self.states.pop(0)
            if state == 0:
                return self._answer(500, {"message": "try again"})
            ended = "SUCCEEDED" if state == "Complete" else "FAILED"
            found["status"] = {"jobDeploymentStatus": state, "jobStatus": ended}
        return self._answer(200, found)

    def do_POST(self) -> None:
        assert self.path == PATH
        made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if made["metadata"]["name"] in self.rayjobs:
            return self._answer(409, {"message": "exists"})
        self.rayjobs[made["metadata"]["name"]] = made
        return self._answer(201, made)

    def _answer(self, code: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def objects() -> list[Manifest]:
    return overlay("cron")


@pytest.fixture
def api(objects: list[Manifest]) -> Iterator[str]:
    Api.rayjobs, Api.states, Api.tokens = {"exspec": one(objects, "RayJob")}, [], set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def days() -> set[str]:
    """Today, and yesterday if the day has just ended."""
    now = datetime.now(UTC)
    return {(now - timedelta(minutes=minutes)).strftime("%Y%m%d") for minutes in (0, 5)}


def made_tonight() -> Manifest:
    (made,) = (rayjob for name, rayjob in Api.rayjobs.items() if name.removeprefix("exspec-label-") in days())
    return made


def night(objects: list[Manifest], api: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the program of the ConfigMap like the CronJob's container."""
    (container,) = containers(one(objects, "CronJob")["spec"]["jobTemplate"]["spec"]["template"])
    assert container["command"] == ["python", "/etc/exspec/nightly.py"]
    (folder / "token").write_text("night")
    program = folder / "nightly.py"
    program.write_text(one(objects, "ConfigMap", "exspec-nightly")["data"]["nightly.py"])
    env = {"PATH": os.environ["PATH"], "ACCOUNT": str(folder), "API": api, "EVERY": "0.01", **values(container)}
    env |= {"NAMESPACE": "exspec", "OWNER_NAME": "exspec-nightly-1", "OWNER_UID": "1-2-3", **more}
    return subprocess.run([sys.executable, "-I", program], env=env, capture_output=True, text=True, timeout=60)


def test_a_night_creates_a_rayjob(objects: list[Manifest], api: str, tmp_path: Path) -> None:
    Api.states = ["Initializing", "Running", 0, 0, "Running", "Complete"]
    done = night(objects, api, tmp_path)
    assert done.returncode == 0, done.stderr
    made = made_tonight()
    made.pop("status")
    assert made["spec"] == one(objects, "RayJob")["spec"] | {"suspend": False}
    assert made["metadata"]["labels"]["app.kubernetes.io/component"] == "nightly"
    assert made["metadata"]["name"] == f"exspec-label-{made['metadata']['labels']['date']}"
    (owner,) = made["metadata"].pop("ownerReferences")
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "exspec-nightly-1", "uid": "1-2-3"}
    assert schemas.problems(made) == []
    assert Api.tokens == {"Bearer night"}
    made["metadata"]["namespace"] = "exspec"
    assert rules.problems([*objects, made]) == []


def test_a_second_pod_waits_for_the_same_rayjob(objects: list[Manifest], api: str, tmp_path: Path) -> None:
    Api.states = ["Running", "Complete", "Complete"]
    assert night(objects, api, tmp_path).returncode == 0
    done = night(objects, api, tmp_path)
    assert (done.returncode, len(Api.rayjobs)) == (0, 2)
    assert "already exists" in done.stdout


@pytest.mark.parametrize("state", ["Failed", "ValidationFailed"])
def test_a_failed_rayjob_fails_the_job(objects: list[Manifest], api: str, tmp_path: Path, state: str) -> None:
    Api.states = ["Running", state]
    assert night(objects, api, tmp_path).returncode == 1
    policy = one(objects, "CronJob")["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["onExitCodes"]["values"] for rule in policy if rule["action"] == "FailJob"] == [[1]]


def test_a_rayjob_in_a_queue_waits_for_kueue(objects: list[Manifest], api: str, tmp_path: Path) -> None:
    Api.states = ["Suspended", "Running", "Complete"]
    labels = "kueue.x-k8s.io/queue-name=exspec,kueue.x-k8s.io/priority-class=exspec-batch"
    assert night(objects, api, tmp_path, LABELS=labels).returncode == 0
    made = made_tonight()
    assert made["spec"]["suspend"] is True
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "exspec"


@pytest.mark.parametrize("broken", ["no template", "no server"])
def test_a_failed_creation_is_reported_and_can_be_retried(
    objects: list[Manifest], api: str, tmp_path: Path, broken: str
) -> None:
    if broken == "no template":
        Api.rayjobs.clear()
    done = night(objects, "http://127.0.0.1:9" if broken == "no server" else api, tmp_path)
    assert done.returncode == 2
    assert any(f"RayJob exspec-label-{day}: " in done.stderr for day in days())
    assert "Traceback" not in done.stderr


def test_the_role_has_only_the_rights_it_needs(objects: list[Manifest]) -> None:
    assert one(objects, "Role")["rules"] == [
        {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["get", "create"]}
    ]
    spec = one(objects, "CronJob")["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    rayjob, job = one(objects, "RayJob")["spec"], spec["jobTemplate"]["spec"]
    assert rayjob["activeDeadlineSeconds"] < job["activeDeadlineSeconds"] < 24 * 3600
