"""Answers of every kind, and several devices: driver and actors are killed, and the job is run again."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from exspec.pipeline.job.embeddings import EmbedJob
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.job.scores import ScoreJob
from exspec.pipeline.job.settings import Job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from exspec.pipeline.shape import CPU_DEVICES
from tests.jobs.calls import MAIN, rows_of
from tests.pipeline import jobs
from tests.pipeline.generators import generators

ROWS = 160
THINKING: dict[str, Any] = {"max_thinking_tokens": 6, "thinking_markers": ["w7", "w8"]}
CASES: dict[str, tuple[type[Job], dict[str, Any]]] = {
    "run": (Job, {"n": 3, "best_of": 5, "logprobs": 1, "temperature": 0.9, "max_new_tokens": 30, **THINKING}),
    "score": (
        ScoreJob,
        {"choices": [f"w{i} " * 12 for i in range(12)], "draft_tokens": 1, "logprobs": 2, "attempts": 9},
    ),
    "embed": (
        EmbedJob,
        {
            "prompt_template": "{{ 'w9 ' * 40 }}{{ prompt }}",
            "pooling": "mean",
            "draft_tokens": 1,
            "batch_size": 1,
            "window": 1,
            "attempts": 9,
        },
    ),
    "label": (LabelJob, {"labels": ["w10", "w11 w12"], "n": 8, "temperature": 2.0, "logprobs": 0, **THINKING}),
}


def answers(output: Path) -> list[dict[str, Any]]:
    """The rows, without what depends on the neighbours."""
    rows = [{n: v for n, v in row.items() if n != "rounds" and "seconds" not in n} for row in rows_of(output)]
    return sorted(rows, key=lambda row: (row["shard"], row["row"]))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    ("command", "devices"),
    [("run", 2), *(pytest.param(name, 1, marks=pytest.mark.rare) for name in ("score", "embed", "label"))],
)
def test_every_row_is_that_of_a_job_that_was_left_alone(
    command: str, devices: int, pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device has made the whole job."""
    jobs.write_shards(tmp_path / "in", ROWS)
    kind, settings = CASES[command]
    target = jobs.with_end_token(pair[0], tmp_path / "target")
    shared = {"id_column": "key", "actors": "1", "batch_size": 2, "window": 2, "rows_per_chunk": 4, "method": "plain"}
    made = {"target": target, "input": [str(tmp_path / "in")], **shared, **settings}
    whole, killed = (kind(**made, output=str(tmp_path / name)) for name in ("whole", "out"))
    assert execute(prepare(whole)) == 0
    (tmp_path / "job.json").write_text(killed.model_dump_json(exclude_unset=True))
    monkeypatch.setenv(CPU_DEVICES, str(devices))
    words = [sys.executable, "-c", MAIN, command, "--job", str(tmp_path / "job.json"), "--quiet"]
    first = subprocess.Popen(words)
    jobs.wait_for_parts(tmp_path / "out", 3, first)
    first.kill()
    first.wait()
    kept = len(list((tmp_path / "out").glob("part-*")))
    assert 3 <= kept < ROWS // 4
    second = subprocess.Popen(words)
    while not (decoding := generators(psutil.Process(second.pid))):
        assert second.poll() is None
        time.sleep(0.1)
    adopted = len(list((tmp_path / "out").glob("part-*")))  # with what the first had finished and not committed
    jobs.wait_for_parts(tmp_path / "out", adopted + 1, second)
    for process in decoding:
        process.kill()
    assert second.wait(300) == 0
    assert answers(tmp_path / "out") == answers(tmp_path / "whole")
    assert jobs.report(tmp_path / "out")["repeated_chunks"] > 0
