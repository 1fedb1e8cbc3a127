"""A user's mistake is one line that names it, with exit code 2. A bug in exspec is one line that names the file with
its traceback, with exit code 3."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exspec.jobs import cli
from exspec.pipeline import storage


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(storage, "PATIENCE", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.parquet").write_text("no Parquet")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "a"}\n\xff\xfe')
    (tmp_path / "list.jsonl").write_text("[1]")
    for name, entry in (("cut", b"{"), ("bare", gzip.compress(b"{}")), ("half", gzip.compress(b'{"kind": "begin"}'))):
        (tmp_path / name / "_log").mkdir(parents=True)
        (tmp_path / name / "_log" / "0000000001.json.gz").write_bytes(entry)
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["exspec", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


NO_STORE = json.dumps(
    {"endpoint_url": "http://127.0.0.1:1", "key": "a", "secret": "b", "config_kwargs": {"retries": {"max_attempts": 0}}}
)
ON_OUTPUTS = [
    (("nowhere",), "nowhere: has no job; expected the output of exspec run"),
    (("text.parquet",), "text.parquet: cannot be read: NotADirectoryError"),
    (("cut",), "cut/_log/0000000001.json.gz: damaged log entry: BadGzipFile: Not a gzipped file"),
    (("bare",), "bare/_log/0000000001.json.gz: not a valid log entry: ValueError: entry is {}: "),
    (("half",), "half/_log/0000000001.json.gz: not a valid log entry: ValueError: begin.at is "),
    (("nosuch://bucket/out",), "nosuch://bucket/out: Protocol not known: nosuch"),
    (("s3://bucket/out", "--storage-options", NO_STORE), "s3://bucket/out: cannot be read: EndpointConnectionError"),
]


@pytest.mark.parametrize("command", ["audit", "report", "compact"])
@pytest.mark.parametrize(("words", "message"), ON_OUTPUTS, ids=lambda v: v[0] if isinstance(v, tuple) else "")
def test_a_folder_that_is_not_an_output(
    command: str, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert call(monkeypatch, command, *words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("exspec: ")
    assert message in line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --job none.yaml", "job file none.yaml: No such file or directory"),
        ("plan --job bytes.yaml", "job file bytes.yaml: not UTF-8 text (byte 0)"),
        ("plan --input in --output", "'--output' requires an argument"),
        ("plan --input in", "output: is not set"),
        ("plan --input empty --output out", "input: no Parquet, JSONL, CSV or Arrow files in "),
        ("plan --input text.parquet --output out", "text.parquet: not a Parquet file"),
        ("plan --input in --output out --device tpu", "device: expected cpu, cuda, or auto: cuda if there is a GPU"),
        ("plan --input in --output out --actors many", "actors: expected a number of actors, MIN:MAX, or"),
        ("plan --input in --output out --method fast", "'fast' is not one of 'auto', 'plain', 'eqspec', 'exspec'"),
        ("plan --input in --output out --max-new-tokens many", "Invalid value for '--max-new-tokens'"),
        ("plan --inputs in", "No such option: --inputs"),
        ("plans", "No such command 'plans'"),
        ("audit", "Missing argument"),
        ("compact out --target-size large", "expected bytes with a unit, such as 256MiB or 1GB, not 'large'"),
        ("audit o --storage-options {", "Invalid value for '--storage-options': expected a JSON object: Invalid JSON"),
        ("report out --storage-options [1]", "Invalid value for '--storage-options': expected a JSON object"),
        ("messages text.parquet", "text.parquet: File exists"),
        ("messages text.parquet/in", "text.parquet/in: Not a directory"),
        ("messages in --shards 0", "Invalid value for '--shards'"),
        ("bench --device abc", "expected cpu, cuda or cuda:N, not 'abc'"),
        ("bench --prompts none.parquet", "none.parquet: No such file or directory"),
        ("bench --prompts text.parquet", "text.parquet: not a Parquet file"),
        ("bench --prompts bytes.jsonl", "bytes.jsonl, line 2: expected UTF-8 text"),
        ("bench --prompts list.jsonl", "list.jsonl, row 0: expected a JSON object, not list"),
        ("synthetic tiny:tiny out.json --batch-sizes a", "--batch-sizes: expected numbers with commas between"),
        ("synthetic tiny out.json", "no shape ''"),
        ("synthetic tiny:tiny out.json", "--device: cuda is not available: this machine has no GPU that torch can use"),
    ],
)  # fmt: skip
def test_a_wrong_command_line(line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert call(monkeypatch, *line.split()) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert message in " ".join(printed.replace("│", " ").split())


def test_an_empty_path_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It would name the current folder."""
    assert call(monkeypatch, "plan", "--input", "", "--output", "") == 2
    assert "input: expected a path or URL" in (printed := capsys.readouterr().err)
    assert "output: expected a path or URL" in printed


def _fails(*_: object) -> None:
    raise AssertionError("broken")


@pytest.mark.parametrize("broken", [lambda *_: {}["shards"], _fails, lambda *_: json.loads("{")])
def test_a_bug_leaves_its_traceback_in_a_file(
    broken: Callable[..., object], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Its exit code is different from that of every other result. A ValueError that a library raises is a bug too,
    because its message was not written for the user."""
    monkeypatch.setattr("exspec.jobs.demo.shards.write_shards", broken)
    assert call(monkeypatch, "messages", "out") == 3
    (printed,) = capsys.readouterr().err.splitlines()
    assert "this is a bug in exspec" in printed
    kept = Path(printed.split("traceback: ")[1])
    assert "Traceback" in kept.read_text()
    kept.unlink()
