"""From a row to token ids: text, messages, templates; and what a row may override."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
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


def prompts(schema: dict[str, pa.DataType], templated: bool = True, **settings: Any) -> Prompts:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    if not templated:
        tokenizer.chat_template = None
    job = Job(target="t", draft="d", input="in", output="out", **settings)
    return Prompts(job, tokenizer, pa.schema(schema))


MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


def test_text_is_one_user_message_where_there_is_a_chat_template() -> None:
    made = prompts({"text": pa.string()})
    assert made.text({"text": "Hi"}) == "<|message|>Hi<|record|>"
    assert prompts({"text": pa.string()}, templated=False).text({"text": "Hi"}) == "Hi"


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


def test_whether_a_chat_template_wraps_the_prompt_is_a_setting() -> None:
    text = {"text": pa.string()}
    assert prompts(text, chat=False).text({"text": "Hi"}) == "Hi"
    assert prompts(text, chat=True).text({"text": "Hi"}) == "<|message|>Hi<|record|>"
    made = prompts({"messages": MESSAGES}, chat=False)
    assert made.text({"messages": [USER]}) == "Hi"
    with pytest.raises(RowError, match="chat is off, but the prompt is a list of messages"):
        made.text({"messages": [USER, USER]})
    with pytest.raises(JobError, match="chat: the target's tokenizer has no chat template"):
        prompts(text, templated=False, chat=True)
    for setting in ({"system_prompt": "Be brief."}, {"template_arguments": {"a": 1}}):
        with pytest.raises(JobError, match=f"{next(iter(setting))}: needs a chat template"):
            prompts(text, chat=False, **setting)


def test_a_system_prompt_begins_every_chat_that_has_none() -> None:
    made = prompts({"messages": MESSAGES}, system_prompt="Be brief.", template_arguments={"thinking": False})
    made.tokenizer.chat_template = "{{ thinking }}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    own = {"role": "system", "content": "Be long."}
    assert made.text({"messages": [USER]}) == "False[system:Be brief.][user:Hi]"
    assert made.text({"messages": [own, USER]}) == "False[system:Be long.][user:Hi]"


@pytest.mark.parametrize(
    "settings", [{}, {"prompt_template": "<|message|>{{ text | upper }}<|record|>", "chat": False}]
)
def test_control_tokens_in_a_rows_own_text_are_text(settings: dict[str, Any]) -> None:
    """Else a customer could end his message and begin the answer."""
    row, text = {"text": "a<|end|><|record|>b"}, {"text": pa.string()}
    made, allowed = prompts(text, **settings), prompts(text, allow_special=True, **settings)
    ids = {name: made.tokenizer.convert_tokens_to_ids(name) for name in ("<|message|>", "<|record|>", "<|end|>")}
    for found, ends in ((made, 0), (allowed, 1)):
        tokens = found.tokens(row)
        if not (settings and ends):  # in upper case it is no token any more
            assert tokens.count(ids["<|end|>"]) == ends
            assert tokens.count(ids["<|record|>"]) == 1 + ends
        assert tokens.count(ids["<|message|>"]) == 1
    assert made.tokenizer.decode(made.tokens(row)) == made.text(row)
    assert "<|end|><|record|>" in made.text(row)
    with pytest.raises(RowError, match=r"a private-use character \(from U\+F0000 up\); allow_special accepts it"):
        made.tokens({"text": "x\U000f0000y"})


def test_a_name_in_a_template_that_is_no_column_is_refused() -> None:
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


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(RowError, match="the tokenizer has no chat template"):
        prompts({"messages": MESSAGES}, templated=False).text({"messages": [USER, USER]})


def test_an_input_without_a_known_column_is_refused() -> None:
    with pytest.raises(JobError, match="none of messages, prompt, message, text is in the input, which has question"):
        prompts({"question": pa.string()})


def test_a_row_overrides_what_its_columns_say() -> None:
    columns = {f"{name}_column": name for name in ("max_new_tokens", "temperature", "seed", "stop")}
    made = prompts({"prompt": pa.string()}, **columns, stop=["x"], max_new_tokens=7)
    given = {"max_new_tokens": 3, "temperature": 0.5, "seed": 11, "stop": ["a", "b"]}
    found = made.settings(given, SHARD, 0)
    assert {"max_new_tokens": found.max_new_tokens, "stop": found.stop, **found.sampling} == given
    null = dict.fromkeys(given)
    settings = made.settings(null, SHARD, 4)
    assert (settings.max_new_tokens, settings.sampling["temperature"], settings.stop) == (7, 0.0, ["x"])
    assert settings.sampling["seed"] == row_seed(0, SHARD, 4) != row_seed(0, SHARD, 5) != row_seed(1, SHARD, 5)
    for column, value in {"max_new_tokens": 0, "temperature": -1, "seed": "x", "stop": [""]}.items():
        with pytest.raises(RowError, match=f"column '{column}': expected"):
            made.settings(null | {column: value}, SHARD, 0)


@pytest.mark.parametrize(
    ("column", "value"),
    [("stop", 3), ("stop", [1]), ("stop", ""), ("temperature", float("inf")), ("temperature", float("nan"))],
)
def test_settings_of_a_wrong_kind_are_the_rows_error(column: str, value: Any) -> None:
    """A number among the stop texts ended the job."""
    made = prompts({"prompt": pa.string()}, **{f"{column}_column": column})
    with pytest.raises(RowError, match=f"column '{column}': expected"):
        made.settings({column: value}, SHARD, 0)


TALK = [USER, {"role": "assistant", "content": "ok"}, USER]
KINDS = {
    "text": (pa.array(["Hi"]), "<|message|>Hi<|record|>"),
    "large_text": (pa.array(["Hi"], pa.large_string()), "<|message|>Hi<|record|>"),
    "text_view": (pa.array(["Hi"], pa.string_view()), "<|message|>Hi<|record|>"),
    "coded": (pa.array(["Hi"]).dictionary_encode(), "<|message|>Hi<|record|>"),
    "json_text": (pa.array(['"Hi"'], pa.json_()), "<|message|>Hi<|record|>"),
    "list": (pa.array([TALK], MESSAGES), "<|message|>Hi<|record|>ok<|end|><|message|>Hi<|record|>"),
    "large_list": (
        pa.array([TALK], pa.large_list(MESSAGES.value_type)),
        "<|message|>Hi<|record|>ok<|end|><|message|>Hi<|record|>",
    ),
    "json": (pa.array([json.dumps(TALK)], pa.json_()), "<|message|>Hi<|record|>ok<|end|><|message|>Hi<|record|>"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_every_layout_are_read(kind: str, tmp_path: Any) -> None:
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
    assert text.text({"prompt": "[1]"}) == "<|message|>[1]<|record|>", "and no other text column does"


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
def test_what_the_tokenizer_raises_is_the_rows_error(chat: bool) -> None:
    """Half a surrogate pair, as JSON may hold it, ended the job."""
    made = prompts({"messages": pa.string()}, chat=chat)
    row = {"messages": '[{"role": "user", "content": "a \\ud800"}]'}
    with pytest.raises(RowError, match="column 'messages': the tokenizer failed: "):
        made.tokens(row)


def test_a_row_that_is_an_error_stays_one() -> None:
    made, row = prompts({"prompt": pa.string()}), RowError("column 'prompt': bad")
    for read in (made.text, made.tokens):
        with pytest.raises(RowError, match="column 'prompt': bad"):
            read(row)
    for look in (made.settings, made.request):
        with pytest.raises(RowError, match="column 'prompt': bad"):
            look(row, SHARD, 0)


@pytest.mark.parametrize(("tokens", "new"), [(3, 5), (3, 6), (12, 1), (15, 1), (15, 99), (16, 1), (20, 5)])
@pytest.mark.parametrize("capacity", [8, 16])
def test_the_plan_refuses_what_the_engine_refuses(tokens: int, new: int, capacity: int) -> None:
    """It refused prompts whose completions end with the context, which the engine decodes."""
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
def test_a_prompt_that_is_too_long_loses_its_beginning_where_it_may(
    context: int, capacity: int, new: int, most: int
) -> None:
    """As many tokens stay as the engine takes; what was cut is told."""
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
    assert most + new == min(context, capacity), "no more is cut than has to be"
    assert made.fitted({"prompt": "Hi"}, new)[1] == 0


class Counting:
    """A tokenizer of characters that notes how many it was given."""

    chat_template = None

    def __init__(self, each: int) -> None:
        self.each, self.given = each, 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.given += len(text)
        return {"input_ids": [1] * -(-len(text) // self.each)}


def test_a_prompt_that_is_far_too_long_is_refused_by_its_beginning() -> None:
    """16 MB of text took 31 s and 2.9 GiB."""
    made = prompts({"prompt": pa.string()}, templated=False).within(Room(100, 50))
    made.tokenizer = counting = Counting(each=4)
    with pytest.raises(RowError, match="the prompt has 16000000 characters, of which the first 1600 are 400 tokens"):
        made.tokens({"prompt": "x" * 16_000_000})
    assert counting.given == 1600
    made.tokenizer = Counting(each=64)  # few tokens for its length: only the whole tells
    assert len(made.tokens({"prompt": "x" * 3200})) == 50
    with pytest.raises(RowError, match="a prompt of 100 tokens leaves no room in the context of 100"):
        made.request({"prompt": "x" * 6400}, SHARD, 0)
