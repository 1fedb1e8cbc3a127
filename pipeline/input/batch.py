"""Requests in the format of OpenAI's batch API: `custom_id`, `method`, `url` and the `body` of a call."""

import json
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, create_model

from exspec.actors.engine.request import HIGHEST, LARGEST, LARGEST_INT, MOST_LIKELY, SMALLEST
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.rows import RowError, are_texts, values
from exspec.pipeline.job.settings import MOST_SAMPLES, SHARED, Job

BODY, ID, METHOD, URL, MODEL = "body", "custom_id", "method", "url", "requested_model"
ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}  # with the field that each needs
# The column settings of a job, with the columns in which `fields` returns their values.
COLUMNS = {
    "max_new_tokens_column": "max_tokens",
    "temperature_column": "temperature",
    "seed_column": "seed",
    "stop_column": "stop",
    "logprobs_column": "logprobs",
    "n_column": "n",
    "adapter_column": "model",
}
# Fields that change no token; and fields that are accepted with the value that asks for nothing.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
HARMLESS: dict[str, Any] = {
    "best_of": 1, "stream": False, "echo": False, "tools": [],
    "tool_choice": "none", "functions": [], "function_call": "none", "logit_bias": {},
    "response_format": {"type": "text"},
}  # fmt: skip


def _field(expected: str, **limits: Any) -> Any:
    return Field(None, description=expected, **limits)


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _check(good: Callable[[Any], bool]) -> AfterValidator:
    def checked(value: Any) -> Any:
        if not good(value):
            raise ValueError
        return value

    return AfterValidator(checked)


class Part(BaseModel, strict=True):
    """A part of a message's content."""

    type: Literal["text"] = Field(description='"text"')
    text: str = Field(description="text")


class Message(BaseModel, strict=True):
    """A message of a chat. Other fields are ignored."""

    role: str = Field(description="text")
    content: Annotated[list[Part], BeforeValidator(_parts)] = Field(description="text, or a list of text parts")


class _Used(BaseModel, strict=True, extra="forbid", allow_inf_nan=False):
    model: str = _field("text", min_length=1)
    messages: list[Message] = _field("a list of messages with role and content")
    prompt: str = _field("text")
    max_tokens: int = _field("a whole number from 1 up", ge=1, le=LARGEST_INT)
    max_completion_tokens: int = _field("a whole number from 1 up", ge=1, le=LARGEST_INT)
    temperature: float = _field("a number from 0 up", ge=0, le=LARGEST)
    top_p: float = _field("a number above 0, at most 1", gt=0, le=1)
    top_k: int = _field("a whole number from 0 up", ge=0, le=LARGEST_INT)
    min_p: float = _field("a number from 0 to 1", ge=0, le=1)
    repetition_penalty: float = _field("a number above 0", ge=SMALLEST, le=LARGEST)
    presence_penalty: float = _field(f"a number from {-HIGHEST} to {HIGHEST}", ge=-HIGHEST, le=HIGHEST)
    frequency_penalty: float = _field(f"a number from {-HIGHEST} to {HIGHEST}", ge=-HIGHEST, le=HIGHEST)
    seed: int = _field("a whole number from 0 to 2**63 - 1", ge=0, lt=2**63)
    stop: Annotated[Any, _check(are_texts)] = _field("text, or a list of texts, none of them empty")
    logprobs: bool | Annotated[int, Field(ge=0, le=MOST_LIKELY)] = _field(
        f"true or false for messages, a whole number from 0 to {MOST_LIKELY} for a prompt"
    )
    n: int = _field(f"a whole number from 1 to {MOST_SAMPLES}", ge=1, le=MOST_SAMPLES)
    top_logprobs: int = _field(f"a whole number from 0 to {MOST_LIKELY}", ge=0, le=MOST_LIKELY)


def _asks_for(expected: Any, value: Any) -> bool:
    """Whether a value is the expected one, apart from keys that are null, as records of Parquet have them."""
    given = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
    return bool(given == expected)


