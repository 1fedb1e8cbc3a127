"""What only a real Ray shows of the main job: pools of actors that grow and share, and models that actors load."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from exspec.pipeline.errors import JobError
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests import tiny
from tests.pipeline import jobs

pytestmark = pytest.mark.usefixtures("ray_session")
Pair = tuple[str, str]


def test_rows_in_are_rows_out(pair: Pair, source: Path, tmp_path: Path) -> None:
    assert execute(prepare(jobs.job(pair, source, tmp_path / "out")), load=jobs.ArithmeticLoader()) == 0
    jobs.assert_complete(tmp_path / "out", 60)
    report = json.loads((tmp_path / "out" / "_report.json").read_text())
    assert (report["rows"], report["errors"], report["missing"]) == (60, 0, [])
    page = (tmp_path / "out" / "_report.html").read_text()
    assert page.count("<svg") == 2
    assert "Tokens by time" in page
    assert "Lengths of completions" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    schemas = {pq.read_schema(path).remove_metadata() for path in (tmp_path / "out").glob("part-*")}
    assert len({str(s) for s in schemas}) == 1
    field = pq.read_schema(next((tmp_path / "out").glob("part-*"))).field("acceptance_rate")
    assert field.metadata[b"description"] == b"accepted / drafted"


@pytest.mark.slow
def test_an_elastic_pool_grows_and_loses_nothing(pair: Pair, source: Path, tmp_path: Path) -> None:
    job = jobs.job(pair, source, tmp_path / "out", actors="1:2", rows_per_chunk=2)
    assert execute(prepare(job), load=jobs.ArithmeticLoader(0.2)) == 0
    jobs.assert_complete(tmp_path / "out", 60)
    report = json.loads((tmp_path / "out" / "_report.json").read_text())
    assert len(report["rows_by_actor"]) == 2


def test_a_real_pair_gives_what_generate_gives(pair: Pair, source: Path, tmp_path: Path) -> None:
    """Speculation, Ray, chunks and all: greedy tokens in float32 are those of transformers, row by row."""
    job = jobs.job(pair, source, tmp_path / "out", actors="2", limit=30)
    assert execute(prepare(job)) == 0
    target, words = AutoModelForCausalLM.from_pretrained(pair[0]), jobs.tokenizer()
    rows = jobs.read_output(tmp_path / "out")
    assert len(rows) == 30
    for n in range(30):
        tokens = tiny.generate(target, jobs.prompt(n), jobs.budget(n))
        ended = tokens[-1] in tiny.ENDS
        row = rows[str(n)]
        assert row["completion"] == words.decode(tokens[:-1] if ended else tokens)
        assert row["completion_tokens"] == len(tokens)
        assert row["finish_reason"] == ("stop" if ended else "length")
        assert row["prompt_tokens"] == len(jobs.prompt(n))
        assert row["accepted"] == sum(row["accepted_by_position"])


@pytest.mark.slow
def test_what_is_auto_is_measured_once_and_kept(pair: Pair, source: Path, tmp_path: Path, capsys: Any) -> None:
    """The shape is stored with the job: a resumed run decodes in it, measures nothing, and gives the same rows."""
    auto = dict.fromkeys(("method", "drafter", "batch_size", "window", "draft_tokens", "bucket"), "auto")
    out = tmp_path / "out"
    job = jobs.job(pair, source, out, tune_from=60, tune_seconds=1.5, **auto)
    assert set(prepare(job).shape.free) == {*auto, "kernels", "prefill"}
    assert execute(prepare(job)) == 0
    assert "(measured in " in capsys.readouterr().out
    stored = json.loads((out / "_job.json").read_text())
    assert {row["method"] for row in stored["calibration"]} == {"plain", "exspec"}
    first = jobs.read_output(out)
    for path in list(out.glob("part-*"))[::2]:
        path.unlink()
    resumed = prepare(job)
    assert resumed.shape.free == ()
    assert stored["shape"].items() <= vars(resumed.shape.config).items()
    assert execute(resumed) == 0
    again = jobs.read_output(out)
    assert {n: row["completion"] for n, row in again.items()} == {n: row["completion"] for n, row in first.items()}
    target, words = AutoModelForCausalLM.from_pretrained(pair[0]), jobs.tokenizer()
    for n in range(0, 60, 7):
        tokens = tiny.generate(target, jobs.prompt(n), jobs.budget(n))
        assert again[str(n)]["completion"] == words.decode(tokens[:-1] if tokens[-1] in tiny.ENDS else tokens)


def test_a_device_that_the_cluster_lacks_is_refused(pair: Pair, source: Path, tmp_path: Path) -> None:
    """Ray would wait for a GPU for ever."""
    with pytest.raises(JobError, match="an actor needs 1 GPU, but the cluster has 0"):
        execute(prepare(jobs.job(pair, source, tmp_path / "out", device="cuda")), load=jobs.ArithmeticLoader())


@pytest.mark.slow
def test_few_chunks_are_shared_out_among_the_actors(pair: tuple[str, str], tmp_path: Path) -> None:
    """One actor that is there first would have room for all of them."""
    jobs.write_shards(tmp_path / "in", rows=32)
    (tmp_path / "loaded").mkdir()
    job = jobs.job(pair, tmp_path / "in", tmp_path / "out", actors="2", chunks_in_flight=8)
    assert execute(prepare(job), load=jobs.TogetherLoader(tmp_path / "loaded", actors=2)) == 0
    jobs.assert_complete(tmp_path / "out", 32)
    assert len(json.loads((tmp_path / "out" / "_report.json").read_text())["rows_by_actor"]) == 2
