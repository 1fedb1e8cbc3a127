"""No row is lost, doubled or different, whatever process dies, and whenever."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from exspec.actors.engine import EngineConfig
from exspec.actors.engine.config import AttentionName
from exspec.pipeline.cluster.graph import PairLoader
from exspec.pipeline.job.settings import Job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.pipeline import jobs
from tests.pipeline.generators import generators

ROOT = Path(__file__).parents[2]


class Reaper(threading.Thread):
    """Kills `count` generators after the first part, at random moments."""

    def __init__(self, output: Path, count: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.output = output
        self.left, self.random, self.over = count, random.Random(seed), threading.Event()
        self.killed: list[int] = []

    def run(self) -> None:
        while self.left and not self.over.wait(self.random.uniform(0.2, 1.5)):
            if list(self.output.glob("part-*")) and (alive := generators(psutil.Process())):
                victim = self.random.choice(alive)
                os.kill(victim.pid, signal.SIGKILL)
                self.killed.append(victim.pid)
                self.left -= 1

    def __enter__(self) -> "Reaper":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_actors_killed_at_random_moments(pair: jobs.Pair, tmp_path: Path) -> None:
    with Reaper(tmp_path / "out", count=3, seed=1) as reaper:
        assert jobs.run(pair, tmp_path, 240, jobs.ArithmeticLoader(0.05), actors="2", attempts=20) == 0
    assert reaper.killed, "the job ended before anything died"
    jobs.assert_complete(tmp_path / "out", 240)
    assert jobs.report(tmp_path / "out")["repeated_chunks"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("most", "attempts"), [(4, 4), (3, 2)])
def test_an_actor_out_of_memory_comes_back_with_a_smaller_window(
    pair: jobs.Pair, tmp_path: Path, most: int, attempts: int
) -> None:
    """A window of 4, its batch, fits at last. If even that is too much, the chunk is set aside."""
    code = jobs.run(pair, tmp_path, 20, jobs.ForgetfulLoader(most), rows_per_chunk=20, attempts=attempts)
    report = jobs.report(tmp_path / "out")
    if most == 4:
        assert code == 0
        jobs.assert_complete(tmp_path / "out", 20)
        assert report["repeated_chunks"] > 0
    else:
        assert code == 1
        assert "died in each of 2 attempts (OutOfMemoryError: CUDA out of memory)" in report["set_aside"][0]


@pytest.mark.parametrize("attention", ["gathered", "auto"])
def test_a_smaller_window_has_fewer_pages(pair: jobs.Pair, tmp_path: Path, attention: AttentionName) -> None:
    """With either kind of attention. One row of the capacity always fits."""
    jobs.write_shards(tmp_path / "in", rows=20)
    job = jobs.job(pair, tmp_path / "in", tmp_path / "out")
    config = EngineConfig(batch_size=4, window=16, bucket=32, capacity=64, prefill_columns=8, attention=attention)
    load = PairLoader(job, config, "cpu")
    pages = {window: load(window)[0].config.page_count for window in (32, 16, 8, 2, 1)}
    assert pages == {32: 128, 16: 128, 8: 64, 2: 16, 1: 8}
    assert config.fewest_pages == 8


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_row_that_kills_its_process_becomes_an_error_row(pair: jobs.Pair, tmp_path: Path) -> None:
    poisoned = 29
    assert jobs.run(pair, tmp_path, 60, jobs.PoisonLoader(jobs.prompt(poisoned)), rows_per_chunk=20) == 0
    rows = jobs.read_output(tmp_path / "out")
    assert rows[str(poisoned)]["error"] == "the row ended the process that decoded it"
    assert [n for n in range(60) if n != poisoned and rows[str(n)]["completion"] != jobs.expected(n)] == []


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_chunk_that_always_kills_is_set_aside_and_named(pair: jobs.Pair, tmp_path: Path, capsys: Any) -> None:
    """After the given number of attempts. The rest is decoded, and the exit code says that rows are missing."""
    settings = {"rows_per_chunk": 20, "attempts": 2}
    assert jobs.run(pair, tmp_path, 60, jobs.PoisonLoader(jobs.prompt(29)), **settings) == 1
    assert "set aside:" in (printed := capsys.readouterr().out)
    assert "shard-1.parquet, rows 0 to 19: its process died in each of 2 attempts" in printed
    rows = jobs.read_output(tmp_path / "out")
    assert set(rows) == {str(n) for n in range(60) if not 20 <= n < 40}
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert jobs.run(pair, tmp_path, **settings) == 0
    jobs.assert_complete(tmp_path / "out", 60)


def start_driver(job: Job, folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    (folder / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "tests.pipeline.driver", str(folder / "job.json"), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_parts(folder: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while len(list(folder.glob("part-*"))) < count:
        assert process.poll() is None, "the driver ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_the_driver_killed_and_run_again(pair: jobs.Pair, tmp_path: Path) -> None:
    jobs.write_shards(tmp_path / "in", rows=120)
    job = jobs.job(pair, tmp_path / "in", tmp_path / "out")
    driver = start_driver(job, tmp_path, 0.05)
    wait_for_parts(tmp_path / "out", 3, driver)
    driver.kill()
    driver.wait()
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("part-*")}
    assert 3 <= len(kept) < 15
    assert execute(prepare(job), load=jobs.ArithmeticLoader()) == 0
    jobs.assert_complete(tmp_path / "out", 120)
    assert all(p.stat().st_mtime_ns == then for p, then in kept.items())


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_the_pool_is_never_drained(pair: jobs.Pair, tmp_path: Path) -> None:
    """With many chunks and heavy-tailed lengths, chunks in flight keep the rows of every round busy."""
    load = jobs.ArithmeticLoader(0.002)
    assert jobs.run(pair, tmp_path, 1200, load, rows_per_chunk=24, chunks_in_flight=6) == 0
    jobs.assert_complete(tmp_path / "out", 1200)
    assert jobs.report(tmp_path / "out")["occupancy"] > 0.9
