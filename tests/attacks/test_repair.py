"""Rows that failed are exported, corrected and decoded again; settings that help only those change; files grow."""

import gzip
import json
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exspec.actors.engine import methods
from exspec.jobs.commands.repair import export, repaired
from exspec.pipeline import run
from exspec.pipeline.errors import JobError, StoppedError
from exspec.pipeline.input.plan import Shard
from exspec.pipeline.input.reading import grew
from exspec.pipeline.input.snapshot import probe
from exspec.pipeline.output.compact import compact
from exspec.pipeline.output.owner import Writer, read_output
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from exspec.pipeline.storage import Folder
from tests.jobs.calls import call, rows_of, succeed
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process

ROWS, BAD = 30, (3, 4, 17)
TIMES = ("seconds_queued", "seconds_prefill", "seconds_decode")
Row = dict[str, Any]


def rows(bad: tuple[int, ...] = BAD) -> list[Row]:
    """Rows of words, of which the bad ones have no prompt."""
    texts = [" ".join(jobs.WORDS[token] for token in jobs.prompt(n)) for n in range(ROWS)]
    return [
        {"key": n, "prompt": None if n in bad else texts[n], "budget": jobs.budget(n), "blob": bytes([n, 255])}
        for n in range(ROWS)
    ]


def write(place: Path, given: list[Row], suffix: str = ".parquet") -> None:
    """Write the rows in shards of 12 and of the rest."""
    (place / "in").mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(filter(None, (given[:12], given[12:]))):
        path = place / "in" / f"s{number}{suffix}"
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(part), path)
        else:
            path.write_text("".join(f"{json.dumps(row, default=bytes.hex)}\n" for row in part))


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def exported(place: Path, change: Callable[[Row], None] = lambda _: None) -> Path:
    """The failed rows in a file, each changed by the user."""
    file = place / "bad.jsonl"
    export(str(place / "out"), str(file), {})
    given = read(file)
    for row in given:
        change(row)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in given))
    return file


def correct(row: Row) -> None:
    row["prompt"] = rows(bad=())[row["key"]]["prompt"]


def outcome(place: Path) -> dict[str, Row]:
    """Rows by id, without the times."""
    found = jobs.read_output(place / "out")
    return {name: {k: v for k, v in row.items() if k not in TIMES} for name, row in found.items()}


