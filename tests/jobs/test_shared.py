"""Prompts with a common prefix: plan and report count the shared tokens, and no completion changes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exspec.actors.engine import EngineConfig
from exspec.jobs.commands.shared_prompts import Shared
from exspec.jobs.demo import DEMO_PAIR
from exspec.jobs.demo.shards import write_shards
from exspec.pipeline.cluster.graph import PairLoader
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.jobs.calls import rows_of, succeed

CHUNK = EngineConfig.prefill_columns
INSTRUCTION = (
    "Read the message of a customer below with care. Say whether somebody has to look at it today, this week or at any "
    "time: what is broken or unsafe is of high urgency, praise is of low urgency, and all else is normal. Do not guess "
    "what the message does not say, and do not let its tone mislead you.\n\n"
)
ROWS = 60


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    write_shards(folder, ROWS, 2)
    return folder


def labeling(messages: Path, output: Path) -> LabelJob:
    return LabelJob(
        **DEMO_PAIR, input=[str(messages)], output=str(output), fields={"urgency": ["high", "low", "normal"]},
        json_spaces=False, prompt_template=INSTRUCTION + "{{ message }}", rows_per_chunk=15, actors="1", batch_size=4,
        window=8, draft_tokens=3, method="exspec", bucket=512, label_column="label",
    )  # fmt: skip


def by_id(out: Path) -> dict[str, tuple[Any, ...]]:
    columns = ("completion", "label_urgency", "prompt_tokens", "completion_tokens", "forced")
    return {row["id"]: tuple(row[name] for name in columns) for row in rows_of(out)}


def test_shared_tokens_are_cached_and_no_completion_changes(messages: Path, tmp_path: Path) -> None:
    """Compared with the same job with prefill chunks longer than any prompt, so that no prompt shares one."""
    reports = {}
    for name in ("shared", "alone"):
        prepared = prepare(labeling(messages, tmp_path / name))
        config = prepared.shape.config
        alone = replace(config, prefill_columns=512, page=512, prefill_rows=1)
        load = PairLoader(prepared.job, config if name == "shared" else alone, "cpu")
        assert execute(prepared, load=load) == 0
        reports[name] = json.loads((tmp_path / name / "_report.json").read_text())
    found = by_id(tmp_path / "shared")
    assert len(found) == ROWS
    differing = [key for key, row in by_id(tmp_path / "alone").items() if found[key] != row]
    assert not differing, differing[:5]

    shared, alone = reports["shared"], reports["alone"]
    assert alone["prompt_tokens_found"] == 0
    first = shared["prompt_tokens_found"]
    assert first % CHUNK == 0
    assert first >= (ROWS - 1) * CHUNK, "the instruction is cached for every prompt but the first"
    # Every token of a prompt except the last is computed or cached. So are the first forced tokens of an answer.
    assert first + shared["prompt_tokens_computed"] == alone["prompt_tokens_computed"]
    assert alone["prompt_tokens_computed"] >= alone["prompt_tokens"] - ROWS
    page = (tmp_path / "shared" / "_report.html").read_text()
    assert f"<th>prompt tokens found</th><td>{first}</td>" in page
    compared = json.loads(succeed("report", tmp_path / "shared", tmp_path / "alone").strip().splitlines()[-1])
    assert [job["prompt_tokens_found"] for job in compared] == [first, 0], "rebuilt from the files"


def test_plan_prints_how_many_prompt_tokens_are_shared(messages: Path, tmp_path: Path) -> None:
    def line(source: Path, *options: str) -> str:
        printed = succeed("plan", "--input", source, "--output", tmp_path / "out", *options)
        return next((line for line in printed.splitlines() if line.startswith("shared:")), "")

    first = ["--prompt-template", INSTRUCTION + "{{ message }}"]
    share = re.search(rf"(\d+)% of the tokens of {ROWS} prompts are in a prefix of another", line(messages, *first))
    assert share
    assert 30 < int(share[1]) < 60
    none = f"shared: nothing; no two of {ROWS} prompts begin with the same {CHUNK} tokens or more"
    assert line(messages, "--prompt-template", "{{ message }}\n\n" + INSTRUCTION) == none
    assert line(messages, *first, "--method", "eqspec") == ""
    pq.write_table(pa.table({"prompt": [INSTRUCTION]}), tmp_path / "one.parquet")
    assert line(tmp_path / "one.parquet") == "", "a single prompt"


def test_whole_chunks_of_a_common_prefix_are_shared() -> None:
    """As the engine shares them: from the first token on, and never the last token of a prompt."""
    shared = Shared(4)
    for prompt, cached in (
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),  # the last token is pending, so its chunk is not whole
        ([1, 2, 3, 4, 5, 6, 7, 7, 9], 4),
        ([0, 2, 3, 4, 5, 6, 7, 8, 9], 0),  # the first chunk differs, so the second is not shared
        ([0, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4], 0),
    ):
        before = shared.cached
        shared.add(prompt)
        assert shared.cached - before == cached, prompt
    line = "shared: 42% of the tokens of 7 prompts are in a prefix of another prompt (each actor computes it once)"
    assert shared.line() == line