_harmless: Any = {
    name: (Annotated[type(value), _check(partial(_asks_for, value))], _field(json.dumps(value)))
    for name, value in HARMLESS.items()
}
_ignored: Any = {name: (Any, _field("ignored")) for name in IGNORED}
# The fields that a request's body may have. A field that is null is left out.
Body = create_model("Body", __base__=_Used, **_harmless, **_ignored)
EXPECTED = {name: str(f.description) for model in (Part, Message, Body) for name, f in model.model_fields.items()}


def is_batch(job: Job, schema: pa.Schema) -> bool:
    """Whether the rows are batch requests. A prompt column or template in the job overrides this."""
    return {BODY, ID} <= set(schema.names) and job.prompt_column is None and job.prompt_template is None


def of_batch(job: Job, schema: pa.Schema, before: list[str] | None) -> Job:
    """The job with the settings for batch requests: the id column, and the columns that an answer needs are carried.

    before: the columns that an earlier run of the job carries; its input may lack method and url. Raises JobError.
    """
    if before is None and (lacking := [name for name in (METHOD, URL) if name not in schema.names]):
        raise JobError(f"input: batch requests need the column {lacking[0]!r} too; add it, or set prompt_template")
    needed = (URL, MODEL) if before is None or MODEL in before else (URL,)  # older versions carried no models
    carry = [name for name in needed if name in schema.names] if job.carry is None else job.carry
    return job.model_copy(update={"id_column": ID if job.id_column is None else job.id_column or None, "carry": carry})


def with_model(job: Job, schema: pa.Schema) -> pa.Schema:
    """The columns of the input, and for batch requests the column of the models that they name."""
    if MODEL in schema.names or not is_batch(job, schema):
        return schema
    return schema.append(pa.field(MODEL, pa.string()))


def add_model(table: pa.Table) -> pa.Table:
    """The rows with that column; it is null where a request names no model."""
    return table.append_column(MODEL, pa.array(map(_model, values(table, BODY)), pa.string()))


def _model(body: Any) -> str | None:
    try:
        name = _object(body).get("model")
        return name.encode().decode() if isinstance(name, str) else None
    except ValueError:
        return None


