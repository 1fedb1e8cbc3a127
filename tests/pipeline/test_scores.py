"""Jobs that score given completions."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from exspec.jobs.commands.audit import audit
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.scores import ScoreJob
from exspec.pipeline.job.settings import load_job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests import tiny
from tests.jobs.calls import call, rows_of
from tests.pipeline import jobs
from tests.pipeline.test_logprobs import NAMES, run

SHAPE = {"batch_size": 4, "draft_tokens": 3, "window": 8}


def score(target: str, source: Path, output: Path, **settings: Any) -> list[dict[str, Any]]:
    job = ScoreJob(
        target=target, input=[str(source)], output=str(output), prompt_column="prompt", chat=False, **settings
    )
    assert execute(prepare(job)) == 0
    return rows_of(output)


def table(folder: Path, **columns: list[Any]) -> Path:
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "0.parquet")
    return folder


def test_the_score_of_a_completion_is_that_of_the_job_that_wrote_it(
    pair: jobs.Pair, source: Path, tmp_path: Path
) -> None:
    """Bit by bit in one shape, from token ids: a text may be written in other tokens, and has no end."""
    settings = {"logprobs": 2, "temperature": 0.8, "method": "exspec", "drafter": "model", **SHAPE}
    written = [row for row in run(pair, source, tmp_path / "out", **settings) if row["completion_tokens"]]
    table(tmp_path / "given", **{name: [row[name] for row in written] for name in ("prompt", "token_ids")})
    own: dict[str, Any] = {"temperature": 0.8, "logprobs": 2, **SHAPE}
    found = score(pair[0], tmp_path / "given", tmp_path / "scores", completion_column="token_ids", **own)
    for row, before in zip(found, written, strict=True):
        assert {name: row[name] for name in NAMES} == {name: before[name] for name in NAMES}
        assert row["mean_logprob"] == pytest.approx(row["cumulative_logprob"] / row["completion_tokens"])
        assert row["perplexity"] == pytest.approx(math.exp(-row["mean_logprob"]))
        assert len(row["ranks"]) == row["completion_tokens"]
        assert row["rounds"] == -(-row["completion_tokens"] // 4)
        assert all(rank > 1 or top[0]["token"] == token for rank, top, token in zip(
            row["ranks"], row["top_logprobs"], row["tokens"], strict=True
        ))  # fmt: skip
    assert audit(str(tmp_path / "scores"), {}, 64, None, 0, True, {}) == 0


@pytest.mark.parametrize("rows", [20, 1000])
def test_a_round_scores_a_whole_completion(rows: int, pair: jobs.Pair, tmp_path: Path) -> None:
    """Whether the job is calibrated or not."""
    texts = ["w1 " * (1 + n % 13) for n in range(rows)]
    source = table(tmp_path / "in", prompt=["w2"] * rows, answer=texts)
    found = score(pair[0], source, tmp_path / "out", completion_column="answer", tune_seconds=5)
    assert {row["rounds"] for row in found} == {1}
    assert sum(jobs.report(tmp_path / "out")["answers"]["mean_logprob"]["histogram"]) == rows
    shape = json.loads((tmp_path / "out" / "_job.json").read_text())["shape"]
    assert (shape["columns"], shape["batch_size"]) == (16, 32)


def test_a_round_is_no_wider_than_its_rows_may_be(pair: jobs.Pair, tmp_path: Path) -> None:
    source = table(tmp_path / "in", prompt=["w2"] * 4, answer=["w1 " * 15] * 4)
    for name, size in (("bucket", 12), ("capacity", 20)):
        found = score(pair[0], source, tmp_path / name, completion_column="answer", **{name: size})
        assert [row["error"] for row in found] == [None] * 4
        assert {row["rounds"] for row in found} == {2 if name == "bucket" else 1}


def test_nothing_is_learned_from_scores(pair: jobs.Pair, tmp_path: Path) -> None:
    source = table(tmp_path / "in", prompt=["w2"] * 4, answer=["w1 w3"] * 4)
    score(pair[0], source, tmp_path / "out", completion_column="answer")
    with pytest.raises(JobError, match="has given completions, samples, thinking, or adapters by row"):
        call("train", tmp_path / "out", tmp_path / "head", "--drafter", "model", "--minutes", "0.1")


def test_the_likeliest_choice(pair: jobs.Pair, tmp_path: Path) -> None:
    """Of the job or of a column, by sum or by mean."""
    target: Any = tiny.model()
    choices = ["w7", "w8 w9 w10", "w11 w12"]
    prompts = [jobs.prompt(n) for n in range(6)]
    texts = [" ".join(jobs.WORDS[t] for t in prompt) for prompt in prompts]
    source = table(tmp_path / "in", prompt=texts, among=[choices] * 6)
    for by in ("sum", "mean"):
        found = score(pair[0], source, tmp_path / by, choices=choices, choose_by=by)
        other = score(pair[0], source, tmp_path / f"{by}-column", choices_column="among", choose_by=by)
        for row, same, prompt in zip(found, other, prompts, strict=True):
            assert row["choice_logprobs"] == same["choice_logprobs"]
            tokens = [[jobs.WORDS.index(word) for word in choice.split()] for choice in choices]
            with torch.no_grad():
                rows = [
                    target(torch.tensor([[*prompt, *t]])).logits[0].log_softmax(-1)[len(prompt) - 1 :] for t in tokens
                ]
            sums = [float(sum(r[i, t] for i, t in enumerate(ts))) for r, ts in zip(rows, tokens, strict=True)]
            assert row["choice_logprobs"] == pytest.approx(sums, abs=1e-3)
            compared = sums if by == "sum" else [s / len(t) for s, t in zip(sums, tokens, strict=True)]
            best = max(range(3), key=compared.__getitem__)
            assert (row["choice"], row["completion"]) == (best, choices[best])
            assert row["choice_probability"] == pytest.approx(float(torch.tensor(compared).softmax(0)[best]), abs=1e-3)
        assert audit(str(tmp_path / by), {}, 64, None, 0, True, {}) == 0


def test_prompts_have_scores_if_asked(pair: jobs.Pair, tmp_path: Path) -> None:
    source = table(tmp_path / "in", prompt=["w1 w2 w3", "w4"], answer=["w5 w6", "w7"])
    found = score(pair[0], source, tmp_path / "out", completion_column="answer", prompt_logprobs=True)
    assert [len(row["prompt_logprobs"]) for row in found] == [3, 1] == [row["prompt_tokens"] for row in found]
    assert [row["prompt_logprobs"][0] for row in found] == [None, None]
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = tiny.model()(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert found[0]["prompt_logprobs"][1:] == pytest.approx(before.tolist(), abs=1e-4)
    assert [row["completion"] for row in found] == ["w5 w6", "w7"]
    assert [len(row["logprobs"]) for row in found] == [2, 1] == [row["completion_tokens"] for row in found]


def test_a_bad_row_costs_itself(pair: jobs.Pair, tmp_path: Path) -> None:
    answers = [["w1"], ["w1", None], ["w1", ""], None, ["w1", "w2"]]
    source = table(tmp_path / "in", prompt=["w1"] * 5, among=answers)
    found = score(pair[0], source, tmp_path / "out", choices_column="among")
    errors = [row["error"] for row in found]
    assert errors[4] is None
    assert errors[1] == "column 'among': expected a non-empty text or list of token ids, not null"
    assert errors[2] == "column 'among': expected a non-empty text or list of token ids, not ''"
    assert errors[3] == "column 'among': expected a list of choices, not null"
    long = table(tmp_path / "long", prompt=["w1 w2"] * 2, answer=[" ".join(["w3"] * n) for n in (63, 5)])
    found = score(pair[0], long, tmp_path / "long-out", completion_column="answer")
    assert "do not fit the context of 64" in found[0]["error"]
    assert found[1]["error"] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected one of completion_column, choices and choices_column, not none"),
        ({"choices": ["a"]}, "choices: expected two or more distinct texts"),
        ({"choices": ["a", "b"], "prompt_logprobs": True}, "prompt_logprobs needs completion_column"),
        ({"completion_column": "x", "stop": ["."]}, "stop does not apply to a scoring job"),
        ({"completion_column": "x", "choose_by": "mean"}, "choose_by needs choices"),
        ({"completion_column": "x", "draft_from": 9}, "draft_from does not apply to a scoring job"),
        ({"completion_column": "x", "max_new_tokens": 5}, "max_new_tokens does not apply to a scoring job"),
        ({"completion_column": "x", "drafter": "suffix"}, "method and drafter do not apply"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as error:
        load_job(ScoreJob, None, {"target": "t", "input": "in", "output": "out", **settings})
    assert message in str(error.value)
