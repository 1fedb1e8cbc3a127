"""`exspec audit` and `exspec report`: an audit passes a correct job, and names a row that was changed."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.jobs.calls import call, overwrite, succeed
from tests.pipeline import jobs


def run_job(pair: jobs.Pair, place: Path, **settings: Any) -> Path:
    jobs.write_shards(place / "in", rows=40)
    assert execute(prepare(jobs.job(pair, place / "in", place / "out", **settings))) == 0
    return place / "out"


def read(output: Path, name: str) -> Any:
    return json.loads((output / name).read_text())


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.8, "seed": 3}, {"dtype": "bfloat16", "method": "plain"}, {"dtype": "float16"}]
)
def test_an_audit_passes_a_correct_job_and_finds_a_changed_word(pair: jobs.Pair, tmp_path: Path, settings: Any) -> None:
    out = run_job(pair, tmp_path, **settings)
    succeed("audit", out, "--share", 1)
    plain, generate = read(out, "_audit.json")["comparisons"]
    assert (plain["rows"], plain["equal"]) == (40, 40)
    assert generate["rows"] == (0 if "temperature" in settings else 40)
    if not settings:
        assert generate["equal"] == 40, "greedy and in float32"
    assert read(out, "_report.json")["occupancy"] > 0, "an audit keeps the figures of the report"

    part = sorted(out.glob("part-*"))[1]
    texts = pq.read_table(part)["completion"].to_pylist()
    number = max(range(len(texts)), key=lambda i: len(texts[i]))
    words = texts[number].split(" ")
    changed = " ".join([*words[:-1], "w1" if words[-1] != "w1" else "w2"])
    row = overwrite(part, "completion", number, changed)
    result = call("audit", out, "--share", 1, "--no-generate")
    assert result.exit_code == 1
    (plain,) = read(out, "_audit.json")["comparisons"]
    assert (plain["rows"], plain["equal"]) == (40, 39)
    (difference,) = plain["differences"]
    assert (difference["shard"], difference["row"]) == (row["shard"], row["row"])
    assert (difference["stored"], difference["expected"]) == (changed, row["completion"])
    assert difference["token"] == len(words) - 1
    assert difference["margin"] > 0
    assert f"{row['shard']}, row {row['row']} (id {row['id']}): differs from plain decoding" in result.stdout
    assert "differs from plain decoding" in (out / "_report.html").read_text()


def test_the_sample_has_rows_of_every_shard_and_error_rows(pair: jobs.Pair, tmp_path: Path) -> None:
    jobs.write_shards(tmp_path / "in", rows=30)
    schema = pq.read_schema(tmp_path / "in" / "shard-0.parquet")
    wrong = pa.table({"key": [98, 99], "prompt": [None, "w1 w2"], "budget": [3, -1]}, schema=schema)
    pq.write_table(wrong, tmp_path / "in" / "wrong.parquet")
    assert execute(prepare(jobs.job(pair, tmp_path / "in", tmp_path / "out"))) == 0
    succeed("audit", tmp_path / "out", "--count", 5)
    assert 4 <= read(tmp_path / "out", "_audit.json")["sample"] <= 5 + 4


def test_reports_are_rebuilt_and_compared(pair: jobs.Pair, tmp_path: Path) -> None:
    one, two = run_job(pair, tmp_path / "a"), run_job(pair, tmp_path / "b", method="plain")
    before = read(one, "_report.json")
    for name in ("_report.json", "_report.html"):
        (one / name).unlink()
    output = succeed("report", one, two, "--price-per-gpu-hour", 3.6)
    assert read(one, "_report.json") | {"occupancy": 0} == before | {"occupancy": 0}
    assert (one / "_report.html").exists()
    first, second = json.loads(output.splitlines()[-1])
    assert (first["method"], second["method"]) == ("exspec", "plain")
    assert first["completion_tokens"] == second["completion_tokens"]
    expected = first["seconds"] * 0.001 / first["completion_tokens"] * 1e6
    assert first["cost_per_million_tokens"] == pytest.approx(expected, rel=1e-3)
