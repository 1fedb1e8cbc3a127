"""One odd row or value costs at most its row: its neighbours are decoded, written and converted."""

import json
import os
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jinja2.sandbox import SandboxedEnvironment

from exspec.jobs.commands.convert import convert
from exspec.jobs.commands.repair import export
from exspec.pipeline.errors import JobError
from exspec.pipeline.input import templates
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.pipeline import jobs


def text(*content: bytes | None, large: bool = False) -> pa.Array:
    """A text column of arbitrary bytes."""
    kind, raw = (pa.large_string(), pa.large_binary()) if large else (pa.string(), pa.binary())
    return pa.Array.from_buffers(kind, len(content), pa.array(content, raw).buffers())


def written(pair: jobs.Pair, place: Path, **settings: Any) -> list[dict[str, Any]]:
    """The rows of a job over `place / "in"`, after conversions of its output. Every good row must be decoded."""
    defaults: dict[str, Any] = {"id_column": None, "max_new_tokens_column": None, "max_new_tokens": 4}
    job = jobs.job(pair, place / "in", place / "out", **defaults | settings)
    execute(prepare(job), load=jobs.ArithmeticLoader())
    parts = sorted((place / "out").glob("part-*"))
    table = pa.concat_tables([pq.read_table(part) for part in parts])
    for column in table.columns:
        column.validate(full=True)
    for name in ("out.jsonl", "out.csv"):
        assert convert(str(place / "out"), str(place / name), {}) == table.num_rows
    lines = (place / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == table.num_rows
    return [json.loads(line) for line in lines]


def put(place: Path, table: pa.Table, kind: str = "parquet") -> None:
    (place / "in").mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pq.write_table(table, place / "in" / "s.parquet")
    else:
        with pa.ipc.new_stream(place / "in" / "s.arrow", table.schema) as writer:
            writer.write_table(table)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def chat(content: str) -> str:
    return json.dumps([{"role": "user", "content": content}])


BAD_PROMPTS = {
    "messages nested 500 deep": ({"messages": [chat("w1"), nested(500), chat("w2")]}, {}),
    "messages nested 5000 deep": ({"messages": [chat("w1"), nested(5000), chat("w2")]}, {}),
    "messages whose content is nested 500 deep": (
        {"messages": [chat("w1"), f'[{{"role": "user", "content": {nested(500)}}}]', chat("w2")]},
        {},
    ),
    "a prompt that is not UTF-8": ({"prompt": text(b"w1", b"\xff\xfe", b"w2")}, {}),
    "a large prompt that is not UTF-8": ({"prompt": text(b"w1", b"\xff", b"w2", large=True)}, {}),
    "an id that is not UTF-8": ({"prompt": ["w1"] * 3, "id": text(b"a", b"\xff", b"c")}, {"id_column": "id"}),
    "an id after the year 9999": (
        {"prompt": ["w1"] * 3, "id": pa.array([0, 2**62, 1], pa.timestamp("us"))},
        {"id_column": "id"},
    ),
    "a time after the year 9999 in a template": (
        {"prompt": ["w1"] * 3, "t": pa.array([0, 2**62, 1], pa.timestamp("us"))},
        {"prompt_template": "{{ prompt }} {{ t }}"},
    ),
    "a template whose loops never end for one row": (
        {"n": [1, 99999, 1]},
        {"prompt_template": "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}w1"},
    ),
    "a template that repeats a text without end": (
        {"n": [1, 10**12, 1]},
        {"prompt_template": "{{ 'w1 ' * n }}"},
    ),
    "a template that doubles a text for ever": (
        {"n": [1, 200, 1]},
        {
            "prompt_template": "{% set s = namespace(x='w1 ') %}{% for i in range(n) %}{% set s.x = s.x ~ s.x %}"
            "{% endfor %}{{ s.x }}"
        },
    ),
    "a template that pads a text without end": ({"n": [1, 10**12, 1]}, {"prompt_template": "{{ 'w1'|center(n) }}"}),
    "a template that formats a number without end": (
        {"n": [1, 10**12, 1]},
        {"prompt_template": "{{ ('%' ~ n ~ 'd') % 1 }}"},
    ),
    "a template with an enormous power": ({"n": [1, 10**9, 1]}, {"prompt_template": "w1 {{ (9 ** n) > 0 }}"}),
    "a macro that calls itself for ever": (
        {"n": [1, 0, 1]},
        {"prompt_template": "{% macro f(n) %}{{ '' if n else f(n) }}{% endmacro %}w1{{ f(n) }}"},
    ),
}


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates that fill the memory have only a part of it here."""
    monkeypatch.setattr(templates, "GROWTH", 256 << 20)


# Templates that a careful bound must not refuse.
FINE = [
    "{{ text | tojson }}", "{{ text | replace('x', '') | indent }}", "{{ '%d' | format(n) }} {{ '%s' % n }}",
    "{{ '{:,}'.format(n) }}", "{{ [n, n] | join(', ') }} {{ n * 0.001 }} {{ n * 2 }}", "{{ [1, 2] * 3 }}",
    "{% for i in range(20000) %}{{ i }} {% endfor %}", "{{ (text * 1000) | length }}", "{{ 2 ** 10 }} {{ 2.0 ** 0.5 }}",
]  # fmt: skip


@pytest.mark.parametrize("template", FINE)
def test_an_ordinary_template_is_rendered(pair: jobs.Pair, tmp_path: Path, template: str) -> None:
    put(tmp_path, pa.table({"text": ['{"id": 1234567890, "rate": "50% of 123456789"}' * 50], "n": [1_700_000_000]}))
    job = jobs.job(pair, tmp_path / "in", tmp_path / "out", id_column=None, max_new_tokens_column=None, chat=False)
    prompts = prepare(job.model_copy(update={"prompt_template": template})).prompts
    row = {"text": '{"id": 1234567890, "rate": "50% of 123456789"}' * 50, "n": 1_700_000_000}
    assert prompts.text(row) == SandboxedEnvironment().from_string(template).render(row)


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_an_odd_row_is_an_error_and_its_neighbours_are_decoded(pair: jobs.Pair, tmp_path: Path, name: str) -> None:
    columns, settings = BAD_PROMPTS[name]
    settings = {"chat": False} | settings
    if "messages" in columns:
        columns = {"messages": columns["messages"]}
        settings |= {"chat": None}
    put(tmp_path, pa.table(columns))
    if "messages" in columns:
        pair = with_chat(pair, tmp_path)
    rows = written(pair, tmp_path, **settings)
    assert [row["error"] is None for row in rows] == [True, False, True], [row["error"] for row in rows]
    assert all(row["completion"] is not None for row in rows[::2])


CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
DOUBLED = "{% set s = namespace(x='w1') %}{% for i in range(99) %}{% set s.x = s.x ~ s.x %}{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("attack", [LOOPS, DOUBLED, "{{ 'w1' * 10**12 }}", "{{ 'w1'|center(10**12) }}"])
def test_a_chat_template_that_never_ends_for_one_row_is_its_error(pair: jobs.Pair, tmp_path: Path, attack: str) -> None:
    put(tmp_path, pa.table({"prompt": ["w1", "w2", "w3"]}))
    template = f"{CHAT}{{% if messages[0].content == 'w2' %}}{attack}{{% endif %}}"
    rows = written(with_chat(pair, tmp_path, template), tmp_path)
    assert [row["error"] is None for row in rows] == [True, False, True], [row["error"] for row in rows]


def with_chat(pair: jobs.Pair, place: Path, template: str = CHAT) -> jobs.Pair:  # noqa: ARG001
    """The pair with a chat template."""
    made = jobs.tokenizer()
    made.chat_template = template
    folders = jobs.save_pair(place / "models")
    for folder in folders:
        made.save_pretrained(folder)
    return folders


CARRIED = {
    "text that is not UTF-8": text(b"a", b"\xff", b"c"),
    "large text that is not UTF-8": text(b"a", b"\xff", b"c", large=True),
    "a list of texts that are not UTF-8": pa.ListArray.from_arrays([0, 1, 2, 3], text(b"a", b"\xff", b"c")),
    "coded text that is not UTF-8": pa.DictionaryArray.from_arrays([0, 1, 0], text(b"a", b"\xff")),
    "a null among the coded values": pa.DictionaryArray.from_arrays([0, 1, 0], pa.array(["a", None])),
    "a time after the year 9999": pa.array([0, 2**62, 1], pa.timestamp("us")),
    "a date after the year 9999": pa.array([0, 2**30, 1], pa.date32()),
    "an empty record": pa.array([{}, None, {}], pa.struct([])),
    "a list of empty records": pa.array([[{}], [], None], pa.list_(pa.struct([]))),
    "an interval": pa.array([(1, 2, 3), None, (0, 0, 0)], pa.month_day_nano_interval()),
    "run-end encoding": pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"]),
    "an unknown time zone": pa.array([0, None, 5], pa.timestamp("us", "Mars/Olympus")),
    "a union": pa.UnionArray.from_sparse(
        pa.array([0, 1, 0], pa.int8()), [pa.array([1, 2, 3]), pa.array(["a", "b", "c"])]
    ),
    "bytes of no length": pa.array([b"", None, b""], pa.binary(0)),
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_carried_column_of_any_type_is_written(pair: jobs.Pair, tmp_path: Path, name: str) -> None:
    put(tmp_path, pa.table({"prompt": ["w1", "w2", "w3"], "c": CARRIED[name]}), "arrow")
    rows = written(pair, tmp_path, chat=False)
    assert [row["error"] for row in rows] == [None] * 3
    assert all(row["completion"] is not None for row in rows)
    if "not UTF-8" in name:
        assert "\\\\xff" in json.dumps(rows[1]["c"]), "the bytes are shown as escapes"


def test_json_lines_with_empty_records_are_written_as_text(pair: jobs.Pair, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "s.jsonl").write_text('{"prompt": "w1", "metadata": {}}\n' * 3)
    assert [row["metadata"] for row in written(pair, tmp_path, chat=False)] == ["{}"] * 3


def test_a_template_whose_steps_are_slow_is_the_rows_error(
    pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    put(tmp_path, pa.table({"n": [1, 10_000, 2]}))
    slow = "{% if n > 5 %}{% for i in range(n) %}{% set x = ('ab' * n * 1000)|upper|lower %}{% endfor %}{% endif %}w1"
    rows = written(pair, tmp_path, chat=False, prompt_template=slow)
    assert [row["error"] for row in rows] == [None, "prompt_template: BoundError: it takes longer than 0.5 s", None]


@pytest.mark.parametrize(
    ("depth", "message"), [(40, None), (60, "a column is nested deeper than Arrow reads: 100 lev")]
)
def test_lists_of_parquet_are_nested_as_deep_as_arrow_reads(
    pair: jobs.Pair, tmp_path: Path, depth: int, message: str | None
) -> None:
    kind = reduce(lambda inner, _: pa.list_(inner), range(depth), pa.int32())
    put(tmp_path, pa.table({"prompt": ["w1"], "deep": pa.nulls(1, kind)}))
    with pytest.raises(JobError, match=message) if message else nullcontext():
        assert written(pair, tmp_path, chat=False)[0]["error"] is None


@pytest.mark.parametrize("depth", [100, 600, 900])
def test_a_column_that_is_nested_too_deeply_is_refused_in_plan(pair: jobs.Pair, tmp_path: Path, depth: int) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "s.jsonl").write_text(f'{{"prompt": "w1", "deep": {nested(depth)}}}\n')
    with pytest.raises(JobError, match=r"s\.jsonl: .*deep"):
        written(pair, tmp_path, chat=False)


def test_a_file_name_that_is_not_utf_8_is_refused_in_plan(pair: jobs.Pair, tmp_path: Path) -> None:
    put(tmp_path, pa.table({"prompt": ["w1"]}))
    os.rename(tmp_path / "in" / "s.parquet", os.fsencode(tmp_path / "in") + b"/\xff.parquet")  # noqa: PTH104
    with pytest.raises(JobError, match=r"udcff.parquet: the file's name is not UTF-8; rename the file"):
        written(pair, tmp_path, chat=False)


def test_a_batch_body_that_is_nested_deeply_is_an_error(pair: jobs.Pair, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    good = '{"messages": [{"role": "user", "content": "w1"}]}'
    bodies = [good, f'{{"messages": {nested(500)}}}', good]
    lines = (
        f'{{"custom_id": "{i}", "method": "POST", "url": "/v1/chat/completions", "body": {b}}}'
        for i, b in enumerate(bodies)
    )
    (tmp_path / "in" / "s.jsonl").write_text("\n".join(lines))
    rows = written(with_chat(pair, tmp_path), tmp_path)
    assert [row["response"]["status_code"] for row in rows] == [200, 400, 200]
    assert export(str(tmp_path / "out"), str(tmp_path / "bad.jsonl"), {}) == 1
    body = json.loads((tmp_path / "bad.jsonl").read_text())["body"]
    assert nested(500) in (body if isinstance(body, str) else json.dumps(body))  # by Python's limit of recursion
