"""Requests in the format of OpenAI's batch API: `custom_id`, `method`, `url` and the `body` of a call."""

import json
from typing import Any

import pyarrow as pa

from exspec.pipeline.input.rows import RowError
from exspec.pipeline.job.settings import SHARED, Job

BODY, ID, URL = "body", "custom_id", "url"
# The column settings of a job, with the columns in which `fields` returns their values.
COLUMNS = {
    "max_new_tokens_column": "max_tokens",
    "temperature_column": "temperature",
    "seed_column": "seed",
    "stop_column": "stop",
}
# Fields that change no token; and fields that are accepted with the values that mean no change.
IGNORED = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "echo": (False,),
    "best_of": (1,),
    "tools": ([],),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}


def is_batch(job: Job, schema: pa.Schema) -> bool:
    """Whether the rows are batch requests. A prompt column or template in the job overrides this."""
    return {BODY, ID} <= set(schema.names) and job.prompt_column is None and job.prompt_template is None


def of_batch(job: Job, schema: pa.Schema) -> Job:
    """The job with the settings for batch requests: the id column, and of the columns only the URL is carried."""
    carry = [name for name in schema.names if name == URL] if job.carry is None else job.carry
    return job.model_copy(update={"id_column": ID if job.id_column is None else job.id_column or None, "carry": carry})


def fields(row: dict[str, Any]) -> dict[str, Any]:
    """A request's prompt (text or messages), the values of COLUMNS, and `sampling` with the other settings.

    Raises RowError if it is not a request, or asks for something unsupported.
    """
    body = row[BODY]
    try:
        body = json.loads(body) if isinstance(body, str) else body
    except (ValueError, RecursionError) as error:
        raise RowError(f"body: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RowError(f"body: expected an object, not {type(body).__name__}")
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    found: dict[str, Any] = {"prompt": _prompt(given), "sampling": {}} | dict.fromkeys(COLUMNS.values())
    longest = given.pop("max_completion_tokens", None)
    found["max_tokens"] = given.pop("max_tokens", longest)
    for name, value in given.items():
        if name in COLUMNS.values():
            found[name] = value
        elif name in SHARED:
            found["sampling"][name] = value
        elif value not in HARMLESS.get(name, ()):
            raise RowError(f"body.{name}: not supported; leave it out")
    return found


def _prompt(given: dict[str, Any]) -> Any:
    prompt, messages = given.pop("prompt", None), given.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise RowError("body: expected either messages or prompt")
    if messages is None:
        if not isinstance(prompt, str):
            raise RowError(f"body.prompt: expected text, not {type(prompt).__name__}")
        return prompt
    if not isinstance(messages, list):
        raise RowError(f"body.messages: expected a list, not {type(messages).__name__}")
    return [_flat(message) for message in messages]


def _flat(message: Any) -> Any:
    """A message with content parts, joined to one text."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    if bad := [part for part in parts if not (isinstance(part, dict) and part.get("type") == "text")]:
        kind = bad[0].get("type") if isinstance(bad[0], dict) else bad[0]
        raise RowError(f"body.messages: expected text parts, not {kind!r}")
    return message | {"content": "".join(str(part.get("text", "")) for part in parts)}


def answer(row: dict[str, Any], model: str, created: int) -> dict[str, Any]:
    """A row of an output as a response line of the batch API. created: in seconds."""
    name = f"{row['shard']}:{row['row']}"
    shared = {"id": f"batch_req_{name}", ID: row["id"]}
    if row["error"] is not None:
        failed = {"message": row["error"], "type": "invalid_request_error", "param": None, "code": None}
        response = {"status_code": 400, "request_id": name, "body": {"error": failed}}
        return shared | {"response": response, "error": None}
    chat = "chat" in str(row.get(URL) or "chat")
    content = {"message": {"role": "assistant", "content": row["completion"]}} if chat else {"text": row["completion"]}
    usage = {"prompt_tokens": row["prompt_tokens"], "completion_tokens": row["completion_tokens"]}
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": row["finish_reason"]}],
        "usage": usage | {"total_tokens": sum(usage.values())},
    }
    return shared | {"response": {"status_code": 200, "request_id": name, "body": body}, "error": None}