@pytest.fixture(scope="module")
def failed(pair: jobs.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job in which three rows have an error."""
    place = tmp_path_factory.mktemp("failed")
    write(place, rows())
    with in_process():
        assert jobs.run(pair, place) == 0
    return place


@pytest.fixture(scope="module")
def fresh(pair: jobs.Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """What the same job writes if its input is good from the start."""
    place = tmp_path_factory.mktemp("fresh")
    write(place, rows(bad=()))
    with in_process():
        assert jobs.run(pair, place) == 0
    return outcome(place)


@pytest.fixture
def place(failed: Path, tmp_path: Path) -> Path:
    """A copy of the failed job; its input lies where it did."""
    shutil.copytree(failed / "out", tmp_path / "out")
    shutil.copytree(failed / "in", tmp_path / "in")
    return tmp_path


def repair(pair: jobs.Pair, place: Path, file: Path, **settings: Any) -> int:
    return jobs.run(pair, place, repair=file, **settings)


def test_a_repaired_job_equals_a_job_on_the_corrected_input(
    pair: jobs.Pair,
    place: Path,
    fresh: dict[str, Row],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = exported(place)
    assert [(r["exspec_id"], r["exspec_shard"], r["exspec_row"]) for r in read(file)] == [
        ("3", "s0.parquet", 3), ("4", "s0.parquet", 4), ("17", "s1.parquet", 5)
    ]  # fmt: skip
    assert {row["exspec_error"] for row in read(file)} == {"column 'prompt' is null"}
    before = {row["id"]: row for row in rows_of(place / "out") if row["error"] is None}
    assert repair(pair, place, exported(place, correct)) == 0
    assert outcome(place) == fresh
    assert (place / "out" / "_SUCCESS").exists()
    after = {row["id"]: row for row in rows_of(place / "out")}
    assert all(after[name] == row for name, row in before.items()), "rows that were done are as they were"
    assert "retried: 3 rows; done now: 3; still with an error: 0" in capsys.readouterr().out


def second_key_to_first(row: Row) -> None:
    row["exspec_id"], row["exspec_shard"], row["exspec_row"] = "3", "s0.parquet", 3


REFUSED: dict[str, tuple[Callable[[Row], Any], str]] = {
    "an unknown id": (lambda row: row.update(exspec_id="x"), "line 1, id 'x': no row with an error has this id"),
    "the id of a row without an error": (lambda row: row.update(exspec_id="5"), "id '5': no row with an error has"),
    "the number of another row": (lambda row: row.update(exspec_row=9), "line 1, id '3': no row with an error has"),
    "another shard": (lambda row: row.update(exspec_shard="s9.parquet"), "line 1, id '3': no row with an error has"),
    "no id": (lambda row: row.pop("exspec_id"), "line 1: has no exspec_id; expected a row that"),
    "a row twice": (second_key_to_first, "line 2, id '3': is the same row as .*bad.jsonl, line 1, id '3'"),
    "a missing column": (lambda row: row.pop("budget"), "line 1, id '3': column 'budget' is missing"),
    "an unknown column": (lambda row: row.update(promt="w1"), "line 1, id '3': column 'promt' is not in the input"),
    "a list as text": (lambda row: row.update(budget=["w1"]), "id '3': column 'budget': expected int64: "),
    "text as a number": (lambda row: row.update(budget="many"), "id '3': column 'budget': expected int64: "),
    "a number out of range": (lambda row: row.update(budget=2**64), "id '3': column 'budget': expected int64: "),
    "half a surrogate pair": (lambda row: row.update(prompt="\ud800"), "id '3': column 'prompt': expected string: "),
    "bytes that are not hexadecimal": (lambda row: row.update(blob="xy"), "column 'blob': expected binary: non-hex"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_row_before_anything_is_decoded(
    pair: jobs.Pair,
    place: Path,
    change: Callable[[Row], None],
    message: str,
) -> None:
    file, before = exported(place, change), outcome(place)
    with pytest.raises(JobError, match=message) as refused:
        repair(pair, place, file)
    assert refused.value.code == 2
    assert outcome(place) == before
    assert (place / "out" / "_SUCCESS").exists()
    assert jobs.run(pair, place) == 0, "the job goes on as if nothing had happened"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'a': 1}", "bad.jsonl, line 1: not JSON"),
        ("[" * 100_000, "bad.jsonl, line 1: not JSON"),
        ("\n[1]", "bad.jsonl, line 2: expected an object, not list"),
    ],
    ids=["a line that is not JSON", "a line nested too deep", "a line without an object"],
)
def test_a_broken_file_is_refused_with_its_line(pair: jobs.Pair, place: Path, text: str, message: str) -> None:
    (place / "bad.jsonl").write_text(text)
    with pytest.raises(JobError, match=message):
        repair(pair, place, place / "bad.jsonl")


def test_rows_that_were_not_corrected_stay_as_they_are(pair: jobs.Pair, place: Path) -> None:
    before = outcome(place)
    assert repair(pair, place, exported(place)) == 0
    assert outcome(place) == before


def test_not_every_failed_row_must_be_in_the_file_and_a_second_repair_takes_the_rest(
    pair: jobs.Pair,
    place: Path,
    fresh: dict[str, Row],
) -> None:
    lines = exported(place, correct).read_text().splitlines()
    (place / "first.jsonl").write_text(lines[0])
    assert repair(pair, place, place / "first.jsonl") == 0
    assert [row["exspec_id"] for row in read(exported(place))] == ["4", "17"]
    assert repair(pair, place, exported(place, correct)) == 0
    assert outcome(place) == fresh


def test_a_repair_that_fails_can_be_repaired_from_what_it_was(
    pair: jobs.Pair,
    place: Path,
    fresh: dict[str, Row],
) -> None:
    assert repair(pair, place, exported(place, lambda row: row.update(prompt="", blob="00ff"))) == 0
    assert {(row["prompt"], row["blob"]) for row in read(exported(place))} == {("", "00ff")}
    assert {row["exspec_error"] for row in read(exported(place))} == {"the prompt is empty"}

    def again(row: Row) -> None:
        correct(row)
        row["blob"] = bytes([row["key"], 255]).hex()

    assert repair(pair, place, exported(place, again)) == 0
    assert outcome(place) == fresh


def killed(after: int, action: Callable[[], Any]) -> None:
    """A run that is killed after so many chunks were decoded."""
    whole = run.results

    def results(*given: Any) -> Any:
        for number, result in enumerate(whole(*given)):
            if number == after:
                raise KeyboardInterrupt
            yield result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "results", results)
        with pytest.raises(StoppedError):
            action()


AFTER: dict[str, Callable[[jobs.Pair, Path, Path], int]] = {
    "the same command": lambda pair, place, file: jobs.run(pair, place, repair=file),
    "a plain run": lambda pair, place, _: jobs.run(pair, place),
    "a retry": lambda pair, place, _: jobs.run(pair, place, retry_errors=True),
}


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("resume", AFTER.values(), ids=AFTER)
def test_a_killed_repair_is_resumed_by(
    pair: jobs.Pair,
    place: Path,
    fresh: dict[str, Row],
    after: int,
    resume: Callable[[jobs.Pair, Path, Path], int],
) -> None:
    file = exported(place, correct)
    killed(after, lambda: repair(pair, place, file))
    assert not (place / "out" / "_SUCCESS").exists()
    assert not read_output(Folder(str(place / "out"))).state.done_shards() >= {"s0.parquet", "s1.parquet"}
    for refused in (
        lambda: compact(Folder(str(place / "out")), 1 << 20),
        lambda: call("convert", place / "out", "x.csv"),
    ):
        with pytest.raises(JobError, match="with an error must be decoded again; run the job again first"):
            refused()
    assert resume(pair, place, file) == 0
    assert outcome(place) == fresh
    assert (place / "out" / "_SUCCESS").exists()


def test_a_chunk_of_a_merged_file_that_was_set_aside_is_repaired_by_the_next_run(
    pair: jobs.Pair,
    place: Path,
    fresh: dict[str, Row],
) -> None:
    compact(Folder(str(place / "out")), 1 << 30)
    whole, aside = run.results, {"set_aside": "the disk is gone", "fault": "output"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run, "results", lambda *given: (r | aside if r["task"].chunk.number else r for r in whole(*given))
        )
        assert repair(pair, place, exported(place, correct)) == 1
    assert {name for name, row in outcome(place).items() if row["error"]} == {"17"}
    assert jobs.run(pair, place) == 0
    assert outcome(place) == fresh


def lose(_: jobs.Pair, place: Path) -> None:
    for part in (place / "out").glob("part-*"):
        part.unlink()


LATER: dict[str, Callable[[jobs.Pair, Path], Any]] = {
    "after its files were lost": lose,
    "after a retry": lambda pair, place: jobs.run(pair, place, retry_errors=True),
    "after it was merged": lambda _, place: compact(Folder(str(place / "out")), 1 << 30),
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
def test_a_repaired_job_stays_repaired(
    pair: jobs.Pair,
    place: Path,
    fresh: dict[str, Row],
    later: Callable[[jobs.Pair, Path], Any],
) -> None:
    assert repair(pair, place, exported(place, correct)) == 0
    later(pair, place)
    assert jobs.run(pair, place) == 0
    assert outcome(place) == fresh


def test_a_merged_output_is_repaired(pair: jobs.Pair, place: Path, fresh: dict[str, Row]) -> None:
    compact(Folder(str(place / "out")), 1 << 30)
    assert repair(pair, place, exported(place, correct)) == 0
    assert outcome(place) == fresh


def test_a_restart_reads_the_input_anew(pair: jobs.Pair, place: Path) -> None:
    assert repair(pair, place, exported(place, correct)) == 0
    assert jobs.run(pair, place, restart=True) == 0
    assert {row["id"] for row in outcome(place).values() if row["error"]} == {str(n) for n in BAD}


def test_rows_without_ids_of_their_own_are_told_apart(pair: jobs.Pair, place: Path) -> None:
    """Two rows have one id: shard and row number decide, and without them the repair is refused."""
    write(place, [row | {"key": 7} if row["key"] in BAD else row for row in rows()])
    shutil.rmtree(place / "out")
    assert jobs.run(pair, place) == 0
    prompts = {("s0.parquet", 3): "w1", ("s0.parquet", 4): "w2", ("s1.parquet", 5): "w3"}
    file = exported(place, lambda row: row.update(prompt=prompts[row["exspec_shard"], row["exspec_row"]]))
    (place / "short.jsonl").write_text(json.dumps({k: v for k, v in read(file)[0].items() if k != "exspec_row"}))
    with pytest.raises(JobError, match="id '7': 2 rows with an error have this id; give exspec_shard and exspec_row"):
        repair(pair, place, place / "short.jsonl")
    assert repair(pair, place, file) == 0
    found = {(row["shard"], row["row"]): row["prompt"] for row in rows_of(place / "out")}
    assert {key: found[key] for key in prompts} == prompts


NOON = datetime(2026, 2, 1, 12, tzinfo=UTC)
VALUES: dict[str, tuple[pa.Array, Any, Any]] = {
    "text": (pa.array(["a", "b"]), "c", "c"),
    "large text": (pa.array(["a", "b"], pa.large_string()), "c", "c"),
    "JSON text": (pa.array(["[1]", "[]"], pa.json_()), {"a": [1]}, '{"a": [1]}'),
    "whole number": (pa.array([1, 2], pa.int16()), -3, -3),
    "number": (pa.array([1.5, float("nan")]), 2, 2.0),
    "boolean": (pa.array([True, None]), False, False),
    "bytes": (pa.array([b"\xff", b""]), "fe00", b"\xfe\x00"),
    "decimal": (pa.array([Decimal("1.10"), None], pa.decimal128(9, 2)), "2.50", Decimal("2.50")),
    "date": (pa.array([date(2026, 1, 31), None]), "2026-02-01", date(2026, 2, 1)),
    "time": (pa.array([datetime(2026, 1, 31, tzinfo=UTC)] * 2), "2026-02-01 12:00:00Z", NOON),
    "list": (pa.array([[1], None]), [2, None], [2, None]),
    "record": (pa.array([{"a": 1, "b": "x"}] * 2), {"a": None, "b": "y"}, {"a": None, "b": "y"}),
    "messages": (pa.array([[{"role": "user", "content": "w1"}]] * 2), [], []),
    "map": (pa.array([[("k", 1)]] * 2, pa.map_(pa.string(), pa.int64())), [["k", 1]], [("k", 1)]),
    "dictionary": (pa.array(["a", "b"]).dictionary_encode(), "c", "c"),
    "null": (pa.array([1, 2]), None, None),
}  # fmt: skip


@pytest.mark.parametrize(("column", "given", "expected"), VALUES.values(), ids=VALUES)
def test_values_keep_their_type(
    pair: jobs.Pair,
    tmp_path: Path,
    column: pa.Array,
    given: Any,
    expected: Any,
) -> None:
    """A value that the user changed has the input's type, and one that the user left alone is as it was."""
    (tmp_path / "in").mkdir()
    table = pa.table({"key": [0, 1], "prompt": pa.array([None, None], pa.string()), "budget": [2, 2], "x": column})
    pq.write_table(table, tmp_path / "in" / "s.parquet")
    jobs.run(pair, tmp_path)

    def change(row: Row) -> None:
        row["prompt"] = "w5"
        if row["key"] == 1:
            row["x"] = given

    assert repair(pair, tmp_path, exported(tmp_path, change)) == 0
    kept, changed = (row["x"] for row in rows_of(tmp_path / "out"))
    assert kept == column[0].as_py()
    assert changed == expected
    assert pq.read_schema(next((tmp_path / "out").glob("part-*"))).field("x").type == column.type


BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}


