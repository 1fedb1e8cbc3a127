"""A finished output that something changed: what each command says of it, and with which exit code."""

import json
import shutil
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exspec.actors import generator
from exspec.jobs.cli import main
from exspec.pipeline.input.plan import Plan
from exspec.pipeline.output.owner import read_output
from exspec.pipeline.output.state import Summary
from exspec.pipeline.output.totals import MOST_BINS, Totals
from exspec.pipeline.storage import Folder
from tests.jobs.calls import rows_of
from tests.pipeline import jobs
from tests.pipeline.conftest import _in_process, pair  # noqa: F401
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
def finished(pair: jobs.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
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
def place(finished: Path, pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
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


def flip(path: Path, share: float) -> None:
    """Flip a bit of a file, at a share of its length."""
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def misspell(place: Path, which: int = 1) -> None:
    """Change words in a part. Its size stays the same, and the checksums of its pages are right."""
    part = parts(place)[which]
    file, before = pq.ParquetFile(part), part.stat().st_size
    table = file.read()
    words = [text and f"{text[:-1]}{9 - int(text[-1])}" for text in table["completion"].to_pylist()]
    changed = table.set_column(table.schema.get_field_index("completion"), "completion", pa.array(words))
    pq.write_table(changed.cast(table.schema), part, write_page_checksum=True)
    assert part.stat().st_size == before


def swap(place: Path) -> None:
    first, second, _ = parts(place)
    first.rename(place / "aside")
    second.rename(first)
    (place / "aside").rename(second)


NAME = r"out/part-000000\d-0{12}-8-00000\d\.parquet: "
DAMAGED = rf"{NAME}is damaged; remove it and run the job again\n"
FINE = "all 3 files are as the log says"
NOTHING = "nothing to do: all 24 rows are in"
REFUSED: Told = {name: (2, DAMAGED) for name in ("convert", "partition", "compact", "audit")} | {"check": (1, DAMAGED)}
LOST = "8 of 24 rows are missing"

# An edit of the output, and what the commands say of it.
EDITS: dict[str, tuple[Edit, Told]] = {
    "nothing at all": (
        lambda _: None,
        {"report": (0, ""), "convert": (0, "24 rows in"), "check": (0, FINE), "run": (0, NOTHING)},
    ),
    "a flipped bit in the rows of a part": (
        lambda place: flip(parts(place)[1], 0.05),
        REFUSED | {"report": (0, ""), "run": (0, NOTHING)},
    ),
    "other words of the same length in a part": (misspell, REFUSED | {"report": (0, ""), "run": (0, NOTHING)}),
    "other words of the same length in the part that a retry rewrites": (
        lambda place: misspell(place, 0),
        {"retry": (2, DAMAGED)},
    ),
    "a flipped bit in the footer of the first part": (
        lambda place: flip(parts(place)[0], 0.999),
        REFUSED | {"report": (2, rf"{NAME}cannot be read \(.*\); remove it and run the job again\n")}
        | {"convert": (2, NAME), "partition": (2, NAME)},
    ),
    "two parts swapped": (swap, {"check": (1, f"({DAMAGED}.*){{2}}"), "run": (0, "24 of 24 rows")}),
    "a part cut in half": (
        lambda place: cut(parts(place)[1]),
        REFUSED | {"compact": (2, LOST), "report": (2, f"{NAME}cannot be read"), "run": (0, "24 of 24 rows")},
    ),
    "a part removed": (
        lambda place: parts(place)[1].unlink(),
        {name: (2, f"{NAME}has vanished; run the job again") for name in ("convert", "partition", "audit")}
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
    import re

    EDITS[edit][0](place)
    found, printed = outcome(command, capsys)
    assert "Traceback" not in printed
    assert re.search(words, printed, re.DOTALL), printed
    assert found == code
