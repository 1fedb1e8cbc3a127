"""The real command, twice at once, killed, and run again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from exspec.jobs.demo.shards import write_shards
from tests.pipeline.generators import held

COMMAND = [sys.executable, "-c", "from exspec.jobs.cli import main; main()"]
SHAPE = ["--method", "plain", "--batch-size", "2", "--window", "2", "--rows-per-chunk", "4", "--actors", "1"]


def start(place: Path, *words: str) -> subprocess.Popen[str]:
    command = [*COMMAND, *words]
    return subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str], code: int) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, (out, err)
    return out + err


def await_parts(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 300
    while len(list(out.glob("part-*"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_second_command_leaves_and_one_after_a_kill_goes_on(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", 96, 3, 5)
    run = ["run", "--input", "in", "--output", "out", "--quiet", *SHAPE]
    first = start(tmp_path, *run)
    await_parts(tmp_path / "out", 2, first)
    with held(psutil.Process(first.pid)):
        for words in (run, [*run, "--restart"], ["compact", "out"]):
            told = end(start(tmp_path, *words), 2)
            assert f"out: in use by run on {os.uname().nodename} (process {first.pid}) since" in told
        assert first.poll() is None
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    kept = {path.name for path in (tmp_path / "out").glob("part-*")}
    assert 2 <= len(kept) < 24
    waiting = start(tmp_path, *run)
    await_parts(tmp_path / "out", len(kept) + 1, waiting)
    after = start(tmp_path, *run, "--wait")  # as a job that starts every night, whatever became of the last
    assert "96 of 96 rows" in end(waiting, 0)
    assert "nothing to do: all 96 rows" in end(after, 0), "the one that it waited for has done them"
    assert kept <= {path.name for path in (tmp_path / "out").glob("part-*")}, "what was done stays"
    assert "24 files are 1 now" in end(start(tmp_path, "compact", "out"), 0)
    assert "nothing to do: all 96 rows" in end(start(tmp_path, *run), 0)
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert len({(row["shard"], row["row"]) for row in rows}) == len(rows) == 96
    assert (tmp_path / "out" / "_SUCCESS").exists()
