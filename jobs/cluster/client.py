"""A Ray cluster behind its Jobs API: where it is, who may use it, and how the jobs there end.

`exspec status`, `exspec logs` and `exspec cancel` are here: they name jobs by id and know nothing of their work.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from exspec.pipeline.cluster.connect import find_token
from exspec.pipeline.errors import JobError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS", "RAY_ADDRESS")
FAILED, STOPPED, DETACHED = 3, 4, 130  # exit codes beside those of the commands themselves: 0, 1 and 2
MARK = "exspec"  # key in the metadata of our jobs: the version that submitted them
TALKATIVE = (
    "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging",
)  # fmt: skip
AGENT = (
    "a node's agent takes up to a minute to start, and cannot where another Ray on its machine has its port: start the "
    "node with `ray start --dashboard-agent-listen-port PORT`, a free one"
)
PATIENCE = 120  # seconds that a lost connection may take to come back, and a job to stop


class Cluster:
    """The jobs of one cluster. Every method raises JobError where the cluster cannot be asked.

    address: URL of the dashboard; default: as Ray's own commands find it, RAY_API_SERVER_ADDRESS, RAY_DASHBOARD_ADDRESS
    or RAY_ADDRESS. token: default: as Ray finds it, RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token.
    """

    def __init__(self, address: str | None = None, token: str | None = None) -> None:
        from ray.job_submission import JobSubmissionClient

        for talkative in TALKATIVE:
            logging.getLogger(talkative).setLevel(logging.WARNING)
        self.address = address or find_address()
        if not self.address.startswith(("http://", "https://")):
            raise JobError(f"address {self.address}: expected the URL of the cluster's dashboard, as http://HOST:8265")
        self.token = token or find_token()
        os.environ["RAY_API_SERVER_ADDRESS"] = self.address  # Ray's client puts its variables above what it is given
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else None
        with self._asking():
            self.client = JobSubmissionClient(self.address, headers=headers)

    @contextmanager
    def _asking(self, job: str | None = None) -> Iterator[None]:
        """Turn what may go wrong into one sentence; `job` is the id that is asked for."""
        from ray.exceptions import AuthenticationError

        try:
            yield
        except JobError:
            raise
        except AuthenticationError as error:
            wrong = "refused the token" if self.token else "asks for a token"
            raise JobError(
                f"{self.address}: the cluster {wrong}; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or give --token"
            ) from error
        except RuntimeError as error:
            if job is not None and "status code 404" in str(error):
                raise JobError(f"{job}: no such job at {self.address}") from error
            hint = f"; {AGENT}" if "agent" in str(error) else ""
            raise JobError(f"{self.address}: {_last_line(error).rstrip('.')}{hint}") from error
        except (OSError, ValueError, KeyError) as error:
            raise JobError(f"{self.address}: no Ray dashboard answers there ({_last_line(error)})") from error

    def submit(self, **request: Any) -> str:
        """Send a job, as `JobSubmissionClient.submit_job` takes it; returns its id."""
        with self._asking():
            try:
                return str(self.client.submit_job(**request))
            except RuntimeError as error:
                if "already exists" in str(error):
                    raise JobError(
                        f"{request['submission_id']}: the cluster has a job of this id; give another"
                    ) from error
                raise

    def details(self, job: str) -> Any:
        """What Ray knows of a job (`JobDetails`)."""
        with self._asking(job):
            return self.client.get_job_info(job)

    def jobs(self) -> list[Any]:
        """The jobs that exspec submitted, oldest first."""
        with self._asking():
            found = [job for job in self.client.list_jobs() if MARK in (job.metadata or {})]
        return sorted(found, key=lambda job: job.start_time or 0)

    def logs(self, job: str) -> str:
        with self._asking(job):
            return str(self.client.get_job_logs(job))

    def follow(self, job: str) -> int:
        """Print a job's log from its beginning as it grows, to the job's end; returns the exit code that says how it
        ended. An interrupt from the keyboard leaves the job running."""
        import aiohttp

        self.details(job)  # an unknown job is refused at once
        shown, answered = _Shown(), time.monotonic()
        try:
            while True:
                try:
                    asyncio.run(self._print_log(job, shown))
                except (RuntimeError, OSError, aiohttp.ClientError):  # cut off, or something between takes no WebSocket
                    with suppress(JobError):
                        shown.print_all(self.logs(job))
                try:
                    details = self.details(job)
                    answered = time.monotonic()
                    if details.status.is_terminal():
                        break
                except JobError as error:
                    if time.monotonic() - answered > PATIENCE:
                        raise JobError(f"{error}; {job} may go on: exspec logs {job} --follow") from error
                time.sleep(1)
        except KeyboardInterrupt:
            print(
                f"\n{job} goes on; see it again: exspec logs {job} --follow; stop it: exspec cancel {job}",
                file=sys.stderr,
            )
            return DETACHED
        print(outcome(details), file=sys.stderr)
        return exit_code(details)

    async def _print_log(self, job: str, shown: "_Shown") -> None:
        shown.again()
        async for text in self.client.tail_job_logs(job):
            shown.print(text)

    def cancel(self, job: str) -> str:
        """Stop a job and wait until it has stopped; returns how it ended, by itself or so."""
        until = time.monotonic() + PATIENCE
        while not (details := self.details(job)).status.is_terminal():
            if time.monotonic() > until:
                raise JobError(f"{job}: still {details.status.value} after {PATIENCE} seconds")
            with self._asking(job):
                self.client.stop_job(job)  # again and again: a job whose process has not begun does not hear it
            time.sleep(1)
        return outcome(details)


class _Shown:
    """How much of a log has been printed. One that is asked for again begins at its beginning."""

    def __init__(self) -> None:
        self.characters = self.skip = 0

    def again(self) -> None:
        self.skip = self.characters

    def print(self, text: str) -> None:
        new = text[self.skip :]
        self.skip = max(0, self.skip - len(text))
        self.characters += len(new)
        print(new, end="", flush=True)

    def print_all(self, text: str) -> None:
        self.again()
        self.print(text)


def find_address() -> str:
    """The address of the dashboard out of the environment. Raises JobError where there is none."""
    for name in ADDRESSES:
        if os.environ.get(name, "").startswith(("http://", "https://")):
            return os.environ[name]
    raise JobError(
        "no Ray cluster: give --address http://HOST:8265, the address of its dashboard, or set RAY_API_SERVER_ADDRESS"
    )


def exit_code(details: Any) -> int:
    """A command's exit code for a job that has ended: its own 0, 1 or 2, or how else it ended."""
    status = details.status.value
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        return STOPPED
    return details.driver_exit_code if details.driver_exit_code in (1, 2) else FAILED


