"""Log-probabilities as columns of an output, and in answers of the batch API."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from exspec.actors.answers.logprobs import COLUMNS
from exspec.jobs.commands.convert import convert
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.jobs.calls import rows_of
from tests.pipeline import jobs

NAMES = COLUMNS.names


def run(pair: jobs.Pair, source: Path, output: Path, **settings: Any) -> list[dict[str, Any]]:
    assert execute(prepare(jobs.job(pair, source, output, **settings))) == 0
    return rows_of(output)


def test_every_token_has_one_whatever_is_drafted(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    """The columns are the same bits with two drafters; sums are consistent."""
    shape = {"logprobs": 3, "temperature": 0.9, "top_k": 2}
    found = [run(pair, source, tmp_path / d, drafter=d, **shape) for d in ("model", "suffix")]
    for other, row in zip(*found, strict=True):
        assert {name: other[name] for name in NAMES} == {name: row[name] for name in NAMES}
        count = row["completion_tokens"]
        assert {len(row[name]) for name in NAMES if name != "cumulative_logprob"} == {count}
        assert row["cumulative_logprob"] == pytest.approx(sum(row["logprobs"]))
        assert max(row["logprobs"] + row["sampled_logprobs"]) <= 0
        for token, number, logprob, drawn, likeliest in zip(*(row[n] for n in NAMES if "cum" not in n), strict=True):
            assert [one["logprob"] for one in likeliest] == sorted((o["logprob"] for o in likeliest), reverse=True)
            for one in likeliest:
                if one["id"] == number:
                    assert one["token"] == token
                    assert (one["logprob"], one["sampled_logprob"]) == (logprob, drawn)
            assert [one["sampled_logprob"] is None for one in likeliest] == [False, False, True]  # top_k is 2
    frame = pd.read_parquet(sorted((tmp_path / "model").glob("part-*"))[0])
    assert frame["logprobs"].map(sum).tolist() == pytest.approx(frame["cumulative_logprob"].tolist(), abs=1e-4)


def test_a_column_says_which_rows_have_them(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    for file in source.iterdir():
        table = pq.read_table(file)
        asked = [None if n % 3 == 0 else n % 3 for n in table["key"].to_pylist()]
        pq.write_table(table.append_column("asked", [asked]), file)
    for row in run(pair, source, tmp_path / "out", logprobs_column="asked"):
        if row["asked"] is None:
            assert {row[name] for name in NAMES} == {None}
        else:
            assert {len(top) for top in row["top_logprobs"]} == {row["asked"]}


def test_labels_have_them_too(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    ending = jobs.with_end_token(pair[0], tmp_path / "target"), None
    plain = jobs.job(ending, source, tmp_path / "out", logprobs=2, max_new_tokens_column=None, method="plain")
    job = LabelJob(**plain.model_dump(exclude_unset=True), labels=["w10", "w11 w12"])
    assert execute(prepare(job)) == 0
    for row in rows_of(tmp_path / "out"):
        assert row["label"] in job.labels
        assert len(row["logprobs"]) == row["completion_tokens"]


def test_an_output_has_no_such_columns_unless_the_job_asks(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    rows = run(pair, source, tmp_path / "out")
    assert not set(NAMES) & set(rows[0])
    with pytest.raises(JobError, match="logprobs was None and is 2"):
        prepare(jobs.job(pair, source, tmp_path / "out", logprobs=2))


def test_batch_requests_ask_for_them_and_answers_have_them(pair: jobs.Pair, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "w1 w2", "logprobs": 2},
        {"prompt": "w1 w2"},
        {"prompt": "w1 w2", "logprobs": True},
        {"messages": [{"role": "user", "content": "w1 w2"}], "logprobs": True, "top_logprobs": 2},
        {"messages": [{"role": "user", "content": "w1 w2"}], "top_logprobs": 2},
    ]
    url = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": url[next(iter(body))], "body": body | {"max_tokens": 5}}
        for i, body in enumerate(bodies)
    ]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings: dict[str, Any] = {"id_column": None, "max_new_tokens_column": None, "chat": False}
    job = jobs.job(pair, tmp_path / "batch.jsonl", tmp_path / "out", logprobs=0, **settings)
    assert execute(prepare(job)) == 0
    assert convert(str(tmp_path / "out"), str(tmp_path / "out.jsonl"), {}) == 5
    bodies = [json.loads(line)["response"]["body"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert bodies[2]["error"]["message"].startswith("body.logprobs: expected true or false for messages, a whole")
    assert bodies[4]["error"]["message"] == "body.top_logprobs: needs logprobs: true"
    two, none, _, chat, _ = (body.get("choices", [{}])[0].get("logprobs") for body in bodies)
    assert {len(top) for top in two["top_logprobs"]} == {2}
    assert none is None
    assert two["token_logprobs"] == [one["logprob"] for one in chat["content"]]
    for one, likeliest in zip(chat["content"], two["top_logprobs"], strict=True):
        assert {t["token"]: t["logprob"] for t in one["top_logprobs"]} == likeliest
        assert bytes(one["bytes"]).decode() == one["token"]
    other = jobs.job(pair, tmp_path / "batch.jsonl", tmp_path / "none", **settings)
    assert execute(prepare(other)) == 0
    assert "the setting logprobs turns them on" in rows_of(tmp_path / "none")[0]["error"]
