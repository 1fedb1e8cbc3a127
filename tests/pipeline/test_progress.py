"""The line that says which hosts decode, which are gone, and what the job waits for."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from exspec.actors.ledger import HostSigns, Signs
from exspec.pipeline import progress
from exspec.pipeline.output.report import Report
from exspec.pipeline.progress import SHOWN, Progress, hosts_line

NONE = Signs({}, 0.0)


def signs(seconds: float, **hosts: tuple[int, int, float]) -> Signs:
    """hosts: by name: actors alive, tokens, seconds of silence."""
    return Signs({name: HostSigns(*host) for name, host in hosts.items()}, seconds)


ONE = signs(60.0, one=(2, 6000, 1.0))
TWO = signs(60.0, two=(1, 36_600, 0.0), one=(2, 74_400, 1.0))
GONE = signs(120.0, two=(0, 40_000, 59.6), one=(2, 150_000, 1.0))
BACK = signs(180.0, two=(1, 58_000, 0.0), one=(2, 210_000, 1.0))
UNABLE = Signs(ONE.hosts, 60.0, unable={"two": "disk is full"})
LINES = {
    "one host": (ONE, NONE, "", ""),
    "one host that waits": (ONE, NONE, "waiting for x", "hosts: one (2 actors, 100 tokens/s); waiting for x"),
    "no host yet": (NONE, NONE, "waiting for x", "waiting for x"),
    "two hosts": (TWO, NONE, "", "hosts: one (2 actors, 1,240 tokens/s), two (1 actor, 610 tokens/s)"),
    "one gone": (GONE, TWO, "", "hosts: one (2 actors, 1,260 tokens/s); gone: two for 60 s"),
    "gone and back": (BACK, GONE, "", "hosts: one (2 actors, 1,000 tokens/s), two (1 actor, 300 tokens/s)"),
    "all gone": (signs(9.0, one=(0, 8, 150.0)), NONE, "waiting for x", "gone: one for 2 min; waiting for x"),
    "one has left": (signs(60.0, one=(2, 6000, 1.0), two=(0, 9, 0.0)), NONE, "", "hosts: one (2 actors, 100 tokens/s)"),
    "one cannot decode": (UNABLE, NONE, "", "hosts: one (2 actors, 100 tokens/s); cannot decode: two (disk is full)"),
    "no answer since": (TWO, TWO, "", "hosts: one (2 actors), two (1 actor)"),
    "no tokens, only vectors": (signs(9.0, a=(1, 0, 0.0), b=(1, 0, 0.0)), NONE, "", "hosts: a (1 actor), b (1 actor)"),
}  # fmt: skip


@pytest.mark.parametrize(("now", "before", "waiting", "line"), LINES.values(), ids=LINES)
def test_the_line(now: Signs, before: Signs, waiting: str, line: str) -> None:
    assert hosts_line(now, before, waiting) == line


@pytest.mark.parametrize(("alive", "gone"), [(8, 0), (40, 0), (40, 3), (40, 30), (0, 30)])
def test_a_line_about_many_hosts_is_short_and_counts_them_all(alive: int, gone: int) -> None:
    """The hosts that are gone come first, the latest of them before the others."""
    hosts = {f"up-{n:02}": (2, 1000, 0.0) for n in range(alive)} | {
        f"off-{n:02}": (0, 7, 20.0 + n) for n in range(gone)
    }
    line = hosts_line(signs(10.0, **hosts), NONE, "")
    lost = min(gone, SHOWN // 2)
    shown = min(alive, SHOWN - lost)
    assert [f"off-{n:02} for {20 + n} s" in line for n in range(gone)] == [True] * lost + [False] * (gone - lost)
    assert [f"up-{n:02} (2 actors, 100 tokens/s)" in line for n in range(alive)] == [n < shown for n in range(alive)]
    rest = alive - shown
    assert (f"{rest} more ({2 * rest} actors, {rest * 100:,} tokens/s)" in line) == (rest > 0)
    assert line.endswith(f"{gone - lost} more") == (gone > lost)


def lines(monkeypatch: pytest.MonkeyPatch, capsys: Any, actors: int, now: Signs, lacking: Callable[[bool], str]) -> Any:
    """What a job without a terminal prints about hosts in 0.5 s, with a minute of 0.1 s."""
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.setattr(progress, "MINUTE", 0.1)
    with Progress(quiet=False).decoding(Report({}, 4), 0, actors, lambda: now, lacking):
        time.sleep(0.5)
    printed = capsys.readouterr()
    assert printed.out == ""
    return [line for line in printed.err.splitlines() if " rows, " not in line]


def test_the_line_is_printed_every_minute(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    first, *later = lines(monkeypatch, capsys, 3, TWO, lambda _: "")
    assert first == LINES["two hosts"][-1]
    assert later
    assert set(later) == {LINES["no answer since"][-1]}


def test_one_host_that_does_all_is_not_worth_a_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert lines(monkeypatch, capsys, 2, ONE, lambda _: "") == []


def test_what_the_job_waits_for(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The reason is asked for each minute, and before that until there is one."""
    waits: list[bool] = []

    def lacking(late: bool) -> str:
        waits.append(late)
        return "loading" if late else ""

    found = lines(monkeypatch, capsys, 3, ONE, lacking)
    assert found[0] == "hosts: one (2 actors, 100 tokens/s); waiting for 1 of 3 actors: loading"
    assert sum(waits) == len(found)
    assert waits.index(True) == waits.count(False)
    left = Signs(ONE.hosts, 60.0, left=1)
    assert lines(monkeypatch, capsys, 3, left, lacking) == [], "an actor that was idle and left is not missing"
    unread = lines(monkeypatch, capsys, 1, signs(0.0, one=(1, 0, 0.0)), lambda _: "")
    assert unread[0] == "hosts: one (1 actor); waiting for the first chunk to be read"
