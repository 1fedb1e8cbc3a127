"""A finished output that something changed: what each command says of it, and with which exit code."""

import json
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exspec.actors import generator
from exspec.jobs.cli import main
from exspec.jobs.commands import check
from exspec.jobs.commands.convert import convert
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.plan import Plan
from exspec.pipeline.output import contents
from exspec.pipeline.output.compact import compact, mend
from exspec.pipeline.output.contents import samples
from exspec.pipeline.output.owner import read_output, take
from exspec.pipeline.output.report import rebuild, stored_audit
from exspec.pipeline.output.state import Summary
from exspec.pipeline.output.totals import MOST_BINS, Totals, _spread
from exspec.pipeline.storage import Folder
from tests.jobs.calls import rows_of
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process

ROWS, DAY = 24, 86_400.0
COMMANDS = {
    "report": ["report", "out"],
    "convert": ["convert", "out", "rows.csv"],
    "partition": ["convert", "out", "folders", "--partition-by", "shard"],
    "compact": ["compact", "out"],
    "audit": ["audit", "out", "--share", "1", "--no-generate"],
    "check": ["check", "out"],
    "run": ["run", "--job", "job.json", "--quiet"],
    "retry": ["run", "--job", "job.json", "--quiet", "--retry-errors"],
}
Edit = Callable[[Path], Any]
Told = dict[str, tuple[int, str]]  # by command: exit code and words of its message


@pytest.fixture(scope="module")
def finished(pair: jobs.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job of three parts, with a row that failed, and its input, report and audit. Tests copy it."""
    place = tmp_path_factory.mktemp("finished")
    with in_process(), pytest.MonkeyPatch.context() as patch:
        assert jobs.run(pair, place, ROWS, jobs.RefusingLoader(jobs.prompt(3)), rows_per_chunk=8, method="plain") == 0
        patch.chdir(place)
        patch.setattr(sys, "argv", ["exspec", *COMMANDS["audit"]])
        with pytest.raises(SystemExit):
            main()  # the arithmetic model is not the job's, so all rows differ
    assert len(parts(place)) == 3
    return place


@pytest.fixture
def place(finished: Path, pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copied = Path(shutil.copytree(finished, tmp_path / "job"))
    (copied / "job.json").write_text(jobs.job(pair, copied / "in", copied / "out", method="plain").model_dump_json())
    monkeypatch.chdir(copied)
    return copied


def parts(place: Path) -> list[Path]:
    return sorted((place / "out").glob("part-*"))


def outcome(command: str, capsys: Any) -> tuple[int, str]:
    """The exit code of a command, and what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["exspec", *COMMANDS[command]])
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as end:
            main()
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out + printed.err


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def misspell(place: Path, which: int = 1) -> None:
    """Change one digit in a part. Its size stays the same, and the checksums of its pages are right."""
    part = parts(place)[which]
    before, table = part.read_bytes(), pq.ParquetFile(part).read()
    column, words = table.schema.get_field_index("completion"), table["completion"].to_pylist()
    for row, digit in product(range(len(words)), "0123456789"):
        if words[row]:
            other = [*words[:row], words[row][:-1] + digit, *words[row + 1 :]]
            changed = table.set_column(column, table.schema.field(column), pa.array(other))
            pq.write_table(changed, part, write_page_checksum=True)
            if part.stat().st_size == len(before) and part.read_bytes() != before:
                return
    raise AssertionError("every change of a digit changes the size")


def swap(place: Path) -> None:
    first, second, _ = parts(place)
    first.rename(place / "aside")
    second.rename(first)
    (place / "aside").rename(second)


NAME = r"out/part-000000\d-0{12}-8-00000\d\.parquet: "
DAMAGED = rf"{NAME}is damaged; remove it and run the job again\n"
FINE = "3 files, all as the log says"
NOTHING = "nothing to do: all 24 rows are in"
REFUSED: Told = dict.fromkeys(("convert", "partition", "compact", "audit"), (2, DAMAGED)) | {"check": (1, DAMAGED)}
LOST = "8 of 24 rows are missing"

