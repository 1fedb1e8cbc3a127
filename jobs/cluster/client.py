"""A client of a Ray cluster's Jobs API, for `exspec submit`, `status`, `logs` and `cancel`.

It names jobs by id and does not know what they compute.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from exspec.pipeline.cluster.connect import find_token
from exspec.pipeline.errors import JobError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS", "RAY_ADDRESS")
FAILED, STOPPED, DETACHED = 3, 4, 130  # exit codes; the commands themselves use 0, 1 and 2
MARK = "exspec"  # key in the metadata of a job that exspec submitted; the value is the version of exspec
NOISY_LOGGERS = (
    "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging",
)  # fmt: skip
AGENT_HINT = (
    "a node's agent takes up to a minute to start, and does not start if another Ray on its machine uses its port: "
    "start the node with `ray start --dashboard-agent-listen-port PORT` and a free port"
)
PATIENCE = 120  # seconds to wait for a lost connection, or for a job to stop


class Cluster:
    """The jobs of one cluster. Every method raises JobError if the cluster does not answer or refuses.

    address: URL of the dashboard. Default, as for Ray's own commands: RAY_API_SERVER_ADDRESS, RAY_DASHBOARD_ADDRESS or
    RAY_ADDRESS. The token is Ray's: RAY_AUTH_TOKEN, or the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token.
    """

    def __init__(self, address: str | None = None) -> None:
        from ray.job_submission import JobSubmissionClient

        for name in NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        self.address = address or find_address()
        if not self.address.startswith(("http://", "https://")):
            raise JobError(
                f"address {self.address}: expected the URL of the cluster's dashboard, such as http://HOST:8265"
            )
        os.environ["RAY_API_SERVER_ADDRESS"] = self.address  # Ray's client prefers its variables to its arguments
        token = find_token()
        headers = {"Authorization": f"Bearer {token}"} if token else None
        with self._errors():
            self.client = JobSubmissionClient(self.address, headers=headers)

    @contextmanager
    def _errors(self, job: str | None = None) -> Iterator[None]:
        """Turn errors of Ray's client into JobErrors. job: id of the job that the request is about."""
        from ray.exceptions import AuthenticationError

        try:
            yield
        except JobError:
            raise
        except AuthenticationError as error:
            wrong = "rejected the token" if find_token() else "requires a token"
            raise JobError(f"{self.address}: the cluster {wrong}; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH") from error
        except RuntimeError as error:
            if job is not None and "status code 404" in str(error):
                raise JobError(f"{job}: no such job at {self.address}") from error
            hint = f"; {AGENT_HINT}" if "agent" in str(error) else ""
            raise JobError(f"{self.address}: {_last_line(error).rstrip('.')}{hint}") from error
        except (OSError, ValueError, KeyError) as error:
            raise JobError(f"{self.address}: no Ray dashboard answers at this address ({_last_line(error)})") from error

    def submit(self, **request: Any) -> str:
        """Send a job and return its id. request: the arguments of `JobSubmissionClient.submit_job`."""
        with self._errors():
            try:
                return str(self.client.submit_job(**request))
            except RuntimeError as error:
                if "already exists" in str(error):
                    raise JobError(
                        f"{request['submission_id']}: the cluster already has a job with this id; choose another"
                    ) from error
                raise

    def details(self, job: str) -> Any:
        """Ray's `JobDetails` of a job."""
        with self._errors(job):
            return self.client.get_job_info(job)

    def jobs(self) -> list[Any]:
        """The jobs that exspec submitted, oldest first."""
        with self._errors():
            ours = [job for job in self.client.list_jobs() if MARK in (job.metadata or {})]
        return sorted(ours, key=lambda job: job.start_time or 0)

    def logs(self, job: str) -> str:
        with self._errors(job):
            return str(self.client.get_job_logs(job))

    def follow(self, job: str) -> int:
        """Print a job's log from the start until the job ends, and return the exit code for how it ended. Ctrl-C leaves
        the job running."""
        details = self.details(job)  # raises now if there is no such job
        printed, answered = 0, time.monotonic()  # printed: characters
        try:
            while True:
                try:
                    details = self.details(job)
                    if not details.status.is_terminal():
                        answered = time.monotonic()  # it need not have a log yet
                    log = self.logs(job)  # after the details: if these say that the job has ended, the log is whole
                    print(log[printed:], end="", flush=True)
                    printed = max(printed, len(log))
                    if details.status.is_terminal():
                        break
                except JobError as error:
                    if time.monotonic() - answered > PATIENCE:
                        if not details.status.is_terminal():
                            raise JobError(
                                f"{error}; {job} may still be running: exspec logs {job} --follow"
                            ) from error
                        print(f"the end of the log cannot be read ({error}); exspec logs {job}", file=sys.stderr)
                        break
                time.sleep(min(1 + printed / 2**20, 30))  # the whole log is fetched every time
        except KeyboardInterrupt:
            print(
                f"\n{job} is still running. To follow it: exspec logs {job} --follow. To stop it: exspec cancel {job}",
                file=sys.stderr,
            )
            return DETACHED
        print(outcome(details), file=sys.stderr)
        return exit_code(details)

    def cancel(self, job: str) -> str:
        """Stop a job, wait until it has ended, and return a sentence on how it ended."""
        until = time.monotonic() + PATIENCE
        while not (details := self.details(job)).status.is_terminal():
            if time.monotonic() > until:
                raise JobError(f"{job}: still {details.status.value} after {PATIENCE} seconds")
            with self._errors(job):
                self.client.stop_job(job)  # repeated, because a job whose process has not started ignores it
            time.sleep(1)
        return outcome(details)


