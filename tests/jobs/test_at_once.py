"""The real command: run twice at once, killed, and run again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from exspec.jobs.demo.shards import write_shards
from tests.jobs.calls import MAIN, rows_of
from tests.pipeline.generators import held
from tests.pipeline.jobs import wait_for_parts

SHAPE = ["--method", "plain", "--batch-size", "2", "--window", "2", "--rows-per-chunk", "4", "--actors", "1"]


def start(place: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAIN, *words]
    return subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str], code: int) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, (out, err)
    return out + err


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_second_command_exits_and_a_command_after_a_kill_resumes(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", 96, 3)
    run = ["run", "--input", "in", "--output", "out", "--quiet", *SHAPE]
    first = start(tmp_path, *run)
    wait_for_parts(tmp_path / "out", 2, first)
    with held(psutil.Process(first.pid)):
        for words in (run, [*run, "--restart"], ["compact", "out"]):
            printed = end(start(tmp_path, *words), 2)
            assert f"out: in use by run on {os.uname().nodename} (process {first.pid}) since" in printed
        assert first.poll() is None
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    kept = {path.name for path in (tmp_path / "out").glob("part-*")}
    assert 2 <= len(kept) < 24
    waiting = start(tmp_path, *run)
    wait_for_parts(tmp_path / "out", len(kept) + 1, waiting)
    after = start(tmp_path, *run, "--wait")  # like a nightly job, which starts whether or not the last one has ended
    assert "96 of 96 rows" in end(waiting, 0)
    assert "nothing to do: all 96 rows" in end(after, 0), "the process that it waited for did all rows"
    assert kept <= {path.name for path in (tmp_path / "out").glob("part-*")}, "finished parts are kept"
    assert "1 file instead of 24" in end(start(tmp_path, "compact", "out"), 0)
    assert "nothing to do: all 96 rows" in end(start(tmp_path, *run), 0)
    rows = rows_of(tmp_path / "out")
    assert len({(row["shard"], row["row"]) for row in rows}) == len(rows) == 96
    assert (tmp_path / "out" / "_SUCCESS").exists()
