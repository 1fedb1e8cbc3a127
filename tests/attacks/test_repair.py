"""Rows that failed are exported, corrected and decoded again; settings that help only those change; files grow."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exspec.jobs.commands.repair import export
from exspec.pipeline.errors import JobError
from exspec.pipeline.output.compact import compact
from exspec.pipeline.output.owner import read_output
from exspec.pipeline.storage import Folder
from tests.jobs.calls import call, rows_of, succeed
from tests.pipeline import jobs
from tests.pipeline.conftest import _in_process, pair  # noqa: F401
from tests.pipeline.in_process import in_process as jobs_in_process

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
    """Write the rows in two shards."""
    (place / "in").mkdir(parents=True, exist_ok=True)
    for number, part in enumerate((given[:12], given[12:])):
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
def failed(pair: jobs.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A finished job in which three rows have an error."""
    place = tmp_path_factory.mktemp("failed")
    write(place, rows())
    with jobs_in_process():
        assert jobs.run(pair, place) == 0
    return place


@pytest.fixture(scope="module")
def fresh(pair: jobs.Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:  # noqa: F811
    """What the same job writes if its input is good from the start."""
    place = tmp_path_factory.mktemp("fresh")
    write(place, rows(bad=()))
    with jobs_in_process():
        assert jobs.run(pair, place) == 0
    return outcome(place)


@pytest.fixture
def place(failed: Path, tmp_path: Path) -> Path:
    """A copy of the failed job; its input lies where it did."""
    shutil.copytree(failed / "out", tmp_path / "out")
    shutil.copytree(failed / "in", tmp_path / "in")
    return tmp_path


def repair(pair: jobs.Pair, place: Path, file: Path, **settings: Any) -> int:  # noqa: F811
    return jobs.run(pair, place, repair=file, **settings)


def test_a_repaired_job_equals_a_job_on_the_corrected_input(
    pair: jobs.Pair,  # noqa: F811
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
    assert "retried: 3 rows; 3 of them are done now" in capsys.readouterr().out
