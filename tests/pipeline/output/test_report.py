"""The report of a job: what each host decoded."""

from pathlib import Path
from typing import Any

from exspec.pipeline.output.owner import read_output
from exspec.pipeline.output.report import Report, rewrite
from exspec.pipeline.output.state import Summary
from exspec.pipeline.output.totals import Totals
from exspec.pipeline.storage import Folder
from tests.pipeline import jobs

CARD, OTHER = {"device": "H200", "torch": "2"}, {"device": "H100", "torch": "2"}


def chunk(host: str, actor: str, started: float, ended: float, **more: Any) -> Summary:
    given = {"shard": 0, "first": 0, "rows": 8, "errors": 0, "prompt_tokens": 5, "completion_tokens": 30}
    times = {"actor": actor, "started": started, "ended": ended}
    return Summary.from_json(given | times | ({"host": host} if host else {}) | more)


def figures(chunks: list[Summary], kind: str = "run") -> dict[str, Any]:
    report = Report({"kind": kind}, 100)
    for summary in chunks:
        report.totals.add(summary, "s.parquet")
    found: dict[str, Any] = report.figures()["hosts"]
    return found


def test_the_figures_of_a_host_are_those_of_its_chunks() -> None:
    """Time counts once if several actors decode, and not between chunks."""
    chunks = [
        chunk("one", "a", 0, 10, hardware=CARD),
        chunk("one", "b", 5, 15, hardware=CARD, completion_tokens=7),
        chunk("one", "a", 20, 21.5, hardware=OTHER),
        chunk("two", "c", 1, 2, hardware=OTHER),
        chunk("", "d", 3, 4),
    ]
    assert figures(chunks) == {
        "unknown": {"hardware": "", "actors": 1, "rows": 8, "tokens": 30, "seconds": 1.0},
        "one": {"hardware": "2, H100; 2, H200", "actors": 2, "rows": 24, "tokens": 67, "seconds": 16.5},
        "two": {"hardware": "2, H100", "actors": 1, "rows": 8, "tokens": 30, "seconds": 1.0},
    }
    assert figures(chunks, "embed")["one"]["tokens"] == 15, "tokens of prompts"


def test_the_time_of_many_chunks_takes_little_memory() -> None:
    """A pause of 0.1 s after each chunk, and one of an hour. The hour stays out of the decoding time."""
    totals, count = Totals(), 5000
    for n in range(count):
        start = n * 1.1 + (3600 if n >= count // 2 else 0)
        totals.add(chunk("one", "a", start, start + 1), "s.parquet")
    spans = totals.hosts["one"].spans
    assert len(spans) < 1000
    assert count <= sum(end - start for start, end in spans) <= count * 1.1


def test_the_page_has_a_table_of_several_hosts(pair: jobs.Pair, tmp_path: Path) -> None:
    assert jobs.run(pair, tmp_path, rows=16, rows_per_chunk=8) == 0
    page, out = tmp_path / "out" / "_report.html", tmp_path / "out"
    assert "<h2>Hosts</h2>" not in page.read_text(), "there is one"
    hosts = iter(["gpu-1", "gpu<2>", *["gpu-3"] * 9])
    jobs.edit_files(out, lambda file: [made.update(host=next(hosts)) for made in file["chunks"]])
    _, found = rewrite(read_output(Folder(str(out))))
    assert jobs.report(out)["hosts"] == found["hosts"]
    assert {"gpu-1", "gpu<2>"} <= set(found["hosts"])
    table = page.read_text().partition("<h2>Hosts</h2>")[2].partition("</table>")[0]
    assert table.count("<tr>") == 1 + len(found["hosts"])
    for name in ("gpu-1", "gpu&lt;2&gt;"):
        assert f"<tr><td>{name}</td>" in table
    assert f'<td class="number">{found["hosts"]["gpu-1"]["rows"]}</td>' in table
