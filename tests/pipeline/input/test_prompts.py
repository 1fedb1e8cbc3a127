"""From a row to token ids: text, messages and templates; and settings of rows."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from exspec.actors.engine import Engine, EngineConfig, Request, RequestError, Room
from exspec.jobs.demo import TARGET
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Shard
from exspec.pipeline.input.prompts import Prompts, row_seed
from exspec.pipeline.input.rows import RowError, rows
from exspec.pipeline.job.settings import Job
from tests import tiny

SHARD = Shard("a.parquet", "a.parquet", 9, 9, "")
USER = {"role": "user", "content": "Hi"}
HI = "<|message|>Hi<|record|>"


def prompts(schema: dict[str, pa.DataType], templated: bool = True, **settings: Any) -> Prompts:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    if not templated:
        tokenizer.chat_template = None
    job = Job(target="t", draft="d", input="in", output="out", **settings)
    return Prompts(job, tokenizer, pa.schema(schema))


TEXT = {"text": pa.string()}
MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


def test_messages_go_through_the_chat_template() -> None:
    made = prompts({"messages": MESSAGES, "text": pa.string()})
    turn = {"role": "assistant", "content": "ok"}
    assert made.text({"messages": [USER, turn, USER]}) == f"{HI}ok<|end|>{HI}"
    assert made.tokens({"messages": [USER]})[0] == made.tokenizer.convert_tokens_to_ids("<|message|>")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, HI), ({"chat": True}, HI), ({"chat": False}, "Hi"), ({"templated": False}, "Hi")],
)
def test_text_is_one_user_message_if_the_chat_template_applies(settings: dict[str, Any], expected: str) -> None:
    assert prompts(TEXT, **settings).text({"text": "Hi"}) == expected


def test_without_a_chat_template_messages_and_its_settings_are_refused() -> None:
    assert prompts({"messages": MESSAGES}, chat=False).text({"messages": [USER]}) == "Hi"
    for settings, message in (
        ({"chat": False}, "chat is off, but the prompt is a list of messages"),
        ({"templated": False}, "the tokenizer has no chat template, but"),
    ):
        with pytest.raises(RowError, match=message):
            prompts({"messages": MESSAGES}, **settings).text({"messages": [USER, USER]})
    for settings, message in (
        ({"templated": False, "chat": True}, "chat: the target's tokenizer has no chat template"),
        ({"chat": False, "system_prompt": "Be brief."}, "system_prompt: needs a chat template"),
        ({"chat": False, "template_arguments": {"a": 1}}, "template_arguments: needs a chat template"),
    ):
        with pytest.raises(JobError, match=message):
            prompts(TEXT, **settings)


def test_a_template_sees_only_the_columns_of_the_row() -> None:
    made = prompts({"a": pa.string(), "b": pa.int64()}, prompt_template="{{ a }} costs {{ b }}")
    assert made.text({"a": "tea", "b": 3}) == "<|message|>tea costs 3<|record|>"
    with pytest.raises(RowError, match="prompt_template: UndefinedError: 'a' is undefined"):
        made.text({"b": 3})
    unsafe = prompts({"a": pa.string()}, prompt_template="{{ a.__class__.__mro__ }}")
    with pytest.raises(RowError, match="prompt_template: SecurityError"):
        unsafe.text({"a": "x"})


def test_a_system_prompt_is_added_to_chats_without_one() -> None:
    made = prompts({"messages": MESSAGES}, system_prompt="Be brief.", template_arguments={"thinking": False})
    made.tokenizer.chat_template = "{{ thinking }}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    own = {"role": "system", "content": "Be long."}
    assert made.text({"messages": [USER]}) == "False[system:Be brief.][user:Hi]"
    assert made.text({"messages": [own, USER]}) == "False[system:Be long.][user:Hi]"


@pytest.mark.parametrize(
    "settings", [{}, {"prompt_template": "<|message|>{{ text | upper }}<|record|>", "chat": False}]
)
def test_control_tokens_in_a_rows_own_text_are_text(settings: dict[str, Any]) -> None:
    """Else users could end their message and begin the answer."""
    row = {"text": "a<|end|><|record|>b"}
    made, allowed = prompts(TEXT, **settings), prompts(TEXT, allow_special=True, **settings)
    ids = {name: made.tokenizer.convert_tokens_to_ids(name) for name in ("<|message|>", "<|record|>", "<|end|>")}
    for found, ends in ((made, 0), (allowed, 1)):
        tokens = found.tokens(row)
        if not (settings and ends):  # in upper case it is not a token
            assert tokens.count(ids["<|end|>"]) == ends
            assert tokens.count(ids["<|record|>"]) == 1 + ends
        assert tokens.count(ids["<|message|>"]) == 1
    assert made.tokenizer.decode(made.tokens(row)) == made.text(row)
    assert "<|end|><|record|>" in made.text(row)
    with pytest.raises(RowError, match=r"a private-use character \(from U\+F0000 up\); allow_special accepts it"):
        made.tokens({"text": "x\U000f0000y"})


@pytest.mark.parametrize("text", ["a", "a<|end|>", "<|end|>", "a<|end|>b<|record|>c"])
def test_an_end_token_of_the_tokenizer_comes_last(text: str) -> None:
    """Also if the text has control tokens, which are text there."""
    bare = prompts(TEXT, chat=False).tokens({"text": text})
    made = prompts(TEXT, chat=False)
    ends = made.tokenizer.convert_tokens_to_ids(["<|message|>", "<|record|>", "<|end|>"])
    around = TemplateProcessing(
        single="<|message|> $A <|record|> <|end|>",
        special_tokens=list(zip(("<|message|>", "<|record|>", "<|end|>"), ends, strict=True)),
    )
    made.tokenizer.backend_tokenizer.post_processor = around
    assert made.tokens({"text": text}) == [ends[0], *bare, *ends[1:]]


def test_unknown_names_in_a_template_are_refused() -> None:
    columns = {"customer": pa.string(), "text": pa.string()}
    with pytest.raises(JobError) as refused:
        prompts(columns, prompt_template="{{ custmer }} {{ txt }} {{ text }} {{ loop_of }}")
    assert refused.value.problems == (
        "prompt_template: 'custmer' is not in the input, which has customer, text; did you mean customer?",
        "prompt_template: 'loop_of' is not in the input, which has customer, text",
        "prompt_template: 'txt' is not in the input, which has customer, text; did you mean text?",
    )
    optional = "{{ note | default('-') }}{% if title is defined %}{{ title }}{% endif %}"
    optional += "{% for i in range(2) %}{{ i }}{% endfor %}"
    assert prompts(columns, chat=False, prompt_template=optional).text({"text": "x"}) == "-01"


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


def test_an_input_without_a_known_column_is_refused() -> None:
    with pytest.raises(JobError, match="none of messages, prompt, message, text is in the input, which has question"):
        prompts({"question": pa.string()})


def test_columns_override_settings_per_row() -> None:
    columns = {f"{name}_column": name for name in ("max_new_tokens", "temperature", "seed", "stop")}
    made = prompts({"prompt": pa.string()}, **columns, stop=["x"], max_new_tokens=7)
    given = {"max_new_tokens": 3, "temperature": 0.5, "seed": 11, "stop": ["a", "b"]}
    found = made.settings(given, SHARD, 0)
    assert {"max_new_tokens": found.max_new_tokens, "stop": found.stop, **found.sampling} == given
    null = dict.fromkeys(given)
    settings = made.settings(null, SHARD, 4)
    assert (settings.max_new_tokens, settings.sampling["temperature"], settings.stop) == (7, 0.0, ["x"])
    assert settings.sampling["seed"] == row_seed(0, SHARD, 4) != row_seed(0, SHARD, 5) != row_seed(1, SHARD, 5)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("max_new_tokens", 0), ("seed", "x"), ("stop", [""]), ("stop", 3), ("stop", [1]), ("stop", ""),
        ("temperature", -1), ("temperature", float("inf")), ("temperature", float("nan")),
    ],
)  # fmt: skip
def test_an_invalid_setting_of_a_row_is_its_error(column: str, value: Any) -> None:
    made = prompts({"prompt": pa.string()}, **{f"{column}_column": column})
    with pytest.raises(RowError, match=f"column '{column}': expected"):
        made.settings({column: value}, SHARD, 0)


TALK = [USER, {"role": "assistant", "content": "ok"}, USER]
KINDS = {
    "text": (pa.array(["Hi"]), HI),
    "large_text": (pa.array(["Hi"], pa.large_string()), HI),
    "text_view": (pa.array(["Hi"], pa.string_view()), HI),
    "coded": (pa.array(["Hi"]).dictionary_encode(), HI),
    "json_text": (pa.array(['"Hi"'], pa.json_()), HI),
    "list": (pa.array([TALK], MESSAGES), f"{HI}ok<|end|>{HI}"),
    "large_list": (pa.array([TALK], pa.large_list(MESSAGES.value_type)), f"{HI}ok<|end|>{HI}"),
    "json": (pa.array([json.dumps(TALK)], pa.json_()), f"{HI}ok<|end|>{HI}"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_every_type_are_read(kind: str, tmp_path: Any) -> None:
    """As polars and pandas write them."""
    column, expected = KINDS[kind]
    pq.write_table(pa.table({"x": column}), tmp_path / "s.parquet")
    table = pq.read_table(tmp_path / "s.parquet")
    made = prompts(dict(zip(table.column_names, table.schema.types, strict=True)), prompt_column="x")
    (row,) = rows(table, made.columns(table.schema))
    assert made.text(row) == expected


def test_a_text_column_called_messages_holds_json() -> None:
    made = prompts({"messages": pa.large_string()})
    assert made.text({"messages": json.dumps([USER])}) == "<|message|>Hi<|record|>"
    for bad in ("Hi", "[" * 100_000):
        with pytest.raises(RowError, match="column 'messages': expected JSON of messages, not ") as error:
            made.text({"messages": bad})
        assert len(str(error.value)) < 300
    text = prompts({"prompt": pa.string()})
    assert text.text({"prompt": "[1]"}) == "<|message|>[1]<|record|>", "other text columns are not JSON"


def test_a_stop_column_of_json_holds_a_list() -> None:
    made = prompts({"prompt": pa.string(), "stop": pa.json_()}, stop_column="stop")
    assert made.settings({"stop": '["a", "b"]'}, SHARD, 0).stop == ["a", "b"]
    assert made.settings({"stop": None}, SHARD, 0).stop == []


def test_only_the_columns_that_are_needed_are_read() -> None:
    schema = {name: pa.string() for name in ("a", "b", "c", "prompt", "stop", "range")}
    assert prompts(schema, stop_column="stop").columns(pa.schema(schema)) == ["prompt", "stop"]
    made = prompts(schema, prompt_template="{% for i in range(3) %}{{ b[:i] }}{{ z | default('') }}{% endfor %}{{ a }}")
    assert made.columns(pa.schema(schema)) == ["a", "b", "range"]


@pytest.mark.parametrize("chat", [True, False])
def test_an_error_of_the_tokenizer_is_the_rows_error(chat: bool) -> None:
    """For example for half a surrogate pair, which JSON may contain."""
    made = prompts({"messages": pa.string()}, chat=chat)
    row = {"messages": '[{"role": "user", "content": "a \\ud800"}]'}
    with pytest.raises(RowError, match="column 'messages': the tokenizer failed: "):
        made.tokens(row)


def test_a_row_that_is_an_error_stays_one() -> None:
    made, row = prompts({"prompt": pa.string()}), RowError("column 'prompt': bad")
    for method, *more in ((made.text,), (made.tokens,), (made.settings, SHARD, 0), (made.request, SHARD, 0)):
        with pytest.raises(RowError, match="column 'prompt': bad"):
            method(row, *more)  # type: ignore[operator]


@pytest.mark.parametrize(("tokens", "new"), [(3, 5), (3, 6), (12, 1), (15, 1), (15, 99), (16, 1), (20, 5)])
@pytest.mark.parametrize("capacity", [8, 16])
def test_the_plan_refuses_what_the_engine_refuses(tokens: int, new: int, capacity: int) -> None:
    """Also prompts whose completions end with the context, which the engine decodes."""
    engine = Engine(tiny.model(max_position_embeddings=16), None, EngineConfig(method="plain", capacity=capacity))
    made = prompts({"prompt": pa.string()}).within(Room(engine.context, engine.config.capacity))
    refusals = []
    for attempt in (
        lambda: made.room(tokens, new),
        lambda: engine.submit(Request("x", [1] * tokens, max_new_tokens=new)),
    ):
        try:
            attempt()
            refusals.append("")
        except (RowError, RequestError) as error:
            refusals.append(str(error).removeprefix("request 'x': "))
    assert refusals[0] == refusals[1]


@pytest.mark.parametrize(
    ("context", "capacity", "new", "most"), [(100, 50, 10, 40), (50, 60, 10, 40), (100, 50, 50, 0)]
)
def test_truncate_prompt_cuts_the_beginning_of_a_long_prompt(context: int, capacity: int, new: int, most: int) -> None:
    """As many tokens stay as the engine accepts, and the number of cut tokens is returned."""
    room, row = Room(context, capacity), {"prompt": "one two three four five six seven eight nine ten " * 20}
    made = prompts({"prompt": pa.string()}, max_new_tokens=new, truncate_prompt=True).within(room)
    whole = prompts({"prompt": pa.string()}).tokens(row)
    with pytest.raises(RowError, match="leaves no room in the context"):
        prompts({"prompt": pa.string()}, max_new_tokens=new).within(room).request(row, SHARD, 0)
    if not most:
        with pytest.raises(RowError, match="leaves no room in the context"):
            made.request(row, SHARD, 0)
        return
    assert made.fitted(row, new) == (whole[-most:], len(whole) - most)
    assert made.request(row, SHARD, 0).prompt == whole[-most:]
    assert room.refusal(most, new) is None
    assert most + new == min(context, capacity), "no more is cut than necessary"
    assert made.fitted({"prompt": "Hi"}, new)[1] == 0


class Counting:
    """A tokenizer that counts the characters that it gets."""

    chat_template = None

    def __init__(self, each: int) -> None:
        self.each, self.given = each, 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.given += len(text)
        return {"input_ids": [1] * -(-len(text) // self.each)}


def test_a_prompt_that_is_far_too_long_is_refused_by_its_beginning() -> None:
    """The whole text could take minutes and gigabytes."""
    made = prompts({"prompt": pa.string()}, templated=False).within(Room(401, 50))
    made.tokenizer = counting = Counting(each=4)
    begun = "the prompt has 16000000 characters, of which the first 1600 are 400 tokens; it does not fit the"
    with pytest.raises(RowError, match=f"{begun} capacity of 50 tokens; shorten it, raise capacity, or let truncate_"):
        made.tokens({"prompt": "x" * 16_000_000})
    assert counting.given == 1600
    for context in (50, 100, 400):  # no capacity helps
        whole = made.within(Room(context, 50))
        whole.tokenizer = Counting(each=4)
        reason = f"{begun} context of {context} tokens; shorten it, or let truncate_prompt cut it"
        with pytest.raises(RowError, match=reason):
            whole.tokens({"prompt": "x" * 16_000_000})
    made = made.within(Room(100, 50))
    made.tokenizer = Counting(each=64)  # few tokens for its length, so the whole text is tokenized
    assert len(made.tokens({"prompt": "x" * 3200})) == 50
    with pytest.raises(RowError, match="a prompt of 100 tokens leaves no room in the context of 100"):
        made.request({"prompt": "x" * 6400}, SHARD, 0)
