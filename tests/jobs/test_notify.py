"""A word to a URL when a job has come to its end."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from exspec.jobs.commands.notify import notified
from exspec.pipeline.errors import BrokenOffError, JobError
from exspec.pipeline.job.settings import Job

Call = Callable[[], int]


class Listener(HTTPServer):
    """Keeps what it is told, and answers with a status of the test's."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.told: list[dict[str, Any]] = []
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    server: Listener

    def do_POST(self) -> None:
        self.server.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def listener() -> Iterator[Listener]:
    server = Listener()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def job(tmp_path: Path, listener: Listener) -> Job:
    url = f"http://127.0.0.1:{listener.server_port}/services/secret"
    return Job(target="t", input=["in"], output=str(tmp_path), notify=url)


def raising(error: BaseException) -> Call:
    def call() -> int:
        raise error

    return call


def test_it_is_told_how_the_job_ended_with_its_figures(tmp_path: Path, listener: Listener) -> None:
    figures = {"planned_rows": 3, "rows": 3, "errors": 1, "errors_by_reason": [], "completion_tokens": 9}
    figures |= {"seconds": 1.0, "tokens_per_second": 9.0}
    (tmp_path / "_report.json").write_text(json.dumps(figures | {"set_aside": []}))
    assert notified(job(tmp_path, listener), lambda: 0) == 0
    (told,) = listener.told
    assert told == figures | {"output": str(tmp_path), "code": 0, "message": "done"}


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (JobError("input in: no such file"), 2, "input in: no such file"),
        (BrokenOffError("the job broke off"), 1, "the job broke off"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (TypeError("what"), 3, "a fault of exspec"),
    ],
)
def test_whatever_ends_a_job_is_told_and_goes_on(
    error: BaseException, code: int, message: str, tmp_path: Path, listener: Listener
) -> None:
    (tmp_path / "_report.json").write_text(json.dumps(dict.fromkeys(["rows"], 7)))
    with pytest.raises(type(error)):
        notified(job(tmp_path, listener), raising(error))
    (told,) = listener.told
    assert (told["code"], told["message"]) == (code, message)
    assert "rows" not in told, "an earlier report, or one that is not whole, is not this job's"


def test_who_does_not_listen_changes_nothing_and_its_url_stays_untold(
    tmp_path: Path, listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    listener.status = 404
    assert notified(job(tmp_path, listener), lambda: 1) == 1
    assert len(listener.told) == 2, "one more try, and no more"
    printed = capsys.readouterr().out
    assert "notify: nobody at 127.0.0.1 was told: HTTPError: HTTP Error 404" in printed
    assert "secret" not in printed
