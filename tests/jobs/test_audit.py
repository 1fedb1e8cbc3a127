"""`exspec audit` and `exspec report` on finished jobs: a planted fault is found and named, an honest job passes."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from exspec.jobs import cli
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.pipeline import jobs

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return jobs.save_pair(tmp_path_factory.mktemp("pair"))


def run_job(pair: Pair, place: Path, **settings: Any) -> Path:
    jobs.write_shards(place / "in", rows=40)
    job = jobs.job(pair, place / "in", place / "out", **settings)
    assert execute(prepare(job)) == 0
    return place / "out"


def call(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "200"}, catch_exceptions=False)


def corrupt(part: Path, number: int) -> dict[str, Any]:
    """Change the last word of one completion, and leave everything else as it was."""
    table = pq.read_table(part)
    row: dict[str, Any] = table.slice(number, 1).to_pylist()[0]
    words = row["completion"].split(" ")
    words[-1] = "w1" if words[-1] != "w1" else "w2"
    texts = table["completion"].to_pylist()
    texts[number] = " ".join(words)
    place = table.schema.get_field_index("completion")
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array(texts)), part)
    return row | {"corrupted": texts[number]}


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 3}, {"dtype": "bfloat16", "method": "plain"}])
def test_an_honest_job_passes_and_one_changed_word_is_found(pair: Pair, tmp_path: Path, settings: Any) -> None:
    out = run_job(pair, tmp_path, **settings)
    result = call("audit", str(out), "--share", "1")
    assert result.exit_code == 0, result.output
    comparisons = json.loads((out / "_audit.json").read_text())["comparisons"]
    assert [(c["rows"], c["equal"]) for c in comparisons[:1]] == [(40, 40)]
    assert comparisons[1]["rows"] == (0 if "temperature" in settings else 40)
    if not settings:
        assert comparisons[1]["equal"] == 40, "greedy and float32: what generate gives"

    assert json.loads((out / "_report.json").read_text())["occupancy"] > 0, "an audit keeps what the report said"

    part = sorted(out.glob("part-*"))[1]
    lengths = [len(text) for text in pq.read_table(part)["completion"].to_pylist()]
    long = lengths.index(max(lengths))
    changed = corrupt(part, long)
    result = call("audit", str(out), "--share", "1", "--no-generate")
    assert result.exit_code == 1
    (found,) = json.loads((out / "_audit.json").read_text())["comparisons"]
    assert (found["rows"], found["equal"]) == (40, 39)
    (difference,) = found["differences"]
    assert (difference["shard"], difference["row"]) == (changed["shard"], changed["row"])
    assert (difference["stored"], difference["expected"]) == (changed["corrupted"], changed["completion"])
    assert difference["token"] == len(changed["completion"].split(" ")) - 1
    assert difference["margin"] > 0
    assert (
        f"{changed['shard']}, row {changed['row']} (id {changed['id']}): differs from plain decoding" in result.stdout
    )
    assert "differs from plain decoding" in (out / "_report.html").read_text()


def test_the_sample_has_every_shard_and_error_rows_stay_errors(pair: Pair, tmp_path: Path) -> None:
    jobs.write_shards(tmp_path / "in", rows=30)
    table = pa.table({"key": [98, 99], "prompt": [None, "w1 w2"], "budget": [3, -1]}, schema=pq.read_schema(
        next((tmp_path / "in").glob("*"))))  # fmt: skip
    pq.write_table(table, tmp_path / "in" / "wrong.parquet")
    assert execute(prepare(jobs.job(pair, tmp_path / "in", tmp_path / "out"))) == 0
    result = call("audit", str(tmp_path / "out"), "--count", "5")
    assert result.exit_code == 0, result.output
    sample = json.loads((tmp_path / "out" / "_audit.json").read_text())["sample"]
    shards = len(list((tmp_path / "in").glob("*")))
    assert shards <= sample <= 5 + shards


def test_reports_are_built_again_and_compared(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = run_job(pair, tmp_path / "a"), run_job(pair, tmp_path / "b", method="plain")
    before = json.loads((one / "_report.json").read_text())
    for name in ("_report.json", "_report.html"):
        (one / name).unlink()
    result = call("report", str(one), str(two), "--price-per-gpu-hour", "3.6")
    assert result.exit_code == 0
    after = json.loads((one / "_report.json").read_text())
    assert {k: v for k, v in after.items() if k != "occupancy"} == {k: v for k, v in before.items() if k != "occupancy"}
    assert (one / "_report.html").exists()
    first, second = json.loads(result.stdout.splitlines()[-1])
    assert (first["method"], second["method"]) == ("exspec", "plain")
    assert first["completion_tokens"] == second["completion_tokens"]
    expected = first["seconds"] * 0.001 / first["completion_tokens"] * 1e6
    assert first["cost_per_million_tokens"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("command", ["audit", "report"])
def test_a_folder_that_is_no_output_is_one_sentence(command: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no job; expected the output of exspec run"):
        call(command, str(tmp_path))
