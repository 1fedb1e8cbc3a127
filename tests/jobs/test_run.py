"""`exspec run` and `exspec plan` as a person types them."""

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from exspec.actors.engine import EngineConfig
from exspec.jobs import cli
from exspec.jobs.commands.estimate import Estimate
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import Job, load_job
from exspec.pipeline.shape import Settled


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    assert CliRunner().invoke(cli.app, ["messages", str(folder), "--rows", "12", "--shards", "2"]).exit_code == 0
    return folder


def test_two_flags_are_enough(messages: Path, tmp_path: Path) -> None:
    """The demo pair, and the message column found by itself."""
    result = CliRunner().invoke(cli.app, ["run", "--input", str(messages), "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "12 of 12 rows in" in result.stdout
    rows = [row for path in (tmp_path / "out").glob("part-*") for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 12
    assert all(row["completion"].startswith('{"category":"') for row in rows)
    assert all(row["record"] for row in rows), "input columns are carried through"


def test_plan_runs_nothing_and_shows_the_first_prompts(messages: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["plan", "--input", str(messages), "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "12" in result.stdout
    assert "<|message|>" in result.stdout
    assert "0 of the first 12 rows would be refused" in result.stdout
    assert not list((tmp_path / "out").glob("*"))


def test_plan_reports_refused_rows_and_ids(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    table = pa.table({"key": ["a", "a", None], "prompt": ["Hi", None, "word " * 2000]})
    pq.write_table(table, tmp_path / "in" / "x.parquet")
    options = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--id-column", "key"]
    result = CliRunner().invoke(cli.app, ["plan", *options])
    assert "2 of the first 3 rows would be refused" in result.stdout
    assert "  1 row: column 'prompt' is null (a)" in result.stdout
    assert "ids: 1 null and 1 repeated; shard and row tell them apart" in result.stdout


def test_an_estimate_is_made_of_rows_that_were_decoded(messages: Path, tmp_path: Path) -> None:
    options = ["--input", str(messages), "--output", str(tmp_path / "out"), "--actors", "1"]
    result = CliRunner().invoke(cli.app, ["plan", *options, "--estimate", "--price-per-gpu-hour", "3"])
    assert result.exit_code == 0, result.output
    assert "estimate from 11 rows decoded here" in result.stdout, "one has warmed the engine up"
    assert re.search(r"12 rows: about [\d,]+ tokens of prompts and [\d,]+ of completions", result.stdout)
    assert "with 1 actors as fast as that; no GPU, no cost of GPUs" in " ".join(result.stdout.split())
    assert not list((tmp_path / "out").glob("*"))


def test_time_and_cost_follow_from_tokens_and_speed() -> None:
    shape = Settled(EngineConfig(), [])
    found = Estimate(shape, 32, 1000, tokens=7_200_000, prompts=1e6, speed=500, actors=4, gpus=2)
    assert found.seconds == 3600
    assert found.lines(price=3.0)[-1] == "60 min with 4 actors as fast as that, 24.00 at 3 a GPU hour"


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (["--device", "cuda"], "note: device is cuda, and this machine has no GPU that torch can use"),
        (["--actors", "999"], "note: 999 actors of 1 threads share the"),
        (["--actors", "99999"], "actors need"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="it has what the job asks for")
def test_what_this_machine_lacks_is_noted(messages: Path, tmp_path: Path, options: list[str], note: str) -> None:
    words = ["plan", "--input", str(messages), "--output", str(tmp_path / "out"), *options]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0
    assert note in " ".join(result.stdout.split())


def test_every_setting_that_fits_a_line_is_a_flag() -> None:
    printed = CliRunner().invoke(cli.app, ["run", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for name in Job.model_fields:
        in_files_alone = name in ("storage_options", "bad_words_ids")
        assert (f"--{name.replace('_', '-')}" in printed) == (not in_files_alone), name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("bach_size: 4", "job.yaml: bach_size: unknown setting; did you mean batch_size?"),
        ("batch_size: many", "job.yaml: batch_size: expected a whole number from 1 up, or auto, not 'many'"),
        ("{a: [", "job.yaml, line 1, column 6: not YAML: expected"),
        ("- a\n- b", "job.yaml: expected a mapping of settings, not list"),
        ("actors: '3:1'", "actors is 3:1, expected a number or MIN:MAX, from 1 up"),
    ],
)
def test_a_bad_job_file_is_one_sentence_and_exit_code_2(
    messages: Path, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "job.yaml").write_text(content)
    command = [sys.executable, "-c", "from exspec.jobs.cli import main; main()", "plan"]
    options = ["--job", str(tmp_path / "job.yaml"), "--input", str(messages), "--output", str(tmp_path / "out")]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert message in line


def test_a_wrong_flag_is_not_the_job_files_fault(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: in\noutput: out\nwindow: many\n")
    with pytest.raises(JobError) as error:
        load_job(Job, file, {"target": "t", "batch_size": "few"})
    assert str(error.value).split("; ") == [
        "batch_size: expected a whole number from 1 up, or auto, not 'few'",
        f"{file}: window: expected a whole number from 1 up, or auto, not 'many'",
    ]


def test_flags_override_the_job_file(messages: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"input: {messages}\noutput: {tmp_path / 'out'}\nbatch_size: 2\nwindow: 4\n")
    result = CliRunner().invoke(cli.app, ["plan", "--job", str(tmp_path / "job.yaml"), "--batch-size", "3"])
    assert "B=3" in result.stdout


def test_what_is_written_beside_the_output_holds_no_password() -> None:
    job = Job(target="t", input=["ftp://me:secret@host/in"], output="sftp://me:secret@host/out/",
              storage_options={"password": "secret"})  # fmt: skip
    written = job.published()
    assert "secret" not in str(written)
    assert (written["input"], written["output"]) == (["ftp://host/in"], "sftp://host/out/")
