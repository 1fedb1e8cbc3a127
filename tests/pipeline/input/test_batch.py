"""Requests in the format of OpenAI's batch API, and the responses."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from exspec.jobs.commands.convert import convert
from exspec.jobs.demo import TARGET
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Shard
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.rows import RowError
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.job.settings import Job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.pipeline import jobs

SHARD = Shard("a.jsonl", "a.jsonl", 9, 9, "")
SCHEMA = pa.schema({name: pa.string() for name in ("custom_id", "method", "url", "body")})


def prompts(**settings: Any) -> Prompts:
    job = Job(target="t", draft="d", input="in", output="out", **settings)
    return Prompts(job, AutoTokenizer.from_pretrained(TARGET), SCHEMA)


def row(**body: Any) -> dict[str, Any]:
    return {"body": json.dumps(body)}


def test_a_chat_call_becomes_a_request() -> None:
    made = prompts(max_new_tokens=9, top_p=0.5)
    assert made.columns(SCHEMA) == ["method", "url", "body"]
    messages = [{"role": "user", "content": "Hi"}]
    plain = made.request(row(model="m", messages=messages), SHARD, 0)
    assert made.text(row(messages=messages)) == "<|message|>Hi<|record|>"
    assert (plain.max_new_tokens, plain.sampling.temperature, plain.sampling.top_p) == (9, 0.0, 0.5)
    body = {
        "max_tokens": 3,
        "temperature": 0.5,
        "seed": 7,
        "top_p": 0.9,
        "presence_penalty": 1.0,
        "stop": ["x"],
        "n": 1,
    }
    own = made.request(row(messages=messages, **body), SHARD, 0)
    assert (own.max_new_tokens, own.sampling.temperature, own.sampling.seed) == (3, 0.5, 7)
    assert (own.sampling.top_p, own.sampling.presence_penalty, own.stop is not None) == (0.9, 1.0, True)
    assert made.request(row(messages=messages, max_completion_tokens=4), SHARD, 0).max_new_tokens == 4
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    assert made.tokens(row(messages=parts)) == plain.prompt
    assert prompts(chat=False).text(row(prompt="Hi")) == "Hi"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "body: not JSON"),
        ("[]", "body: expected an object, not list"),
        ("{}", "body: expected either messages or prompt"),
        ('{"prompt": [1, 2]}', "body.prompt: expected text, not list"),
        ('{"messages": "Hi"}', 'body.messages: expected a list of messages with role and content, not "Hi"'),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            'content.0.type: expected "text", not "image_url"',
        ),
        ('{"prompt": "x", "n": 2}', "body.n: the job keeps one sample; the setting n turns lists of samples on"),
        (
            '{"prompt": "x", "response_format": {"type": "json_object"}}',
            'body.response_format: expected {"type": "text"}, not dict',
        ),
        ('{"prompt": "x", "temperature": -1}', "body.temperature: expected a number from 0 up, not -1"),
        ('{"prompt": "x", "top_p": 2}', "body.top_p: expected a number above 0"),
        ('{"prompt": "x", "sampling": {"foo": 1}}', "body.sampling: not supported"),
        ('{"prompt": "x", "temperature": 1' + "0" * 400 + "}", "body.temperature: expected a number from 0 up"),
        (
            '{"prompt": "x", "presence_penalty": 1' + "0" * 400 + "}",
            "body.presence_penalty: expected a number from -100 to 100",
        ),
        ('{"prompt": "x", "stop": ["\\ud800"]}', "body.stop: expected text, or a list of texts, none of them empty"),
        ("[" * 100_000, "body: not JSON"),
    ],
)
def test_an_unsupported_request_is_the_rows_error(body: str, message: str) -> None:
    with pytest.raises(RowError, match=message):
        prompts().request({"body": body}, SHARD, 0)


@pytest.mark.parametrize("name", ["temperature_column", "stop_column", "seed_column", "max_new_tokens_column"])
def test_setting_columns_are_refused(name: str) -> None:
    with pytest.raises(JobError, match=f"{name}: requests of the batch API have their own settings"):
        prompts(**{name: "url"})


def test_labels_ignore_max_tokens() -> None:
    job = LabelJob(target="t", draft="d", input="in", output="out", labels=["yes", "no"])  # type: ignore[call-arg]
    made = Prompts(job, AutoTokenizer.from_pretrained(TARGET), SCHEMA)
    assert made.request(row(prompt="x", max_tokens=1), SHARD, 0).max_new_tokens == made.answers.longest
    with pytest.raises(RowError, match="stop does not apply to labels"):
        made.request(row(prompt="x", stop="y"), SHARD, 0)


def test_a_batch_file_in_and_a_batch_file_out(pair: jobs.Pair, tmp_path: Path) -> None:
    call = {"method": "POST", "url": "/v1/completions"}
    lines = [
        {"custom_id": f"r{i}", **call, "body": {"prompt": text, "max_tokens": 1 + i}}
        for i, text in enumerate(["w1 w2", "w3", None, "w4 w5 w6"])
    ]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = jobs.job(pair, tmp_path / "batch.jsonl", tmp_path / "out", id_column=None, max_new_tokens_column=None)
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    assert convert(str(tmp_path / "out"), str(tmp_path / "out.jsonl"), {}) == 4
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["r0", "r1", "r2", "r3"]
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200, 400, 200]
    assert answers[2]["response"]["body"]["error"]["message"] == "body: expected either messages or prompt"
    for i in (0, 1, 3):
        body = answers[i]["response"]["body"]
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"]
        assert body["usage"]["completion_tokens"] <= 1 + i