def _object(body: Any) -> dict[str, Any]:
    try:
        body = json.loads(body) if isinstance(body, str) else body
    except (ValueError, RecursionError) as error:
        raise RowError(f"body: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RowError(f"body: expected an object, not {type(body).__name__}")
    return body


def fields(row: dict[str, Any]) -> dict[str, Any]:
    """A request's prompt (text or messages), the values of COLUMNS, and `sampling` with the other settings.

    Raises RowError if it is not a request, or asks for something unsupported.
    """
    if row.get(METHOD, "POST") != "POST":
        raise RowError(f"method: expected POST, not {_shown(row[METHOD])}")
    if URL in row and row[URL] not in list(ENDPOINTS):
        raise RowError(f"url: expected {' or '.join(ENDPOINTS)}, not {_shown(row[URL])}")
    given = {name: value for name, value in _object(row[BODY]).items() if value is not None}
    try:
        Body.model_validate(given)
    except ValidationError as error:
        raise RowError(_problem(error.errors(include_url=False, include_context=False)[0])) from error
    named = [name for name in ENDPOINTS.values() if name in given]
    if len(named) != 1:
        raise RowError("body: expected either messages or prompt")
    if URL in row and named != [ENDPOINTS[row[URL]]]:
        raise RowError(f"body: expected {ENDPOINTS[row[URL]]} for {row[URL]}, not {named[0]}")
    found: dict[str, Any] = {name: given.get(name) for name in COLUMNS.values()}
    found["max_tokens"] = given.get("max_tokens", given.get("max_completion_tokens"))
    found["sampling"] = {name: given[name] for name in SHARED if name in given}
    found["logprobs"] = _logprobs(given)
    messages = [
        message | {"content": "".join(part["text"] for part in _parts(message["content"]))}
        for message in given.get("messages", [])
    ]
    return found | {"prompt": given.get("prompt") or messages}


def _logprobs(given: dict[str, Any]) -> int | None:
    """How many of the likeliest tokens a body asks for; None if it asks for no log-probabilities. Raises RowError."""
    asked = given.get("logprobs", False)
    if asked is not False and isinstance(asked, bool) != ("messages" in given):
        raise RowError(f"body.logprobs: expected {EXPECTED['logprobs']}, not {_shown(asked)}")
    most = int(given.get("top_logprobs", 0))
    if most and asked is not True:
        raise RowError("body.top_logprobs: needs logprobs: true")
    return most if asked is True else None if asked is False else int(asked)


def _problem(error: Any) -> str:
    """The sentence for an error of pydantic."""
    place = ".".join(str(key)[:80] for key in (BODY, *error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{place}: not supported; leave it out"
    expected = next((EXPECTED[name] for name in reversed(error["loc"]) if name in EXPECTED), "names of text")
    if error["type"] == "missing":
        return f"{place}: is missing; expected {expected}"
    return f"{place}: expected {expected}, not {_shown(error['input'])}"


def _shown(value: Any) -> str:
    return json.dumps(value)[:80] if isinstance(value, str | int | float | None) else type(value).__name__


def answer(row: dict[str, Any], model: str, created: int) -> dict[str, Any]:
    """A row of an output as a response line of the batch API. model: for rows without one. created: in seconds."""
    name = f"{row['shard']}:{row['row']}"
    shared = {"id": f"batch_req_{name}", ID: row["id"]}
    if row["error"] is not None:
        failed = {"message": row["error"], "type": "invalid_request_error", "param": None, "code": None}
        response = {"status_code": 400, "request_id": name, "body": {"error": failed}}
        return shared | {"response": response, "error": None}
    chat = "chat" in str(row.get(URL) or "chat")
    samples = [sample for sample in row.get("samples") or [row] if sample["error"] is None]
    usage = {"prompt_tokens": row["prompt_tokens"], "completion_tokens": row["completion_tokens"]}
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": row.get(MODEL) or model,
        "choices": [_choice(i, sample, chat) for i, sample in enumerate(samples)],
        "usage": usage | {"total_tokens": sum(usage.values())},
    }
    return shared | {"response": {"status_code": 200, "request_id": name, "body": body}, "error": None}


def _choice(number: int, row: dict[str, Any], chat: bool) -> dict[str, Any]:
    text = row["completion"]
    content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    logprobs = None if row.get("logprobs") is None else (_chat_logprobs if chat else _completion_logprobs)(row)
    return {"index": number, **content, "logprobs": logprobs, "finish_reason": row["finish_reason"]}


def _chat_logprobs(row: dict[str, Any]) -> dict[str, Any]:
    def described(token: str, logprob: float) -> dict[str, Any]:
        part = "\ufffd" in token  # of a character
        return {"token": token, "logprob": logprob, "bytes": None if part else list(token.encode())}

    found = zip(row["tokens"], row["logprobs"], row["top_logprobs"], strict=True)
    content = [
        described(token, logprob) | {"top_logprobs": [described(one["token"], one["logprob"]) for one in likeliest]}
        for token, logprob, likeliest in found
    ]
    return {"content": content}


def _completion_logprobs(row: dict[str, Any]) -> dict[str, Any]:
    offsets = list(accumulate(map(len, row["tokens"]), initial=0))[:-1]
    likeliest = [{one["token"]: one["logprob"] for one in tokens} for tokens in row["top_logprobs"]]
    return {
        "tokens": row["tokens"], "token_logprobs": row["logprobs"], "top_logprobs": likeliest, "text_offset": offsets
    }  # fmt: skip
