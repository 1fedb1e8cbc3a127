"""Jobs that the real command submits to a real Ray head."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterator
from importlib.metadata import Distribution, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.runtime_env.packaging import get_uri_for_directory
from ray.job_submission import JobStatus

from exspec.jobs.cluster.client import Cluster, exit_code, outcome
from exspec.jobs.cluster.package import copy_package
from exspec.jobs.demo.shards import write_shards
from exspec.pipeline.errors import JobError
from tests.jobs.calls import overwrite, rows_of
from tests.jobs.cluster import Head, ray_head
from tests.pipeline.generators import held
from tests.pipeline.jobs import wait_for_parts

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

ROOT = Path(__file__).parents[2]
EXSPEC = str(Path(sys.executable).with_name("exspec"))
ROWS, SECRET = 32, "kept-to-itself"
PATIENCE = 300  # seconds
RUN = ["run", "--input", "s3://b/in", "--output", "s3://b/out"]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="ray") as folder, ray_head(Path(folder)) as started:
        yield started


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    write_shards(folder, ROWS, 1)
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job") / "out"


def exspec(head: Head, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = head.environment(**environment)
    return subprocess.run([EXSPEC, *arguments], env=env, capture_output=True, text=True, timeout=PATIENCE)


def run_of(messages: Path, output: Path) -> list[str]:
    """A job of many parts: one sequence at a time, four rows per part."""
    shape = ["--method", "plain", "--batch-size", "1", "--window", "1", "--rows-per-chunk", "4"]
    return ["run", "--input", str(messages), "--output", str(output), *shape]


def metadata(head: Head) -> str:
    """What everyone with the token can read about the cluster's jobs."""
    request = urllib.request.Request(f"{head.address}/api/jobs/")
    request.add_header("Authorization", f"Bearer {head.token.read_text()}")
    with urllib.request.urlopen(request) as answer:
        return str(answer.read().decode())


def test_a_job_is_followed_interrupted_followed_again_and_cancelled(head: Head, messages: Path, output: Path) -> None:
    sent = exspec(head, "submit", "--detach", "--name", "long", *run_of(messages, output), "--actors", "1")
    assert sent.returncode == 0, sent.stderr
    assert sent.stdout == "long\n"

    follow = [EXSPEC, "logs", "long", "--follow"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # As in a terminal. A process that a script starts in the background ignores the interrupt, and so do its children.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(follow, env=head.environment(), **pipes) as first:
        assert first.stdout is not None
        assert any("Running entrypoint" in line for line in first.stdout)
        first.send_signal(signal.SIGINT)
        error = first.communicate(timeout=PATIENCE)[1]
    assert first.returncode == 130
    assert "long is still running" in error

    with subprocess.Popen(follow, env=head.environment(), **pipes) as second:
        wait_for_parts(output, 1, second)
        with held(head.process):
            cancelled = exspec(head, "cancel", "long")
            printed, error = second.communicate(timeout=60)
    assert cancelled.returncode == 0
    assert "long was stopped" in cancelled.stdout
    assert second.returncode == 4, (printed, error)
    assert "long was stopped. Finished rows are kept; run the same command again to resume" in error
    assert printed.count("Running entrypoint") == 1
    assert not (output / "_SUCCESS").exists()
    assert exspec(head, "cancel", "long").stdout == cancelled.stdout, "a second cancel gives the same answer"
    assert "STOPPED" in exspec(head, "status", "long").stdout


def test_the_same_command_resumes(head: Head, messages: Path, output: Path) -> None:
    kept = {path: path.stat().st_mtime_ns for path in output.glob("part-*")}
    assert 0 < len(kept) < ROWS / 4
    done = exspec(head, "submit", "--name", "rest", *run_of(messages, output), "--actors", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ROWS} of {ROWS} rows" in done.stdout
    assert "rest succeeded" in done.stderr
    assert f"input {messages}: assumed to be a folder that all nodes of the cluster share" in done.stderr
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())
    rows = rows_of(output)
    assert len({row["row"] for row in rows}) == len(rows) == ROWS
    assert "exspec" in json.loads((output / "_job.json").read_text())["versions"]