@pytest.mark.parametrize(
    ("name", "text", "settings", "change"),
    [
        ("s.csv", "key,prompt,budget\n007,,2\n8,w1,2\n", {}, lambda row: row.update(prompt="w5")),
        (
            "s.jsonl",
            f"{json.dumps(BATCH | {'body': {'max_tokens': 2}})}\n",
            {"id_column": None, "max_new_tokens_column": None},
            lambda row: row["body"].update(prompt="w5"),
        ),
        (
            "s.jsonl",
            '{"key": "007", "text": null, "budget": 2}\n{"key": "8", "text": "w1", "budget": 2}\n',
            {"map": "clean:renamed"},
            lambda row: row.update(text="w5"),
        ),
        (
            "s.jsonl",
            '{"key": "007", "prom\n{"key": "8", "prompt": "w1", "budget": 2}\n',
            {"bad_lines": "error"},
            lambda row: row.update(key="007", prompt="w5", budget=2),
        ),
    ],
    ids=["CSV", "requests of the batch API", "rows that a function maps", "a broken line"],
)
def test_the_rows_of_a_repair_are_rows_as_the_job_reads_them(
    pair: jobs.Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    settings: dict[str, Any],
    change: Callable[[Row], None],
) -> None:
    (tmp_path / "clean.py").write_text('def renamed(table):\n    return table.rename_columns({"text": "prompt"})\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(text)
    jobs.run(pair, tmp_path, **settings)
    assert repair(pair, tmp_path, exported(tmp_path, change), **settings) == 0
    first = rows_of(tmp_path / "out")[0]
    assert (first["id"], first["error"], first["completion_tokens"]) == ("a" if "custom_id" in text else "007", None, 2)


def test_a_value_that_is_not_text_is_exported_as_null(pair: jobs.Pair, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"w1", b"\xff"]).buffers())
    pq.write_table(pa.table({"key": [0, 1], "prompt": broken, "budget": [2, 2]}), tmp_path / "in" / "s.parquet")
    assert jobs.run(pair, tmp_path, carry=[]) == 0
    (row,) = read(exported(tmp_path))
    assert row["prompt"] is None
    assert repair(pair, tmp_path, exported(tmp_path, lambda row: row.update(prompt="w5")), carry=[]) == 0
    assert {row["error"] for row in rows_of(tmp_path / "out")} == {None}


