"""From a row to token ids: text, messages, templates; and what a row may override."""

from typing import Any

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from exspec.jobs.demo import TARGET
from exspec.pipeline.errors import JobError
from exspec.pipeline.job import Job
from exspec.pipeline.plan import Shard
from exspec.pipeline.prompts import Prompts, RowError, row_seed

SHARD = Shard("a.parquet", "a.parquet", 9, 9, "")
USER = {"role": "user", "content": "Hi"}


def prompts(schema: dict[str, pa.DataType], chat: bool = True, **settings: Any) -> Prompts:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    if not chat:
        tokenizer.chat_template = None
    job = Job(target="t", draft="d", input="in", output="out", **settings)
    return Prompts(job, tokenizer, pa.schema(schema))


MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


def test_text_is_one_user_message_where_there_is_a_chat_template() -> None:
    made = prompts({"text": pa.string()})
    assert made.text({"text": "Hi"}) == "<|message|>Hi<|record|>"
    assert prompts({"text": pa.string()}, chat=False).text({"text": "Hi"}) == "Hi"


def test_messages_go_through_the_chat_template() -> None:
    made = prompts({"messages": MESSAGES, "text": pa.string()})
    turn = {"role": "assistant", "content": "ok"}
    assert made.text({"messages": [USER, turn, USER]}) == "<|message|>Hi<|record|>ok<|end|><|message|>Hi<|record|>"
    assert made.tokens({"messages": [USER]})[0] == made.tokenizer.convert_tokens_to_ids("<|message|>")


def test_a_template_sees_the_rows_columns_and_nothing_else() -> None:
    made = prompts({"a": pa.string(), "b": pa.int64()}, prompt_template="{{ a }} costs {{ b }}")
    assert made.text({"a": "tea", "b": 3}) == "<|message|>tea costs 3<|record|>"
    with pytest.raises(RowError, match="prompt_template: UndefinedError: 'a' is undefined"):
        made.text({"b": 3})
    unsafe = prompts({"a": pa.string()}, prompt_template="{{ a.__class__.__mro__ }}")
    with pytest.raises(RowError, match="prompt_template: SecurityError"):
        unsafe.text({"a": "x"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "column 'messages' is null"),
        ([{"role": "robot", "content": "x"}], "chat template: the demo model knows the roles user and assistant only"),
        ([{"role": "user", "content": None}], "expected messages with role and content"),
        (["x"], "expected messages with role and content"),
        ([], "the prompt is empty"),
    ],
)
def test_rows_that_cannot_be_rendered(value: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        prompts({"messages": MESSAGES}).tokens({"messages": value})


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(RowError, match="the tokenizer has no chat template"):
        prompts({"messages": MESSAGES}, chat=False).text({"messages": [USER, USER]})


def test_an_input_without_a_known_column_is_refused() -> None:
    with pytest.raises(JobError, match="none of messages, prompt, message, text is in the input, which has question"):
        prompts({"question": pa.string()})


def test_a_row_overrides_what_its_columns_say() -> None:
    columns = {f"{name}_column": name for name in ("max_new_tokens", "temperature", "seed", "stop")}
    made = prompts({"prompt": pa.string()}, **columns, stop=["x"], max_new_tokens=7)
    given = {"max_new_tokens": 3, "temperature": 0.5, "seed": 11, "stop": ["a", "b"]}
    assert vars(made.settings(given, SHARD, 0)) == given
    null = dict.fromkeys(given)
    settings = made.settings(null, SHARD, 4)
    assert (settings.max_new_tokens, settings.temperature, settings.stop) == (7, 0.0, ["x"])
    assert settings.seed == row_seed(0, SHARD, 4) != row_seed(0, SHARD, 5) != row_seed(1, SHARD, 5)
    for column, value in {"max_new_tokens": 0, "temperature": -1, "seed": "x", "stop": [""]}.items():
        with pytest.raises(RowError, match=f"column '{column}': expected"):
            made.settings(null | {column: value}, SHARD, 0)