def outcome(details: Any) -> str:
    """How a job ended, or what it does, in one sentence."""
    job, status, code = details.submission_id, details.status.value, details.driver_exit_code
    if status == "SUCCEEDED":
        return f"{job} succeeded"
    if status == "STOPPED":
        return f"{job} was stopped; what it finished is kept, and the same command again does the rest"
    if status == "FAILED" and code in (1, 2):
        return f"{job} ended with exit code {code}; the end of its log says why: exspec logs {job}"
    if status == "FAILED" and code is not None:
        return f"{job}: its process ended with {code}, so it did not come to its end; see exspec logs {job}"
    if status == "FAILED":
        return f"{job} failed outside of its own process: {_last_line(details.message)}"
    return f"{job} is {status.lower()}"


def show_status(cluster: Cluster, job: str | None) -> None:
    """Print what is known of one job, or a table of all that exspec submitted."""
    console = Console()
    if job is not None:
        details = cluster.details(job)
        table = Table(show_header=False, title=job)
        for name, value in (*_row(details).items(), ("what", outcome(details))):
            table.add_row(name, value)
        console.print(table)
        return
    found = cluster.jobs()
    table = Table(title=f"jobs at {cluster.address}", box=None, padding=(0, 1, 0, 0), title_justify="left")
    for heading in ("id", "status", "command", "started", "time", "code"):
        table.add_column(heading, no_wrap=True)  # an id is there to be copied
    for details in found:
        row = _row(details)
        command = (details.metadata or {}).get("command", "-")
        told = (row["status"], command, row["started"][5:16], row["duration"], row["exit code"])
        table.add_row(details.submission_id, *told)
    console.print(table if found else f"no jobs of exspec at {cluster.address}")


def _row(details: Any) -> dict[str, str]:
    metadata = details.metadata or {}
    end = (details.end_time or time.time() * 1000) if details.start_time else None
    seconds = (end - details.start_time) / 1000 if end else 0.0
    ended = details.status.is_terminal()
    return {
        "status": details.status.value,
        "command": " ".join(metadata[k] for k in ("command", "input", "output") if metadata.get(k)),
        "started": f"{datetime.fromtimestamp(details.start_time / 1000):%Y-%m-%d %H:%M:%S}" if end else "-",
        "duration": f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f}:{int(seconds % 60):02d}",
        "exit code": str(exit_code(details)) if ended else "-",
    }


def _last_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if any(c.isalnum() for c in line)]
    return lines[-1] if lines else type(error).__name__