def find_address() -> str:
    """The address of the dashboard from the environment. Raises JobError if there is none."""
    for name in ADDRESSES:
        if os.environ.get(name, "").startswith(("http://", "https://")):
            return os.environ[name]
    raise JobError(
        "no Ray cluster: pass --address http://HOST:8265, the address of the dashboard, or set RAY_API_SERVER_ADDRESS"
    )


def exit_code(details: Any) -> int:
    """The exit code for a job that has ended: 0, 1 or 2 as its command exited, else FAILED or STOPPED."""
    status = details.status.value
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        return STOPPED
    return details.driver_exit_code if details.driver_exit_code in (1, 2) else FAILED


def outcome(details: Any) -> str:
    """A sentence on how a job ended, or on its state."""
    job, status, code = details.submission_id, details.status.value, details.driver_exit_code
    if status == "SUCCEEDED":
        return f"{job} succeeded"
    if status == "STOPPED":
        return f"{job} was stopped. Finished rows are kept; run the same command again to resume"
    if status == "FAILED" and code in (1, 2):
        return f"{job} ended with exit code {code}; the end of its log has the reason: exspec logs {job}"
    if status == "FAILED" and code is not None:
        return f"{job}: the process crashed with exit code {code}; see exspec logs {job}"
    if status == "FAILED":
        return f"{job} failed outside its own process: {_last_line(details.message)}"
    return f"{job} is {status.lower()}"


def show_status(cluster: Cluster, job: str | None) -> None:
    """Print a table of all jobs that exspec submitted, or of one job and its outcome."""
    console = Console()
    jobs = cluster.jobs() if job is None else [cluster.details(job)]
    table = Table(title=f"jobs at {cluster.address}", box=None, padding=(0, 1, 0, 0), title_justify="left")
    for heading in ("id", "status", "command", "started", "time", "code"):
        table.add_column(heading, no_wrap=True)  # so that an id can be copied
    for details in jobs:
        table.add_row(*_cells(details))
    console.print(table if jobs else f"no jobs of exspec at {cluster.address}")
    if job is not None:
        for name in ("input", "output"):
            if path := (jobs[0].metadata or {}).get(name):
                print(f"{name}: {path}")
        print(outcome(jobs[0]))


def _cells(details: Any) -> list[str]:
    end = (details.end_time or time.time() * 1000) if details.start_time else None
    seconds = (end - details.start_time) / 1000 if end else 0.0
    return [
        details.submission_id,
        details.status.value,
        (details.metadata or {}).get("command", "-"),
        f"{datetime.fromtimestamp(details.start_time / 1000):%m-%d %H:%M}" if end else "-",
        f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f}:{int(seconds % 60):02d}",
        str(exit_code(details)) if details.status.is_terminal() else "-",
    ]


def _last_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if any(c.isalnum() for c in line)]
    return lines[-1] if lines else type(error).__name__