def test_an_input_with_a_column_of_the_files_own_is_refused(pair: jobs.Pair, place: Path) -> None:
    write(place, [row | {"exspec_id": 1} for row in rows()])
    shutil.rmtree(place / "out")
    assert jobs.run(pair, place) == 0
    with pytest.raises(JobError, match="the input has a column 'exspec_id'"):
        exported(place)


COMMANDS: dict[str, tuple[list[str], str]] = {
    "with --restart": (["run", "--restart", "--repair", "bad.jsonl"], "--restart reads the input anew"),
    "with --since": (["run", "--repair", "bad.jsonl", "--since", "last"], "since: skips finished shards, but --repair"),
    "of a new output": (["run", "--repair", "bad.jsonl"], "--repair: expected an output with rows that failed"),
    "without a file": (["run", "--repair", "no.jsonl"], "--repair no.jsonl: no such file; expected one that"),
    "as CSV": (["convert", "OUT", "bad.csv", "--errors"], "bad.csv: expected a name that ends with .jsonl"),
    "as formulas": (["convert", "OUT", "a.jsonl", "--quote-formulas"], "--quote-formulas: expected a file of CSV"),
    "with columns": (["convert", "OUT", "a.jsonl", "--errors", "--columns", "id"], "--errors: writes all"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "message"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_is_refused(
    pair: jobs.Pair,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(place)
    Path("bad.jsonl").write_text("")
    output = "new" if message.startswith("--repair") else "out"
    made = jobs.job(pair, place / "in", place / output)
    Path("job.yaml").write_text(json.dumps(made.model_dump(mode="json", exclude_unset=True)))
    given = ["--job", "job.yaml"] if words[0] == "run" else []
    with pytest.raises(JobError, match=message):
        call(*[str(place / "out") if word == "OUT" else word for word in words], *given)


def test_the_commands_of_the_page(pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, rows())
    made = jobs.job(pair, "in", "out").model_dump(mode="json", exclude_unset=True)
    Path("job.yaml").write_text(json.dumps(made))
    assert "3 of them with an error" in succeed("run", "--job", "job.yaml")
    assert "3 rows in bad.jsonl" in succeed("convert", "out", "bad.jsonl", "--errors")
    Path("bad.jsonl").write_text(Path("bad.jsonl").read_text().replace('"prompt": null', '"prompt": "w5 w6"'))
    assert "done now: 3" in succeed("run", "--job", "job.yaml", "--repair", "bad.jsonl")
    assert "0 rows in bad.jsonl" in succeed("convert", "out", "bad.jsonl", "--errors")
    assert "30 (100.0%)" in succeed("audit", "out", "--count", 30, "--no-generate")


SMALL: dict[str, Any] = {"capacity": 32, "bucket": 32, "method": "plain"}


def sized(lengths: dict[int, int], new: int = 8) -> list[Row]:
    """Rows with prompts of so many tokens, by key."""
    words = [" ".join(jobs.WORDS[1 + (key + i) % 50] for i in range(length)) for key, length in lengths.items()]
    return [{"key": key, "prompt": text, "budget": new} for key, text in zip(lengths, words, strict=True)]


def decode(pair: jobs.Pair, place: Path, mending: bool = False, **settings: Any) -> int:
    """Run with the real models."""
    made = jobs.job(pair, place / "in", place / "out", **SMALL | settings)
    return execute(prepare(made, mending=mending), mending)


CURED: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "truncate_prompt": ({}, {"truncate_prompt": True}, {"3", "4"}),
    "truncate_prompt where the context ends a completion": ({"capacity": 64}, {"truncate_prompt": True}, {"4"}),
    "a longer capacity": ({}, {"capacity": 64}, {"3", "4"}),
    "no capacity, which is longer": ({}, {"capacity": None}, {"3", "4"}),
    "a longer capacity and truncate_prompt": ({}, {"capacity": 64, "truncate_prompt": True}, {"3", "4"}),
    "a longer capacity of speculation": ({"method": "exspec"}, {"method": "exspec", "capacity": 64}, {"3", "4"}),
    "a longer capacity over copies of KV": ({"capacity": 32}, {"capacity": 64}, {"3", "4"}),
}


@pytest.mark.parametrize(("before", "now", "bad"), CURED.values(), ids=CURED)
def test_a_setting_that_changes_only_rows_that_failed_may_change_with_a_retry(
    pair: jobs.Pair,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    before: dict[str, Any],
    now: dict[str, Any],
    bad: set[str],
) -> None:
    """Rows that were done are as they were, and all rows are as a new job with the new settings makes them."""
    with pytest.MonkeyPatch.context() as patch:
        if "copies" in request.node.name:
            patch.setattr(methods, "attention_trial", lambda *_: "it is off in this test")
        with_, without = tmp_path / "retried", tmp_path / "fresh"
        for place in (with_, without):
            write(place, sized({1: 5, 2: 20, 3: 30, 4: 70, 5: 24, 6: 58}))
        assert decode(pair, with_, **before) == 0
        stored = {row["id"]: row for row in rows_of(with_ / "out")}
        assert {name for name, row in stored.items() if row["error"]} - {"6"} == bad
        with pytest.raises(JobError, match=r"with other settings: .*; use --retry-errors, another output or --restart"):
            decode(pair, with_, **before | now)
        assert decode(pair, with_, mending=True, **before | now) == 0
        assert decode(pair, without, **before | now) == 0
    assert outcome(with_) == outcome(without)
    again = {row["id"]: row for row in rows_of(with_ / "out")}
    assert all(again[name] == row for name, row in stored.items() if not row["error"])
    assert any(stored[name]["error"] and not row["error"] for name, row in again.items()), "some are cured"
    assert decode(pair, with_, **before | now) == 0, "the new settings are the job's"
    with pytest.raises(JobError, match="has a job with other settings"):
        decode(pair, with_, mending=True, **before)
    assert call("audit", with_ / "out", "--count", 6, "--no-generate").exit_code == 0


NOT_CURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "truncate_prompt, turned off": ({"truncate_prompt": True}, {"truncate_prompt": False}),
    "a shorter capacity": ({}, {"capacity": 16}),
    "a capacity that cut the last bucket": ({"bucket": 24}, {"capacity": 64}),
    "a capacity below the bucket": ({"bucket": 512}, {"capacity": 64}),
    "a capacity that cut the last chunk of a prompt": ({"capacity": 16, "bucket": 16}, {"capacity": 32}),
    "a capacity that cut prompts": ({"truncate_prompt": True}, {"capacity": 64}),
    "a capacity without fixed shapes": ({"exact": False}, {"capacity": 64}),
    "a setting of sampling": ({}, {"temperature": 1.0}),
    "max_new_tokens": ({"max_new_tokens_column": None, "max_new_tokens": 4}, {"max_new_tokens": 8}),
}


@pytest.mark.parametrize(("before", "now"), NOT_CURED.values(), ids=NOT_CURED)
def test_a_setting_that_may_change_rows_that_are_done_stays(
    pair: jobs.Pair,
    tmp_path: Path,
    before: dict[str, Any],
    now: dict[str, Any],
) -> None:
    write(tmp_path, sized({1: 5, 3: 50}))
    assert decode(pair, tmp_path, **before) == 0
    with pytest.raises(JobError, match=r"has a job with other settings: .*; use another output or --restart"):
        decode(pair, tmp_path, mending=True, **before | now)


def test_a_killed_retry_with_other_settings_is_resumed(pair: jobs.Pair, tmp_path: Path) -> None:
    write(tmp_path, sized({n: 5 + 3 * n for n in range(16)}))
    assert decode(pair, tmp_path) == 0
    killed(1, lambda: decode(pair, tmp_path, mending=True, truncate_prompt=True))
    with pytest.raises(JobError, match="truncate_prompt was True and is False"):
        decode(pair, tmp_path)
    assert decode(pair, tmp_path, truncate_prompt=True) == 0
    assert {row["error"] for row in rows_of(tmp_path / "out")} == {None}
    assert sum(row["prompt_tokens_cut"] > 0 for row in rows_of(tmp_path / "out")) == 9


def lines(suffix: str, given: list[Row]) -> bytes:
    """The rows in a file of lines, of CSV without the header."""
    if suffix.startswith(".csv"):
        return "".join(f"{row['key']},{row['prompt'] or ''},{row['budget']}\n" for row in given).encode()
    return "".join(f"{json.dumps(row, default=bytes.hex)}\n" for row in given).encode()


def begin(folder: Path, suffix: str, count: int) -> Path:
    """The first rows in one file, and one row in a second file."""
    folder.mkdir(parents=True)
    header = b"key,prompt,budget\n" if suffix.startswith(".csv") else b""
    (folder / f"a{suffix}").write_bytes(header + lines(suffix, rows()[:count]))
    (folder / f"b{suffix}").write_bytes(header + lines(suffix, rows()[-1:]))
    return folder / f"a{suffix}"


def append(file: Path, text: bytes) -> None:
    file.write_bytes(file.read_bytes() + text)


@pytest.mark.parametrize("since", [None, "last"])
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".csv"])
def test_new_rows_of_a_file_that_grew_join_the_job(
    pair: jobs.Pair, tmp_path: Path, suffix: str, since: str | None
) -> None:
    """Rows that are done stay, repairs too, and the output equals that of a job on the longer file."""
    with_, without = tmp_path / "grown", tmp_path / "fresh"
    file = begin(with_ / "in", suffix, 13)
    assert jobs.run(pair, with_) == 0
    assert repair(pair, with_, exported(with_, lambda row: row.update(prompt="w5"))) == 0
    parts = {path.name for path in (with_ / "out").glob("part-*")}
    append(file, lines(suffix, rows()[13:20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "finish", lambda _: None)
        assert jobs.run(pair, with_, since=since) == 0
    assert not (with_ / "out" / "_SUCCESS").exists(), "the marker was withdrawn before the new rows came"
    assert jobs.run(pair, with_, since=since) == 0
    assert (with_ / "out" / "_SUCCESS").exists()
    assert parts < {path.name for path in (with_ / "out").glob("part-*")}
    append(file, lines(suffix, rows()[20:29]))
    assert jobs.run(pair, with_, since=since) == 0, "it grows again"
    begin(without / "in", suffix, 29)
    for path in (without / "in").iterdir():
        path.write_bytes(path.read_bytes().replace(b"3,,", b"3,w5,").replace(b"4,,", b"4,w5,"))
        for key in (3, 4):
            old = f'"key": {key}, "prompt": null'
            path.write_bytes(path.read_bytes().replace(old.encode(), old.replace("null", '"w5"').encode()))
    assert jobs.run(pair, without) == 0
    assert outcome(with_) == outcome(without)
    assert len(outcome(with_)) == ROWS


CHANGED: dict[str, tuple[str, Callable[[bytes], bytes], dict[str, Any]]] = {
    "an old row and new ones": (".jsonl", lambda old: old.replace(b"w", b"W", 1) + lines(".jsonl", rows()[-2:]), {}),
    "new rows before the old": (".jsonl", lambda old: lines(".jsonl", rows()[-2:]) + old, {}),
    "a row less": (".jsonl", lambda old: old[: old.rindex(b"{")], {}),
    "a new column": (".csv", lambda old: old.replace(b"budget", b"budget,x") + b"9,w9,2,1\n", {}),
    "a compressed file": (".jsonl.gz", lambda old: old + gzip.compress(lines(".jsonl", rows()[-2:])), {}),
    "new rows within a limit": (".jsonl", lambda old: old + lines(".jsonl", rows()[-2:]), {"limit": 20}),
}  # fmt: skip


@pytest.mark.parametrize(("suffix", "change", "settings"), CHANGED.values(), ids=CHANGED)
def test_a_file_that_changed_in_another_way_is_refused(
    pair: jobs.Pair,
    tmp_path: Path,
    suffix: str,
    change: Callable[[bytes], bytes],
    settings: dict[str, Any],
) -> None:
    file = begin(tmp_path / "in", suffix, 13)
    if suffix.endswith(".gz"):
        for path in (tmp_path / "in").iterdir():
            path.write_bytes(gzip.compress(path.read_bytes()))
    assert jobs.run(pair, tmp_path, **settings) == 0
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(JobError, match=r"planned shard has changed|column"):
        jobs.run(pair, tmp_path, **settings)


ENDS: dict[str, tuple[str, bytes, bytes, bool]] = {
    "whole lines": ("s.jsonl", b'{"a": "1"}\n', b'{"a": "2"}\n', True),
    "whole lines of CSV": ("s.csv", b"a\n1\n", b"2\n", True),
    "half a new line": ("s.csv", b"a\n1\n", b"2", True),
    "Windows line ends": ("s.csv", b"a\r\n1\r\n", b"2\r\n", True),
    "a last line without its end": ("s.jsonl", b'{"a": "1"}', b'\n{"a": "2"}\n', False),
    "a last value that goes on": ("s.csv", b"a\n1", b"2\n", False),
    "a quoted value that goes on": ("s.csv", b'a\n"1\n', b'2"\n', False),
    "a quoted value that goes on, after quotes in a value": ("s.csv", b'a,b\nx"y,"1\n', b'2"\n', False),
    "nothing new": ("s.jsonl", b'{"a": "1"}\n', b"", False),
    "Arrow": ("s.arrow", b"ARROW1\n", b"more", False),
    "Parquet": ("s.parquet", b"PAR1\n", b"more", False),
}


@pytest.mark.parametrize("url", ["file", "s3"])
@pytest.mark.parametrize(("name", "old", "new", "expected"), ENDS.values(), ids=ENDS)
def test_a_file_grows_by_whole_lines(
    tmp_path: Path,
    moto: dict[str, Any],
    url: str,
    name: str,
    old: bytes,
    new: bytes,
    expected: bool,
) -> None:
    """On disk, and in a store whose etag is a digest of the content."""
    options = moto if url == "s3" else {}
    folder = Folder(f"s3://grows-{uuid.uuid4().hex}" if url == "s3" else str(tmp_path), options)
    folder.fs.makedirs(folder.path, exist_ok=True)
    schema = pa.schema({column: pa.string() for column in ("a", "b")[: 1 + old.startswith(b"a,b")]})
    shards = []
    for content in (old, old + new):
        folder.fs.pipe_file(f"{folder.path}/{name}", content)
        size, etag, stamp = probe(folder.fs, f"{folder.path}/{name}")
        shards.append(Shard(name, folder.fs.unstrip_protocol(f"{folder.path}/{name}"), 1, size, etag, stamp))
        time.sleep(0.01)
    assert grew(*shards, options, schema) is expected
    assert not grew(replace(shards[0], etag="2026-01-01 00:00:00"), shards[1], options, schema), "no digest"


def test_a_file_that_grew_while_rows_were_missing(pair: jobs.Pair, tmp_path: Path) -> None:
    file = begin(tmp_path / "in", ".jsonl", 20)
    killed(1, lambda: jobs.run(pair, tmp_path))
    append(file, lines(".jsonl", rows()[20:29]))
    assert jobs.run(pair, tmp_path) == 0
    assert set(outcome(tmp_path)) == {str(n) for n in range(ROWS)}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_on_ray_a_repaired_job_equals_a_job_on_the_corrected_input(pair: jobs.Pair, tmp_path: Path) -> None:
    """Two shards, one of which has grown, on two actors that speculate with sampling."""
    settings: dict[str, Any] = {"actors": "2", "temperature": 1.0, "method": "exspec", "capacity": 64}
    with_, without = tmp_path / "repaired", tmp_path / "fresh"
    write(with_, rows()[:20], ".jsonl")
    write(without, rows(bad=()), ".jsonl")
    assert decode(pair, with_, **settings) == 0
    file = exported(with_, correct)
    write(with_, rows(), ".jsonl")
    prepared = prepare(jobs.job(pair, with_ / "in", with_ / "out", **SMALL | settings))
    assert execute(prepared, repair=partial(repaired, file, {})) == 0
    assert decode(pair, without, **settings) == 0
    assert len(outcome(with_)) == ROWS
    assert outcome(with_) == outcome(without)