def test_an_audit_that_finds_a_difference_exits_with_1(head: Head, output: Path) -> None:
    overwrite(min(output.glob("part-*")), "completion", 0, "not this")
    secret = json.dumps({"auto_mkdir": True, "comment": SECRET})
    command = ["audit", str(output), "--count", str(ROWS), "--no-generate", "--storage-options", secret]
    done = exspec(head, "submit", "--name", "check", "--env", "HF_HUB_OFFLINE", *command)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{ROWS - 1} ({(ROWS - 1) / ROWS:.1%})" in done.stdout
    assert "check ended with exit code 1" in done.stderr
    shown = metadata(head)
    assert '"check"' in shown
    assert SECRET not in shown
    assert head.token.read_text() not in shown


def test_a_job_that_is_refused_on_the_cluster_exits_with_2(head: Head, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"input: {tmp_path / 'nothing'}\noutput: {tmp_path / 'out'}\n")
    done = exspec(head, "submit", "--name", "refused", "run", "--job", str(tmp_path / "job.yaml"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"exspec: input {tmp_path / 'nothing'}: no such file or folder" in done.stdout
    assert "refused ended with exit code 2" in done.stderr
    again = exspec(head, "logs", "refused", "--follow")
    assert (again.returncode, again.stdout) == (2, done.stdout)


def test_status_lists_all_jobs(head: Head) -> None:
    shown = exspec(head, "status", COLUMNS="80").stdout
    ends = [("long", "STOPPED", "4"), ("rest", "SUCCEEDED", "0"), ("check", "FAILED", "1"), ("refused", "FAILED", "2")]
    for name, status, code in ends:
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{name} ")]
        assert status in line
        assert line.rstrip().endswith(f" {code}")
        assert len(line) <= 80


def test_a_missing_agent_gives_a_hint() -> None:
    """Ray's answer if the port of a node's agent is in use."""
    cluster = Cluster.__new__(Cluster)
    cluster.address = "http://head:8265"
    message = r"No available agent to submit job.*; .* --dashboard-agent-listen-port PORT"
    with pytest.raises(JobError, match=message), cluster._errors():
        raise RuntimeError("Request failed with status code 500: No available agent to submit job, try again later.")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["status"], {"RAY_AUTH_TOKEN": "wrong"}, "the cluster rejected the token; set RAY_AUTH_TOKEN or"),
        (["status"], {"RAY_AUTH_TOKEN_PATH": "/nothing"}, "RAY_AUTH_TOKEN_PATH: /nothing does not exist"),
        (["status"], {"RAY_AUTH_MODE": "disabled"}, "the cluster requires a token; set RAY_AUTH_TOKEN or"),
        (
            ["status", "--address", "http://127.0.0.1:9"],
            {},
            "http://127.0.0.1:9: no Ray dashboard answers at",
        ),
        (["logs", "nobody"], {}, "nobody: no such job at http://127.0.0.1"),
        (["logs", "nobody", "--follow"], {}, "nobody: no such job at http://127.0.0.1"),
        (["cancel", "nobody"], {}, "nobody: no such job at http://127.0.0.1"),
        (["submit", "--name", "long", *RUN], {}, "long: the cluster already has a job with this id; choose another"),
        (["submit", "--env", "NOT_SET_HERE", *RUN], {}, "--env NOT_SET_HERE: the variable is not set; set it, or pass"),
    ],
)
def test_a_refused_request_is_one_line(
    head: Head, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    done = exspec(head, *arguments, **environment)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--input", "in/", "--output", "s3://b/out"], "input in/: a cluster cannot resolve a relative path"),
        (["run", "--input", "s3://b/in", "--output", "out"], "output out: a cluster cannot resolve a relative path"),
        (["run", "--input", "s3://b/in"], "output: is not set"),
        (["embed", *RUN[1:], "--stop", "."], "stop does not apply to an embedding job"),
        (["embed", *RUN[1:]], "no Ray dashboard answers"),
        ([*RUN, "--batch-size", "many"], "batch_size: expected a"),
        (["run", "--imput", "s3://b/in"], "No such option: --imput"),
        (["run", "--job", "nowhere.yaml"], "--job nowhere.yaml: No such file or directory"),
        (["audit", "out"], "output out: a cluster cannot resolve a relative path"),
        (["tune", "--input", "s3://b/in"], "submit tune: expected one of run"),
        (
            [*RUN, "--address", "http://head:8265"],
            "--address: is an option of submit; put it before run: exspec submit",
        ),
        ([*RUN, "--ray-address", "auto"], "ray_address: leave it out; a submitted job runs on the cluster"),
    ],
)
def test_a_command_is_checked_before_it_is_sent(arguments: list[str], message: str, tmp_path: Path) -> None:
    """There is no cluster at the address."""
    command = [EXSPEC, "submit", "--address", "http://127.0.0.1:9", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("status", "driver", "code", "sentence"),
    [
        ("FAILED", -9, 3, "j: the process crashed with exit code -9; see exspec logs j"),
        ("FAILED", 70, 3, "j: the process crashed with exit code 70; see exspec logs j"),
        ("FAILED", None, 3, "j failed outside its own process: the node is gone"),
        ("RUNNING", None, None, "j is running"),
    ],
)
def test_other_failures_have_their_own_code(status: str, driver: int | None, code: int | None, sentence: str) -> None:
    details = SimpleNamespace(
        submission_id="j", status=JobStatus(status), driver_exit_code=driver, message="Error:\nthe node is gone"
    )
    assert outcome(details) == sentence
    if code is not None:
        assert exit_code(details) == code