# An edit of the output, and what the commands say of it.
EDITS: dict[str, tuple[Edit, Told]] = {
    "nothing at all": (
        lambda _: None,
        {"report": (0, ""), "convert": (0, "24 rows in"), "check": (0, FINE), "run": (0, NOTHING)},
    ),
    "a flipped bit in the rows of a part": (
        lambda place: flip(parts(place)[1], 500),
        REFUSED | {"report": (0, ""), "run": (0, NOTHING)},
    ),
    "other words of the same length in a part": (misspell, REFUSED | {"report": (0, ""), "run": (0, NOTHING)}),
    "other words of the same length in the part that a retry rewrites": (
        lambda place: misspell(place, 0),
        {"retry": (1, DAMAGED)},
    ),
    "a flipped bit in the footer of the first part": (
        lambda place: flip(parts(place)[0], -6),
        REFUSED | {"report": (2, rf"{NAME}cannot be read \(.*\); remove it and run the job again\n")}
        | {"convert": (2, NAME), "partition": (2, NAME)},
    ),
    "two parts swapped": (
        swap,
        {"convert": (2, DAMAGED), "audit": (2, DAMAGED)}
        | {"check": (1, f"({DAMAGED}.*){{2}}"), "run": (0, "24 of 24 rows")},
    ),
    "a part cut in half": (
        lambda place: cut(parts(place)[1]),
        REFUSED | {"compact": (2, LOST), "report": (2, f"{NAME}cannot be read"), "run": (0, "24 of 24 rows")},
    ),
    "a part removed": (
        lambda place: parts(place)[1].unlink(),
        dict.fromkeys(("convert", "partition", "audit"), (2, f"{NAME}has vanished; run the job again"))
        | {"compact": (2, LOST), "check": (1, f"{NAME}has vanished; run the job again"), "run": (0, "24 of 24 rows")},
    ),
    "all parts removed": (
        lambda place: [part.unlink() for part in parts(place)],
        {"report": (2, f"{NAME}has vanished; run the job again"), "check": (1, f"({NAME}has vanished.*){{3}}")},
    ),
    "a copy of a part beside it": (
        lambda place: shutil.copy(parts(place)[0], place / "out" / "rows.parquet"),
        {"check": (1, r"out/rows.parquet: is not in the log; move it away"), "convert": (0, "24 rows in")},
    ),
    "no _SUCCESS": (
        lambda place: (place / "out" / "_SUCCESS").unlink(),
        {"check": (1, "out/_SUCCESS: is missing; run the job again"), "run": (0, NOTHING)},
    ),
    "a cut _report.json": (
        lambda place: cut(place / "out" / "_report.json"),
        {"report": (0, ""), "convert": (0, "24 rows in"), "check": (0, FINE), "run": (0, NOTHING)},
    ),
    "a _report.json with an occupancy of infinity": (
        lambda place: (place / "out" / "_report.json").write_text('{"occupancy": Infinity}'),
        {"report": (0, "")},
    ),
    "a _report.json that is a list": (
        lambda place: (place / "out" / "_report.json").write_text("[]"),
        {"report": (0, "")},
    ),
    "a cut _audit.json": (
        lambda place: cut(place / "out" / "_audit.json"),
        {"report": (2, r"out/_audit.json: cannot be read \(.*\); remove it, or audit the job again"), "audit": (1, "")},
    ),
    "an _audit.json of numbers": (
        lambda place: (place / "out" / "_audit.json").write_text('{"sample": 1, "seed": 1, "comparisons": 3}'),
        {"report": (2, "out/_audit.json: cannot be read")},
    ),
    "an _audit.json that is not text": (
        lambda place: (place / "out" / "_audit.json").write_bytes(b"\xff\xfe"),
        {"report": (2, "out/_audit.json: cannot be read")},
    ),
}  # fmt: skip
CASES = [pytest.param(e, c, *told[c], id=f"{e}, then {c}") for e, (_, told) in EDITS.items() for c in told]


@pytest.mark.parametrize(("edit", "command", "code", "words"), CASES)
def test_a_changed_output(edit: str, command: str, code: int, words: str, place: Path, capsys: Any) -> None:
    EDITS[edit][0](place)
    found, printed = outcome(command, capsys)
    assert "Traceback" not in printed
    assert re.search(words, printed, re.DOTALL), printed
    assert found == code


def test_a_file_that_check_names_is_mended_by_removing_it(place: Path, capsys: Any) -> None:
    before = rows_of(place / "out")
    misspell(place)
    _, printed = outcome("check", capsys)
    Path(printed.partition(": ")[0]).unlink()
    assert outcome("run", capsys)[0] == 0
    assert outcome("check", capsys)[0] == 0
    assert [row["id"] for row in rows_of(place / "out")] == [row["id"] for row in before]


@pytest.mark.parametrize("damage", ["a flipped bit in the footer of the first part", "a cut _audit.json"])
def test_a_run_that_finds_damage_when_it_ends_has_not_been_refused(damage: str, place: Path, capsys: Any) -> None:
    """It decodes new rows first, and keeps them."""
    shutil.copy(place / "in" / "shard-0.parquet", place / "in" / "shard-9.parquet")
    EDITS[damage][0](place)
    code, printed = outcome("run", capsys)
    assert (code, "Traceback" in printed) == (1, False)
    assert re.search(EDITS[damage][1]["report"][1], printed)
    assert read_output(Folder(str(place / "out"))).state.complete


