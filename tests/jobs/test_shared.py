"""Prompts that begin alike: plan tells how much of them is shared, the report what was found, and no token changes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from exspec.actors.engine import EngineConfig
from exspec.jobs import cli
from exspec.jobs.commands.shared import Shared
from exspec.jobs.demo import DEMO_PAIR
from exspec.pipeline.cluster.graph import PairLoader
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute

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
    assert CliRunner().invoke(cli.app, ["messages", str(folder), "--rows", str(ROWS), "--shards", "2"]).exit_code == 0
    return folder


def labeling(messages: Path, output: Path) -> LabelJob:
    return LabelJob(
        **DEMO_PAIR, input=[str(messages)], output=str(output), fields={"urgency": ["high", "low", "normal"]},
        json_spaces=False, prompt_template=INSTRUCTION + "{{ message }}", rows_per_chunk=15, actors="1", batch_size=4,
        window=8, draft_tokens=3, method="exspec", bucket=512, label_column="label",
    )  # fmt: skip


def rows_of(out: Path) -> dict[str, tuple[Any, ...]]:
    told = ("completion", "label_urgency", "prompt_tokens", "completion_tokens", "forced")
    return {
        row["id"]: tuple(row[name] for name in told)
        for path in out.glob("part-*")
        for row in pq.read_table(path).to_pylist()
    }


def test_what_is_shared_is_found_and_changes_no_token(messages: Path, tmp_path: Path) -> None:
    """Against the same job with prefill chunks that are longer than any prompt, of which none can be shared."""
    reports = {}
    for name in ("shared", "alone"):
        prepared = prepare(labeling(messages, tmp_path / name))
        config = prepared.shape.config
        alone = replace(config, prefill_columns=512, page=512, prefill_rows=1)
        load = PairLoader(prepared.job, config if name == "shared" else alone, "cpu")
        assert execute(prepared, load=load) == 0
        reports[name] = json.loads((tmp_path / name / "_report.json").read_text())
    found = rows_of(tmp_path / "shared")
    assert len(found) == ROWS
    differing = [key for key, row in rows_of(tmp_path / "alone").items() if found[key] != row]
    assert not differing, differing[:5]

    shared, alone = reports["shared"], reports["alone"]
    assert alone["prompt_tokens_found"] == 0
    first = shared["prompt_tokens_found"]
    assert first % CHUNK == 0
    assert first >= (ROWS - 1) * CHUNK, "each prompt but the first finds the instruction"
    # All of a prompt but its pending token is computed or found, and the forced tokens that begin every answer too.
    assert first + shared["prompt_tokens_computed"] == alone["prompt_tokens_computed"]
    assert alone["prompt_tokens_computed"] >= alone["prompt_tokens"] - ROWS
    page = (tmp_path / "shared" / "_report.html").read_text()
    assert f"<th>prompt tokens found</th><td>{first}</td>" in page
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "shared"), str(tmp_path / "alone")])
    told = json.loads(result.stdout.strip().splitlines()[-1])
    assert [job["prompt_tokens_found"] for job in told] == [first, 0], "rebuilt from the files"


def test_plan_says_how_much_of_the_prompts_is_shared(messages: Path, tmp_path: Path) -> None:
    def line(*options: str) -> str:
        words = ["plan", "--input", str(messages), "--output", str(tmp_path / "out"), *options]
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 0, result.output
        return next((line for line in result.stdout.splitlines() if line.startswith("shared:")), "")

    told = line("--prompt-template", INSTRUCTION + "{{ message }}")
    share = re.search(rf"(\d+)% of the prompt tokens of {ROWS} prompts begin as those of another", told)
    assert share
    assert 30 < int(share[1]) < 60
    none = f"shared: no two of {ROWS} prompts have their first {CHUNK} tokens in common"
    assert line("--prompt-template", "{{ message }}\n\n" + INSTRUCTION) == none
    assert line("--prompt-template", INSTRUCTION + "{{ message }}", "--method", "eqspec") == ""


def test_a_prompt_that_is_alone_is_not_spoken_of(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [INSTRUCTION]}), tmp_path / "one.parquet")
    words = ["plan", "--input", str(tmp_path / "one.parquet"), "--output", str(tmp_path / "out")]
    assert "shared:" not in CliRunner().invoke(cli.app, words).stdout


def test_whole_chunks_of_a_common_beginning_are_shared() -> None:
    """As the engine shares them: in its order, from the first token on, and never the last token of a prompt."""
    shared = Shared(4)
    for prompt, found in (
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),  # the last token is pending, and so its chunk is not whole
        ([1, 2, 3, 4, 5, 6, 7, 7, 9], 4),
        ([0, 2, 3, 4, 5, 6, 7, 8, 9], 0),  # another beginning: what follows is another too
        ([0, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4], 0),
    ):
        before = shared.found
        shared.add(prompt)
        assert shared.found - before == found, prompt
    told = "shared: 42% of the prompt tokens of 7 prompts begin as those of another (computed once an actor)"
    assert shared.line() == told
