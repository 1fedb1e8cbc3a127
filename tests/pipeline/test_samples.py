"""Several samples of a row."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from exspec.jobs.commands.audit import audit
from exspec.jobs.commands.convert import NUMBERED, convert, partition
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.job.settings import Job, load_job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.jobs.calls import rows_of
from tests.pipeline import jobs
from tests.pipeline.test_logprobs import run
from tests.pipeline.test_scores import table

HOT: dict[str, Any] = {"temperature": 1.0, "max_new_tokens_column": None, "max_new_tokens": 6}


def seeded(pair: jobs.Pair, source: Path, output: Path, **settings: Any) -> list[dict[str, Any]]:
    return run(pair, source, output, seed_column="seed", id_column=None, carry=[], **HOT | settings)


@pytest.mark.parametrize(("drafter", "count"), [("model", 9), ("suffix", 64)])
def test_samples_are_those_of_rows_with_the_same_seeds(
    drafter: str, count: int, pair: jobs.Pair, tmp_path: Path
) -> None:
    texts = [" ".join(jobs.WORDS[t] for t in jobs.prompt(n)) for n in range(6)]
    shape = {"drafter": drafter, "window": 4, "batch_size": 2, "logprobs": 1}
    once = seeded(
        pair, table(tmp_path / "in", prompt=texts, seed=[100 * n for n in range(6)]), tmp_path / "n", n=count, **shape
    )
    every = [(text, 100 * n + i) for n, text in enumerate(texts) for i in range(count)]
    single = table(tmp_path / "each", prompt=[text for text, _ in every], seed=[seed for _, seed in every])
    alone = seeded(pair, single, tmp_path / "alone", **shape)
    for n, row in enumerate(once):
        rows = alone[count * n : count * (n + 1)]
        names = ("completion", "finish_reason", "completion_tokens", "logprobs", "top_logprobs")
        assert [{name: one[name] for name in names} for one in row["samples"]] == [
            {name: one[name] for name in names} for one in rows
        ]
        assert [one["seed"] for one in row["samples"]] == [100 * n + i for i in range(count)]
        assert (row["completion"], row["logprobs"]) == (rows[0]["completion"], rows[0]["logprobs"])
        assert row["completion_tokens"] == sum(one["completion_tokens"] for one in rows)
        assert row["prompt_tokens"] == rows[0]["prompt_tokens"]
    assert audit(str(tmp_path / "n"), {}, 64, None, 0, True, {}) == 0


def test_the_likeliest_samples_are_kept(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    hot = HOT | {"seed": 3}
    every = run(pair, source, tmp_path / "every", n=6, logprobs=0, **hot)
    best = run(pair, source, tmp_path / "best", best_of=6, **hot)
    two = run(pair, source, tmp_path / "two", best_of=6, n=2, **hot)
    for row, one, kept in zip(every, best, two, strict=True):
        order = sorted(row["samples"], key=lambda sample: -sample["cumulative_logprob"])
        assert one["completion"] == order[0]["completion"] == kept["completion"]
        assert one["cumulative_logprob"] == order[0]["cumulative_logprob"]
        assert [s["seed"] for s in kept["samples"]] == [s["seed"] for s in order[:2]]
    assert "samples" not in best[0]
    longest = max(len(row["tokens"]) for row in best)
    assert jobs.report(tmp_path / "best")["completion_length"]["longest"] == longest, "of one sample"
    for name in ("best", "two"):
        assert audit(str(tmp_path / name), {}, 64, None, 0, True, {}) == 0


def test_a_column_says_how_many(pair: jobs.Pair, tmp_path: Path) -> None:
    given = table(
        tmp_path / "in", prompt=["w1 w2"] * 4, many=[None, 3, 0, 2], heat=[1.0, 1.0, 1.0, 0.0], seed=[5, 6, 7, 8]
    )
    rows = run(pair, given, tmp_path / "out", n_column="many", temperature_column="heat", id_column=None, **HOT)
    assert [row["samples"] and len(row["samples"]) for row in rows] == [1, 3, None, None]
    assert rows[2]["error"] == "column 'many': expected a whole number from 1 to 1024, not 0"
    assert rows[3]["error"] == "all 2 samples would be the same; expected a temperature above 0, not 0"
    assert convert(str(tmp_path / "out"), str(tmp_path / "out.jsonl"), {}, explode=True) == 6
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    each = [(row, n, sample) for row in rows for n, sample in enumerate(row["samples"] or [None])]
    for made, (row, number, sample) in zip(found, each, strict=True):
        numbered = {"sample": number, "sample_seed": sample["seed"]} if sample else dict.fromkeys(NUMBERED)
        own = {name: value for name, value in (sample or {}).items() if name != "seed"}
        assert made == {n: v for n, v in row.items() if n != "samples"} | own | numbered
    by = str(tmp_path / "by")
    assert partition(str(tmp_path / "out"), by, {}, ["sample"], ["id", "completion"], explode=True) == 6
    assert ds.dataset(by, partitioning="hive", exclude_invalid_files=True).count_rows() == 6
    run(pair, given, tmp_path / "plain", id_column=None, **HOT)
    with pytest.raises(JobError, match="no column 'samples'; expected the output of a job with --n"):
        convert(str(tmp_path / "plain"), str(tmp_path / "plain.jsonl"), {}, explode=True)


def test_samples_of_labels(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    target = (jobs.with_end_token(pair[0], tmp_path / "target"), None)
    plain = jobs.job(target, source, tmp_path / "out", n=4, temperature=2.0, max_new_tokens_column=None, method="plain")
    job = LabelJob(**plain.model_dump(exclude_unset=True), labels=["w10", "w11 w12"])
    assert execute(prepare(job)) == 0
    labels = [[sample["label"] for sample in row["samples"]] for row in rows_of(tmp_path / "out")]
    assert {len(drawn) for drawn in labels} == {4}
    assert {*chain(*labels)} == set(job.labels)
    assert any(len(set(drawn)) == 2 for drawn in labels)
    assert audit(str(tmp_path / "out"), {}, 64, None, 0, False, {}) == 0
    with pytest.raises(JobError, match="'seed' is a column of the output or of its samples"):
        prepare(job.model_copy(update={"label_column": "seed"}))
    with pytest.raises(JobError, match="n and best_of need a temperature above 0"):
        prepare(jobs.job(target, source, tmp_path / "none", n=4, model_sampling=True, method="plain"))
    lengths = jobs.report(tmp_path / "out")["completion_length"]
    assert lengths["longest"] <= 3, "a sample is a completion"


def test_batch_requests_ask_for_samples(pair: jobs.Pair, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": "w1 w2", "n": 3, "temperature": 1}, {"prompt": "w1"}]
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body | {"max_tokens": 5}}
        | {"samples": "mine", "logprobs": "mine"}
        for i, body in enumerate(bodies)
    ]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own: dict[str, Any] = {"id_column": None, "max_new_tokens_column": None, "chat": False}
    assert execute(prepare(jobs.job(pair, tmp_path / "batch.jsonl", tmp_path / "out", n=1, **own))) == 0
    assert convert(str(tmp_path / "out"), str(tmp_path / "out.jsonl"), {}) == 2
    found = [json.loads(line)["response"]["body"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [[choice["index"] for choice in body["choices"]] for body in found] == [[0, 1, 2], [0]]
    own["carry"] = ["url", "samples", "logprobs"]
    assert execute(prepare(jobs.job(pair, tmp_path / "batch.jsonl", tmp_path / "one", **own))) == 0
    assert "the setting n turns lists of samples on" in rows_of(tmp_path / "one")[0]["error"]
    assert convert(str(tmp_path / "one"), str(tmp_path / "one.jsonl"), {}) == 2
    line = json.loads((tmp_path / "one.jsonl").read_text().splitlines()[1])
    assert line["response"]["body"]["choices"] == found[1]["choices"]
    for settings in ({"n": 2}, {"best_of": 2}):
        with pytest.raises(JobError, match="set n to 1, and leave best_of out"):
            prepare(jobs.job(pair, tmp_path / "batch.jsonl", tmp_path / "not", temperature=1.0, **settings, **own))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 2}, "n and best_of need a temperature above 0"),
        ({"best_of": 2}, "n and best_of need a temperature above 0"),
        ({"n": 3, "best_of": 2, "temperature": 1}, "expected n up to best_of"),
        ({"n_column": "x", "best_of": 2, "temperature": 1}, "expected n up to best_of, and no n_column"),
        ({"n": 2000, "temperature": 1}, "n: "),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as error:
        load_job(Job, None, {"target": "t", "input": "in", "output": "out", **settings})
    assert message in str(error.value)