def test_the_token_is_sent_even_if_ray_was_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself adds the token only if its variables were set at its import."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")  # Cluster sets it
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda _, headers: headers)
    assert Cluster("http://there").client == {"Authorization": "Bearer secret"}


class Faltering:
    """A client whose log grows, twice by half a line, and cannot be read at times, also after the job's end. Its
    dashboard is down for a while."""

    def __init__(self) -> None:
        self.logs = ["one\ntw", None, "one\ntwo\nth", None, "one\ntwo\nthree\n"]
        self.asked, self.away = 0, False

    def get_job_logs(self, job: str) -> str:
        assert job == "j"
        self.asked += 1
        log = self.logs[self.asked - 1]
        if log is None:
            raise RuntimeError("Request failed with status code 500: the agent does not answer")
        return log

    def get_job_info(self, job: str) -> Any:
        if self.asked == 2 and not self.away:
            self.away = True
            raise ConnectionError("away")
        status = JobStatus.SUCCEEDED if self.asked >= len(self.logs) - 2 else JobStatus.RUNNING
        return SimpleNamespace(submission_id=job, status=status, driver_exit_code=0)


def test_a_lost_connection_neither_drops_nor_repeats_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = object.__new__(Cluster)
    cluster.address, cluster.client = "http://there", Faltering()
    assert cluster.follow("j") == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_a_job_brings_the_package_and_nothing_else(tmp_path: Path) -> None:
    """No other folder of the checkout, and no dependencies. Ray names the copy by its content."""
    copies = []
    for name in ("one", "other"):
        (tmp_path / name / "job").mkdir(parents=True)
        copies.append(copy_package(tmp_path / name, tmp_path / name / "job"))
    names = {path.relative_to(tmp_path / "one").as_posix() for path in copies[0].rglob("*") if path.is_file()}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {name.rsplit("/", 1)[0].replace("/", ".") for name in names if name.endswith("/__init__.py")}
    assert packages == set(listed)
    assert {"exspec/py.typed", "exspec/jobs/demo/pair/training.json", "exspec/pipeline/output/page.html"} <= names
    assert not [name for name in names if "__pycache__" in name]
    (place,) = (tmp_path / "one/job").iterdir()
    assert Distribution.at(place).version == version("exspec")
    assert "Requires-Dist" not in (place / "METADATA").read_text()
    first, second = (get_uri_for_directory(str(copy), include_gitignore=True) for copy in copies)
    assert first == second


@pytest.mark.parametrize("address", ["localhost:8265", "ray://localhost:10001"])
def test_another_address_than_a_dashboards_is_refused(address: str) -> None:
    with pytest.raises(JobError, match=f"address {address}: expected the URL of the cluster's dashboard"):
        Cluster(address)
