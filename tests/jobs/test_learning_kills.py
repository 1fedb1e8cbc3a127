"""A job that learns is killed again and again, and run again."""

import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.calls import rows_of
from tests.jobs.test_learning import run, tokens_of
from tests.pipeline import jobs
from tests.pipeline.s3 import external, fetch, new_bucket

ROWS = 800
LEARNS, DECODES = "learning from the", "rows, "  # lines that it prints


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "kills"),
    [("disk", 4), ("external", 4), *(pytest.param(name, 10, marks=pytest.mark.rare) for name in ("disk", "external"))],
)
def test_a_job_that_learns_killed_at_random_moments(store: str, kills: int, tmp_path: Path) -> None:
    """During the training, the trial and the swap, and while it decodes: every row once, as a plain job writes it."""
    output: Any = tmp_path / "out"
    settings: dict[str, Any] = {"method": "plain", "rows_per_chunk": 10, "learn": "model"}
    if store == "external":
        options = external()
        bucket = new_bucket(options, tmp_path)
        output, settings = f"s3://{bucket}/out", settings | {"storage_options": options}
    given = jobs.save_deep(tmp_path / "target")
    jobs.write_shards(tmp_path / "in", rows=ROWS, shards=8)
    run(tmp_path, tmp_path / "plain")
    made = jobs.job(given, tmp_path / "in", output, **settings)
    (tmp_path / "job.json").write_text(made.model_dump_json(exclude_unset=True))
    command = [sys.executable, "-u", "-m", "tests.jobs.learning_driver", "run", "--job", str(tmp_path / "job.json")]
    chance, at = random.Random(0), list[str]()

    def kill(process: "subprocess.Popen[bytes]", printed: list[str]) -> None:
        at.append(printed[-1])
        process.kill()

    while True:
        with subprocess.Popen(command, cwd=jobs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            printed, due = list[str](), len(at) < kills
            for line in process.stdout:
                printed.append(line.decode())
                if due and (LEARNS in printed[-1] or (len(at) % 2 and DECODES in printed[-1])):
                    threading.Timer(chance.uniform(0, 4), kill, (process, printed)).start()
                    due = False
            process.wait()
        if process.returncode >= 0:
            break
        time.sleep(1)  # Ray's processes see that the driver is gone
    assert process.returncode == 0, "".join(printed[-30:])
    assert len(at) == kills, f"killed only at {at}"
    assert any(LEARNS in line for line in at), f"killed only at {at}"
    written = fetch(options, bucket, tmp_path / "fetched") if store == "external" else output
    assert len(rows_of(written)) == ROWS
    assert sorted(tokens_of(written)) == sorted(tokens_of(tmp_path / "plain"))