def test_damage_in_a_merged_file_is_found(place: Path, capsys: Any) -> None:
    assert outcome("compact", capsys)[0] == 0
    flip(parts(place)[0], 500)
    for command in ("convert", "audit", "check"):
        assert outcome(command, capsys)[0] == REFUSED[command][0]
    output, damaged = read_output(Folder(str(place / "out"))), pytest.raises(JobError, match="is damaged; remove it")
    with damaged, take(output, "retry") as writer:
        mend(writer, parts(place)[0].name, [])


def test_files_that_are_merged_while_check_reads_are_not_damaged(place: Path, capsys: Any, monkeypatch: Any) -> None:
    problem, first, lock = check._problem, iter([True]), Lock()

    def later(*given: Any) -> str | None:
        with lock:
            if next(first, False):
                assert compact(Folder(str(place / "out")), 1 << 20).after == 1
        return problem(*given)

    monkeypatch.setattr(check, "_problem", later)
    assert outcome("check", capsys)[0] == 0
    assert len(parts(place)) == 1


def test_damage_on_object_storage(place: Path, moto: dict[str, Any], capsys: Any) -> None:
    fs = s3fs.S3FileSystem(**moto, skip_instance_cache=True)
    fs.mkdir("damage")
    fs.put(str(place / "out"), "damage/out", recursive=True)
    words = "s3://damage/out", moto
    assert check.check(*words) == 0
    misspell(place)
    fs.put_file(str(parts(place)[1]), f"damage/out/{parts(place)[1].name}")
    assert check.check(*words) == 1
    assert re.search(f"s3://damage/{DAMAGED}", capsys.readouterr().out)
    with pytest.raises(JobError, match="is damaged"):
        convert("s3://damage/out", "rows.csv", moto)


