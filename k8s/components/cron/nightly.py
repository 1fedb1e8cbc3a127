"""Creates today's RayJob from the suspended template and waits until it ends. Uses only the standard library.

Exit codes: 0 the RayJob completed, 1 it failed, 2 it could not be created or watched (another pod may try again).
"""

import json
import os
import ssl
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

ACCOUNT = Path(os.environ.get("ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
API = os.environ.get("API") or "https://{KUBERNETES_SERVICE_HOST}:{KUBERNETES_SERVICE_PORT}".format(**os.environ)
EVERY = float(os.environ.get("EVERY", "15"))  # seconds between requests
PATIENCE = 20  # failed requests in a row


def call(method: str, name: str = "", body: Any = None) -> Any:
    """Send a request about RayJobs to the Kubernetes API."""
    url = f"{API}/apis/ray.io/v1/namespaces/{os.environ['NAMESPACE']}/rayjobs{name and '/' + name}"
    token = (ACCOUNT / "token").read_text()  # the kubelet renews it
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = Request(url, None if body is None else json.dumps(body).encode(), headers, method=method)
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")) if url.startswith("https") else None
    with urlopen(request, timeout=30, context=context) as answer:
        return json.load(answer)


def rayjob(template: dict[str, Any], name: str, date: str) -> dict[str, Any]:
    """A RayJob with the template's specification, not suspended unless it is queued, and owned by this pod's Job."""
    more = dict(pair.split("=", 1) for pair in os.environ.get("LABELS", "").split(",") if pair)
    labels = template["metadata"].get("labels", {}) | {"app.kubernetes.io/component": "nightly", "date": date} | more
    queued = "kueue.x-k8s.io/queue-name" in labels
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": os.environ["OWNER_NAME"],
        "uid": os.environ["OWNER_UID"],
    }
    return {
        "apiVersion": template["apiVersion"],
        "kind": template["kind"],
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
        "spec": template["spec"] | {"suspend": queued},
    }


def create(name: str, date: str) -> None:
    """Create the RayJob, unless an earlier pod of this night created it."""
    try:
        call("POST", body=rayjob(call("GET", os.environ["TEMPLATE"]), name, date))
        print(f"created RayJob {name}", flush=True)
    except HTTPError as error:
        if error.code != 409:
            raise
        print(f"RayJob {name} already exists", flush=True)


def wait(name: str) -> int:
    """Wait until the RayJob has ended, and return the exit code."""
    failures, last = 0, ""
    while True:
        try:
            status = call("GET", name).get("status", {})
        except (URLError, TimeoutError) as error:
            failures += 1
            if failures > PATIENCE or getattr(error, "code", None) == 404:
                raise
        else:
            failures, state = 0, status.get("jobDeploymentStatus", "")
            if state != last:
                print(f"RayJob {name}: {state} {status.get('message', '')}".rstrip(), flush=True)
                last = state
            if state in ("Complete", "Failed", "ValidationFailed"):
                return 0 if state == "Complete" and status.get("jobStatus") == "SUCCEEDED" else 1
        time.sleep(EVERY)


def main() -> int:
    date = datetime.now(UTC).strftime("%Y%m%d")
    name = f"{os.environ['PREFIX']}-{date}"
    try:
        create(name, date)
        return wait(name)
    except (OSError, ValueError) as error:
        print(f"RayJob {name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
