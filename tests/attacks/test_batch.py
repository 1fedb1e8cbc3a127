"""Odd requests of the batch API: each is decoded as it asks, or refused in one sentence."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from exspec.actors.engine import Request
from exspec.jobs.commands.convert import convert
from exspec.jobs.demo import TARGET
from exspec.pipeline.errors import JobError
from exspec.pipeline.input import batch
from exspec.pipeline.input.plan import Shard
from exspec.pipeline.input.prompts import Prompts
from exspec.pipeline.input.rows import RowError
from exspec.pipeline.job.settings import SHARED, Job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.pipeline import jobs

SHARD = Shard("a.jsonl", "a.jsonl", 9, 9, "")
SCHEMA = pa.schema({name: pa.string() for name in ("custom_id", "method", "url", "body")})
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
PROMPTS = Prompts(Job(target="t", draft="d", input=["in"], output="out"), AutoTokenizer.from_pretrained(TARGET), SCHEMA)


def request(body: Any, method: Any = "POST", url: Any = CHAT) -> Request:
    row = {"method": method, "url": url, "body": body if isinstance(body, str) else json.dumps(body)}
    return PROMPTS.request(row, SHARD, 0)


# What is changed in a chat request; and the reason, or None if it is decoded.
BODIES: list[tuple[dict[str, Any], str | None]] = [
    (
        {"max_completion_tokens": "zz", "max_tokens": 3},
        'body.max_completion_tokens: expected a whole number from 1 up, not "zz"',
    ),
    ({"max_completion_tokens": -3, "max_tokens": 3}, "not -3"),
    ({"max_completion_tokens": 5}, None),
    ({"max_tokens": 0}, "body.max_tokens: expected a whole number from 1 up, not 0"),
    ({"max_tokens": 3.0}, "body.max_tokens: expected a whole number from 1 up, not 3.0"),
    ({"max_tokens": 2**31}, "not 2147483648"),
    ({"max_tokens": None}, None),
    ({"top_p": True}, "body.top_p: expected a number above 0, at most 1, not true"),
    ({"top_p": "0.5"}, 'body.top_p: expected a number above 0, at most 1, not "0.5"'),
    ({"top_p": 0}, "body.top_p: expected a number above 0, at most 1, not 0"),
    ({"top_p": 1}, None),
    ({"top_k": True}, "body.top_k: expected a whole number from 0 up, not true"),
    ({"top_k": 3.5}, "not 3.5"),
    ({"min_p": 2}, "body.min_p: expected a number from 0 to 1, not 2"),
    ({"temperature": True}, "body.temperature: expected a number from 0 up, not true"),
    ({"temperature": "0.5"}, 'body.temperature: expected a number from 0 up, not "0.5"'),
    ({"temperature": float("nan")}, "not NaN"),
    ({"temperature": float("inf")}, "not Infinity"),
    ({"temperature": [0.5]}, "body.temperature: expected a number from 0 up, not list"),
    ({"temperature": 1}, None),
    ({"presence_penalty": -101}, "body.presence_penalty: expected a number from -100 to 100, not -101"),
    ({"seed": True}, "body.seed: expected a whole number from 0 to 2**63 - 1, not true"),
    ({"seed": "7"}, 'not "7"'),
    ({"stop": ""}, "body.stop: expected text, or a list of texts, none of them empty"),
    ({"stop": ["a", 5]}, "body.stop: expected text, or a list of texts, none of them empty, not list"),
    ({"stop": "x"}, None),
    ({"stop": []}, None),
    ({"n": True}, "body.n: expected a whole number from 1 to 1024, not true"),
    ({"n": 2}, "body.n: the job keeps one sample; the setting n turns lists of samples on"),
    ({"n": 1.0}, "body.n: expected a whole number from 1 to 1024, not 1.0"),
    ({"n": 1}, None),
    ({"tool_choice": "none"}, None),
    ({"tool_choice": "required"}, 'body.tool_choice: expected "none", not "required"'),
    ({"parallel_tool_calls": False}, None),
    ({"top_logprobs": 0}, None),
    ({"top_logprobs": 3}, "body.top_logprobs: needs logprobs: true"),
    ({"top_logprobs": 21, "logprobs": True}, "body.top_logprobs: expected a whole number from 0 to 20, not 21"),
    ({"top_logprobs": False}, "body.top_logprobs: expected a whole number from 0 to 20, not false"),
    ({"logprobs": False}, None),
    ({"logprobs": 0}, "body.logprobs: expected true or false for messages, a whole number from 0 to 20 for a prompt"),
    ({"logprobs": True}, "body.logprobs: the job keeps no log-probabilities; the setting logprobs turns them on"),
    ({"functions": []}, None),
    ({"functions": [{}]}, "body.functions: expected [], not list"),
    ({"tools": [], "logit_bias": {}}, None),
    ({"logit_bias": {"50256": -100}}, "body.logit_bias: expected {}, not dict"),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, 'body.response_format: expected {"type": "text"}, not dict'),
    ({"stream": False}, None),
    ({"stream": True}, "body.stream: expected false, not true"),
    ({"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"}, None),
    ({"model": "gpt"}, None),
    ({"model": 5}, "body.model: expected text, not 5"),
    ({"model": "\ud800"}, 'body.model: expected text, not "\\ud800"'),
    ({"reasoning_effort": "high"}, "body.reasoning_effort: not supported; leave it out"),
    ({"\ud800": 1}, "body: expected names of text, not "),
    ({"": 1}, "body.: not supported; leave it out"),
    ({"prompt": "x"}, "body: expected either messages or prompt"),
    ({"messages": None}, "body: expected either messages or prompt"),
    ({"messages": None, "prompt": "x"}, "body: expected messages for /v1/chat/completions, not prompt"),
    ({"messages": "Hi"}, 'body.messages: expected a list of messages with role and content, not "Hi"'),
    ({"messages": {}}, "body.messages: expected a list of messages with role and content, not dict"),
    ({"messages": []}, "the prompt is empty"),
    ({"messages": ["Hi"]}, 'body.messages.0: expected a list of messages with role and content, not "Hi"'),
    (
        {"messages": [*HI, {"role": "user"}]},
        "body.messages.1.content: is missing; expected text, or a list of text parts",
    ),
    ({"messages": [{"content": "Hi"}]}, "body.messages.0.role: is missing; expected text"),
    ({"messages": [{"role": 5, "content": "Hi"}]}, "body.messages.0.role: expected text, not 5"),
    ({"messages": [{"role": "user", "content": None}]}, "body.messages.0.content: expected text, or a list of text p"),
    ({"messages": [{"role": "user", "content": "Hi", "name": "Ann"}]}, None),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}]}, None),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "body.messages.0.content.0.text: expected text, not null",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "body.messages.0.content.0.text: is missing; expected text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        'body.messages.0.content.0.type: expected "text", not "image_url"',
    ),
    (
        {"messages": [{"role": "user", "content": ["Hi"]}]},
        "body.messages.0.content.0: expected text, or a list of text",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), BODIES, ids=[repr(changes)[:80] for changes, _ in BODIES])
def test_a_body_is_decoded_or_refused_with_its_reason(changes: dict[str, Any], reason: str | None) -> None:
    if reason is None:
        assert request({"messages": HI} | changes).prompt == request({"messages": HI}).prompt
        return
    with pytest.raises(RowError) as refused:
        request({"messages": HI} | changes)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


CALLS: dict[str, tuple[dict[str, Any], str | None]] = {
    "a chat": ({}, None),
    "GET": ({"method": "GET"}, 'method: expected POST, not "GET"'),
    "DELETE": ({"method": "DELETE"}, 'method: expected POST, not "DELETE"'),
    "no method": ({"method": None}, "method: expected POST, not null"),
    "a method that is a list": ({"method": ["POST"]}, "method: expected POST, not list"),
    "embeddings": ({"url": "/v1/embeddings"}, f'url: expected {CHAT} or {TEXT}, not "/v1/embeddings"'),
    "a file": ({"url": "file:///etc/passwd"}, f'url: expected {CHAT} or {TEXT}, not "file:///etc/passwd"'),
    "no url": ({"url": None}, f"url: expected {CHAT} or {TEXT}, not null"),
    "a url that is a record": ({"url": {}}, f"url: expected {CHAT} or {TEXT}, not dict"),
    "messages for completions": ({"url": TEXT}, f"body: expected prompt for {TEXT}, not messages"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_decoded_or_refused_with_its_reason(call: str) -> None:
    changes, reason = CALLS[call]
    if reason is None:
        assert request({"messages": HI}, **changes).prompt
        return
    with pytest.raises(RowError) as refused:
        request({"messages": HI}, **changes)
    assert str(refused.value) == reason


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["none", "text", "\ud800", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
VALID: dict[str, st.SearchStrategy[Any]] = {
    "model": st.text(min_size=1),
    "max_tokens": st.integers(1, 2**31 - 1),
    "temperature": st.just(0) | st.floats(1e-6, 1e6),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(0, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(1e-6, 1e6),
    "presence_penalty": st.floats(-100, 100),
    "frequency_penalty": st.floats(-100, 100),
    "seed": st.integers(0, 2**63 - 1),
    "stop": st.text("abc", min_size=1) | st.lists(st.text("abc", min_size=1), max_size=3),
    **{name: st.just(value) for name, value in batch.HARMLESS.items()},
}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    body=st.fixed_dictionaries({"messages": st.just(HI)}, optional=VALID),
    name=st.sampled_from([*batch.Body.model_fields, "other"]),
    value=JSON,
)
def test_any_value_in_any_field_is_a_request_or_a_row_error(body: dict[str, Any], name: str, value: Any) -> None:
    """The valid body is decoded, and its values arrive. With another value it is refused, or that value arrives."""
    arrived(body)
    with suppress(RowError):
        arrived(body | {name: value})


@settings(max_examples=150, deadline=None, derandomize=True)
@given(content=JSON, key=st.sampled_from(["role", "content", "name", "text", "type"]), call=st.tuples(JSON, JSON))
def test_any_message_and_any_call_is_a_request_or_a_row_error(content: Any, key: str, call: tuple[Any, Any]) -> None:
    part = {"type": "text", "text": "Hi"}
    for message in (
        {"role": "user", "content": [part | {key: content}]},
        {"role": "user", "content": "Hi", key: content},
        content,
    ):
        with suppress(RowError):
            assert isinstance(request({"messages": [message]}), Request)
    with pytest.raises(RowError, match=r"^(method|url): expected"):
        request({"messages": HI}, *call)


def arrived(body: dict[str, Any]) -> None:
    """The request has the values of its body."""
    made, given = request(body), {name: value for name, value in body.items() if value is not None}
    longest = given.get("max_tokens", given.get("max_completion_tokens", PROMPTS.job.max_new_tokens))
    assert (made.max_new_tokens, made.sampling.temperature) == (longest, given.get("temperature", 0))
    shared = {name: getattr(made.sampling, name) for name in SHARED}
    assert shared == {name: given.get(name, getattr(PROMPTS.job, name)) for name in SHARED}
    assert "seed" not in given or made.sampling.seed == given["seed"]
    stop: Any = made.stop
    texts = given.get("stop") or []
    assert (stop.strings if stop else ()) == ((texts,) if isinstance(texts, str) else tuple(texts))


def lines(count: int, **call: Any) -> list[dict[str, Any]]:
    """Requests of which every third names no model."""
    call = {"method": "POST", "url": TEXT} | call
    models = [{"model": "org/name"}, {"model": "other"}, {}]
    return [
        {"custom_id": f"r{i}", **call, "body": {"prompt": f"w{i}", "max_tokens": 2, **models[i % 3]}}
        for i in range(count)
    ]


def job(pair: jobs.Pair, place: Path, **settings: Any) -> Job:
    own = {"id_column": None, "max_new_tokens_column": None} | settings
    return jobs.job(pair, place / "in", place / "out", **own)


def decoded(made: Job, **options: Any) -> int:
    return execute(prepare(made), load=jobs.ArithmeticLoader(), **options)


def answers(place: Path) -> list[dict[str, Any]]:
    convert(str(place / "out"), str(place / "out.jsonl"), {})
    return [json.loads(line) for line in (place / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("form", ["jsonl", "parquet of text", "parquet of records"])
def test_an_answer_has_the_name_of_the_model_that_was_asked_for(pair: jobs.Pair, tmp_path: Path, form: str) -> None:
    (tmp_path / "in").mkdir()
    given = lines(6)
    if form == "jsonl":
        (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
    else:
        bodies = [json.dumps(line["body"]) if form.endswith("text") else line["body"] for line in given]
        table = pa.Table.from_pylist([line | {"body": body} for line, body in zip(given, bodies, strict=True)])
        pq.write_table(table, tmp_path / "in" / "a.parquet")
    assert decoded(job(pair, tmp_path)) == 0
    given_back = [answer["response"]["body"] for answer in answers(tmp_path)]
    assert [body["model"] for body in given_back] == ["org/name", "other", pair[0]] * 2
    assert all(body["choices"][0]["text"] for body in given_back)


def test_a_file_without_methods_and_urls_is_refused_before_it_is_decoded(pair: jobs.Pair, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("url", "method"):
        given = [{key: value for key, value in line.items() if key != name} for line in lines(3)]
        (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
        with pytest.raises(JobError, match=f"input: batch requests need the column '{name}' too"):
            prepare(job(pair, tmp_path))


@pytest.mark.parametrize("missing", [(), ("method", "url")], ids=["all columns", "no method and url"])
def test_a_job_that_an_older_version_began_is_resumed_and_converted(
    pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    """Its parts lack the column of models, and its input may lack methods and urls."""
    (tmp_path / "in").mkdir()
    given = [{key: value for key, value in line.items() if key not in missing} for line in lines(24)]
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
    carry = [] if missing else ["url"]
    with monkeypatch.context() as older:
        older.setattr("exspec.pipeline.prepare.of_batch", lambda made, *_: made.model_copy(
            update={"id_column": "custom_id", "carry": carry}))  # fmt: skip
        assert decoded(job(pair, tmp_path, limit=8)) == 0
    assert decoded(job(pair, tmp_path)) == 0
    assert [answer["custom_id"] for answer in answers(tmp_path)] == [f"r{i}" for i in range(24)]
    assert {answer["response"]["body"]["model"] for answer in answers(tmp_path)} == {pair[0]}