def test_no_file_is_left_where_convert_was_refused(place: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(contents, "READ_AHEAD", 1)  # the damage is found after the first part is written
    before = set(place.iterdir())
    misspell(place, 2)
    for command in ("convert", "partition"):
        assert outcome(command, capsys)[0] == 2
        assert set(place.iterdir()) == before


def set_times(place: Path, started: float, ended: float) -> None:
    """Change the times of the first chunk in the log."""
    first, times = parts(place)[0].name, {"started": started, "ended": ended}
    jobs.edit_files(place / "out", lambda file: file["chunks"][0].update(times if file["name"] == first else {}))


# Times of a chunk in the log: when it started and ended, in seconds since 1970.
NOW = 1.8e9
TIMES = {
    "a chunk of a day": (NOW, NOW + DAY),
    "a chunk of 30 days": (NOW, NOW + 30 * DAY),
    "a chunk of 56 years": (0.0, NOW),
    "a chunk that ended before it started": (NOW, NOW - DAY),
    "a chunk of another year": (NOW + 400 * DAY, NOW + 400 * DAY + 1),
    "a chunk before 1970": (-1e10, -1e10 + 1),
    "a chunk of 3,000 years": (0.0, 1e11),
}  # fmt: skip


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_the_plot_of_tokens_by_time_is_small_whatever_the_times(
    times: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once had a bin for every sixteenth of a second. No chunk adds so many, even before they are widened."""
    most = []

    def counted(bins: Counter[int], *rest: Any) -> None:
        _spread(bins, *rest)
        most.append(len(bins))

    monkeypatch.setattr("exspec.pipeline.output.totals._spread", counted)
    totals, usual = Totals(), Summary(0, 0, 8, 0, completion_tokens=7, started=NOW, ended=NOW + 1)
    odd = Summary(0, 8, 8, 0, completion_tokens=5, started=times[0], ended=times[1], produced=[1.0, 0.0, 4.0])
    for summary in (usual, odd, usual):
        totals.add(summary, "s.parquet")
    assert len(most) == 6
    assert max(most) <= MOST_BINS + 1
    assert max(totals.bins) - min(totals.bins) <= MOST_BINS + 1
    assert sum(totals.bins.values()) == pytest.approx(19)
    assert all(start <= end for start, end in totals.spans)
    assert min(seconds for seconds, _, _ in totals.slowest) >= 0


@pytest.mark.parametrize("times", ["a chunk of 56 years", "a chunk that ended before it started"])
def test_odd_times_in_the_log_can_be_reported(times: str, place: Path, capsys: Any) -> None:
    set_times(place, *TIMES[times])
    assert outcome("report", capsys)[0] == 0
    assert json.loads((place / "out" / "_report.json").read_text())["seconds"] >= 0


# What the log says of the first chunk of a part.
SUMMARIES: dict[str, dict[str, Any]] = {
    "a negative number of rows": {"rows": -8},
    "rows as words": {"rows": "eight"},
    "more rows than any file has": {"rows": 10**30},
    "a row that is not planned": {"first": 10**6},
    "a shard that is not planned": {"shard": 99},
    "errors as a list": {"errors": [1]},
    "a time of infinity": {"ended": float("inf")},
    "a time that is no number": {"started": float("nan")},
    "a time as text": {"started": "noon"},
    "lengths that are no numbers": {"lengths": {"long": 1}},
    "negative tokens by position": {"drafted_by_position": [-1]},
    "tokens over time as a number": {"produced": 3},
    "infinitely many tokens": {"produced": [float("inf")]},
    "reasons without a text": {"reasons": [{"rows": 1}]},
    "reasons as a text": {"reasons": "broken"},
    "hardware as a list": {"hardware": ["cpu"]},
}


@pytest.mark.parametrize("summary", SUMMARIES)
def test_an_odd_summary_is_refused_by_every_command(summary: str, place: Path, capsys: Any) -> None:
    jobs.edit_files(place / "out", lambda file: file["chunks"][0].update(SUMMARIES[summary]))
    for command in ("report", "convert", "check"):
        code, printed = outcome(command, capsys)
        assert (code, "Traceback" in printed) == (2, False), printed
        assert re.search(r"out/_log/0{9}\d\.json\.gz: not a valid log entry", printed)


@pytest.mark.parametrize("name", ["shard", "first", "rows", "errors"])
def test_a_summary_without_a_count_is_refused(name: str, place: Path, capsys: Any) -> None:
    jobs.edit_files(place / "out", lambda file: file["chunks"][0].pop(name))
    for command in ("report", "convert"):
        code, printed = outcome(command, capsys)
        assert (code, "Traceback" in printed, "not a valid log entry" in printed) == (2, False, True), printed


def test_durations_are_right_while_the_clock_jumps(pair: jobs.Pair, tmp_path: Path, monkeypatch: Any) -> None:
    """It jumps by 30 days whenever an actor looks."""
    jumps = iter(range(1, 1000))
    clock = SimpleNamespace(**vars(time) | {"time": lambda: NOW + next(jumps) * 30 * DAY})
    monkeypatch.setattr(generator, "time", clock)
    assert jobs.run(pair, tmp_path, ROWS) == 0
    for summary in read_output(Folder(str(tmp_path / "out"))).state.summaries():
        assert 0 <= summary.ended - summary.started < DAY
        assert sum(summary.produced) == pytest.approx(summary.completion_tokens, abs=1)


def test_planned_rows_are_not_counted_one_by_one(place: Path, capsys: Any, monkeypatch: Any) -> None:
    """A log may say that a shard has so many rows that a loop over its chunks would take hours."""

    def grow(entry: dict[str, Any]) -> None:
        for shard in entry.get("plan", {}).get("shards", ()):
            shard["rows"] = 10**9

    jobs.edit_log(place / "out", grow)
    chunks = Plan.chunks

    def few(plan: Plan, done: Any = ()) -> Any:
        for count, chunk in enumerate(chunks(plan, done)):
            assert count < 10_000, "a loop over all planned chunks"
            yield chunk

    monkeypatch.setattr(Plan, "chunks", few)
    for command in ("convert", "partition", "compact"):
        code, printed = outcome(command, capsys)
        assert (code, "2999999976 of 3000000000 rows are missing" in printed) == (2, True)
    assert outcome("check", capsys)[0] == 0
    assert outcome("report", capsys)[0] == 0


def edited(content: bytes, at: int, kind: str) -> bytes:
    """The content with a change at a place."""
    at %= len(content)
    flipped = bytes([content[at] ^ 1 << at % 8])
    return {
        "flip": content[:at] + flipped + content[at + 1 :],
        "cut": content[:at],
        "insert": content[:at] + flipped + content[at:],
        "zeros": content[:at] + bytes(len(content) - at),
    }[kind]


@settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(which=st.integers(0, 99), at=st.integers(0, 1 << 20), kind=st.sampled_from(["flip", "cut", "insert", "zeros"]))
def test_whatever_is_damaged_convert_writes_the_same_rows_or_refuses(
    which: int, at: int, kind: str, finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also the report, which does not compare digests, either comes or is refused in one sentence."""
    place = tmp_path_factory.getbasetemp() / "fuzzed"
    if not place.exists():
        shutil.copytree(finished, place)
        convert(str(place / "out"), str(place / "right.csv"), {})
    files = sorted(path for path in (place / "out").rglob("*") if path.is_file())
    path = files[which % len(files)]
    before = path.read_bytes()
    path.write_bytes(edited(before, at, kind))
    try:
        with suppress(JobError):
            convert(str(place / "out"), str(place / "rows.csv"), {})
            assert (place / "rows.csv").read_bytes() == (place / "right.csv").read_bytes()
        with suppress(JobError):
            output = read_output(Folder(str(place / "out")))
            rebuild(output).figures()
            stored_audit(output.folder)
            samples(output, 3)
    finally:
        path.write_bytes(before)
