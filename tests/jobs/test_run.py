"""`exspec run` and `exspec plan` on the command line, and job files."""

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from exspec.actors.engine import EngineConfig
from exspec.jobs.commands.estimate import Estimate
from exspec.jobs.commands.tables import budgets
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import Job, load_job
from exspec.pipeline.shape import Settled
from tests.jobs.calls import MAIN, call, rows_of, succeed


def test_two_options_are_enough(messages: Path, tmp_path: Path) -> None:
    """The demo pair is the default, and the message column is found."""
    assert "24 of 24 rows in" in succeed("run", "--input", messages, "--output", tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 24
    assert all(row["completion"].startswith('{"category":"') for row in rows)
    assert all(row["record"] for row in rows), "input columns are carried to the output"


LABELS = ["label", "--plan", "--fields", "urgency=high,low,normal"]


@pytest.mark.parametrize(
    "command", [["plan"], LABELS, ["embed", "--plan"]], ids=["plan", "label --plan", "embed --plan"]
)
def test_plan_shows_the_first_prompts_and_writes_nothing(command: list[str], messages: Path, tmp_path: Path) -> None:
    printed = succeed(*command, "--input", messages, "--output", tmp_path / "out")
    assert "2 shards with 24 rows" in printed
    assert "<|message|>" in printed
    assert "0 of the first 24 rows would get an error" in printed
    assert not list((tmp_path / "out").glob("*"))


def test_plan_reports_refused_rows_and_ids(tmp_path: Path) -> None:
    table = pa.table({"key": ["a", "a", None], "prompt": ["Hi", None, "word " * 2000]})
    pq.write_table(table, tmp_path / "x.parquet")
    options = ["--input", tmp_path / "x.parquet", "--output", tmp_path / "out", "--id-column", "key"]
    printed = succeed("plan", *options)
    assert "2 of the first 3 rows would get an error" in printed
    assert "  1 row: column 'prompt' is null (a)" in printed
    assert "ids: 1 null and 1 repeated; shard and row still identify each row" in printed


def test_plan_computes_where_drafting_pays_on_gpus(messages: Path, tmp_path: Path) -> None:
    printed = succeed("plan", "--input", messages, "--output", tmp_path / "out", "--gpus")
    ways = re.findall(r"^ H100 +(.+?)((?: +\d+\.\d\d){6}) +(\d+) *$", printed, re.MULTILINE)
    assert [way for way, _, _ in ways] == ["model", "model 512", "sparse"]
    for _, ratios, _ in ways:
        found = [float(ratio) for ratio in ratios.split()]
        assert found == sorted(found)


def test_an_estimate_decodes_some_rows(messages: Path, tmp_path: Path) -> None:
    options = ["--input", messages, "--output", tmp_path / "out", "--actors", 1]
    printed = succeed("plan", *options, "--estimate", "--price-per-gpu-hour", 3)
    assert "estimate from 23 rows decoded here" in printed, "one row warms up the engine"
    assert re.search(r"24 rows: about [\d,]+ prompt tokens and [\d,]+ completion tokens", printed)
    assert "with 1 such actor; no cost, because no GPU is used" in " ".join(printed.split())
    assert not list((tmp_path / "out").glob("*"))


def test_the_least_memory_that_keeps_the_speed() -> None:
    shape = {"drafter": "model", "batch_size": 8, "window": 16, "draft_tokens": 5}
    found = [(410, 100.0), (205, 60.0), (200, 50.0), (300, 55.0), (512, 104.0), (900, 103.0)]
    line, grid = budgets([shape | {"memory_mib": mib, "predicted": speed} for mib, speed in found]) or ("", None)
    assert line == "memory_gib: 0.5 keeps 95% of the speed"
    assert [list(column.cells) for column in grid.columns][::5] == [["0.2", "0.3", "0.5"], ["50", "60", "104"]]
    assert budgets([]) is None


def test_time_and_cost_follow_from_tokens_and_speed() -> None:
    shape = Settled(EngineConfig(), [])
    found = Estimate(shape, 32, 1000, tokens=7_200_000, prompts=1e6, speed=500, actors=4, gpus=2)
    assert found.seconds == 3600
    assert found.lines(price=3.0)[-1] == "60 min with 4 such actors, 24.00 at 3 per GPU hour"


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (["--actors", "999"], "note: 999 actors of 1 threads share the"),
        (["--actors", "99999"], "actors need"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the job needs")
def test_plan_notes_what_this_machine_lacks(messages: Path, tmp_path: Path, options: list[str], note: str) -> None:
    printed = succeed("plan", "--input", messages, "--output", tmp_path / "out", *options)
    assert note in " ".join(printed.split())


def test_every_setting_that_fits_on_a_line_is_an_option() -> None:
    printed = succeed("run", "--help")
    for name in Job.model_fields:
        file_only = name in ("storage_options", "bad_words_ids")
        assert (f"--{name.replace('_', '-')}" in printed) == (not file_only), name


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
def test_a_bad_job_file_is_one_line_and_exit_code_2(messages: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "job.yaml").write_text(content)
    words = ["plan", "--job", tmp_path / "job.yaml", "--input", messages, "--output", tmp_path / "out"]
    done = subprocess.run([sys.executable, "-c", MAIN, *words], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert message in line


def test_a_message_names_the_job_file_only_for_its_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: in\noutput: out\nwindow: many\n")
    with pytest.raises(JobError) as error:
        load_job(Job, file, {"target": "t", "batch_size": "few"})
    assert str(error.value).split("; ") == [
        "batch_size: expected a whole number from 1 up, or auto, not 'few'",
        f"{file}: window: expected a whole number from 1 up, or auto, not 'many'",
    ]


def test_options_override_the_job_file(messages: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"input: {messages}\noutput: {tmp_path / 'out'}\nbatch_size: 2\nwindow: 4\n")
    assert "B=3" in call("plan", "--job", tmp_path / "job.yaml", "--batch-size", 3).stdout


def test_the_published_settings_have_no_password() -> None:
    job = Job(target="t", input=["ftp://me:secret@host/in"], output="sftp://me:secret@host/out/",
              storage_options={"password": "secret"})  # fmt: skip
    written = job.published()
    assert "secret" not in str(written)
    assert (written["input"], written["output"]) == (["ftp://host/in"], "sftp://host/out/")
