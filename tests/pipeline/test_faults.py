"""No row is lost, doubled or different, whatever process or node dies, and whenever."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pipeline import jobs
from tests.pipeline.generators import generators

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]


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


def test_actors_killed_at_random_moments(pair: jobs.Pair, tmp_path: Path) -> None:
    with Reaper(tmp_path / "out", count=3, seed=1) as reaper:
        assert jobs.run(pair, tmp_path, 240, jobs.ArithmeticLoader(0.05), actors="2", attempts=20) == 0
    assert reaper.killed, "the job ended before anything died"
    jobs.assert_complete(tmp_path / "out", 240)
    assert jobs.report(tmp_path / "out")["repeated_chunks"] > 0


def test_an_actor_halves_its_window_until_the_models_fit(pair: jobs.Pair, tmp_path: Path) -> None:
    """More often than Ray lets an actor fail to start."""
    assert jobs.run(pair, tmp_path, 20, jobs.TightLoader(window=64)) == 0
    jobs.assert_complete(tmp_path / "out", 20)


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


def test_a_row_that_kills_its_process_becomes_an_error_row(pair: jobs.Pair, tmp_path: Path) -> None:
    poisoned = 29
    assert jobs.run(pair, tmp_path, 60, jobs.PoisonLoader(jobs.prompt(poisoned)), rows_per_chunk=20) == 0
    rows = jobs.read_output(tmp_path / "out")
    assert rows[str(poisoned)]["error"] == "the row ended the process that decoded it"
    assert [n for n in range(60) if n != poisoned and rows[str(n)]["completion"] != jobs.expected(n)] == []


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


def test_the_driver_killed_and_run_again(pair: jobs.Pair, tmp_path: Path) -> None:
    driver = jobs.started(pair, tmp_path, parts=3)
    driver.kill()
    driver.wait()
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("part-*")}
    assert 3 <= len(kept) < 15
    assert jobs.run(pair, tmp_path) == 0
    jobs.assert_complete(tmp_path / "out", 120)
    assert all(p.stat().st_mtime_ns == then for p, then in kept.items())


def test_the_pool_is_never_drained(pair: jobs.Pair, tmp_path: Path) -> None:
    """With many chunks and heavy-tailed lengths, chunks in flight keep the rows of every round busy."""
    load = jobs.ArithmeticLoader(0.002)
    assert jobs.run(pair, tmp_path, 1200, load, rows_per_chunk=24, chunks_in_flight=6) == 0
    jobs.assert_complete(tmp_path / "out", 1200)
    assert jobs.report(tmp_path / "out")["occupancy"] > 0.9


def test_a_node_lost_with_its_actor_and_its_chunks(pair: jobs.Pair, tmp_path: Path) -> None:
    """Its chunks run again on the other node: every row once, exit code 0."""
    jobs.write_shards(tmp_path / "in", rows=120)
    job = jobs.job(pair, tmp_path / "in", tmp_path / "out", actors="2", attempts=20)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "tests.pipeline.lost_node", str(tmp_path / "job.json"), "0.05"]
    # The cluster of this test must not use a token of the tests' environment.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_A")}
    done = subprocess.run(command, cwd=jobs.ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "node lost after" in done.stdout
    jobs.assert_complete(tmp_path / "out", 120)
    assert jobs.report(tmp_path / "out")["repeated_chunks"] > 0, "nothing was in flight on the lost node"
