"""Jobs that embed prompts."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from exspec.jobs.commands.audit import audit
from exspec.jobs.commands.convert import convert, partition
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.embeddings import EmbedJob
from exspec.pipeline.job.settings import load_job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests import tiny
from tests.actors.test_adapter import save_adapter
from tests.jobs import docs
from tests.jobs.calls import call, overwrite, rows_of, succeed
from tests.pipeline import jobs
from tests.pipeline.test_scores import table

SIZE = 32  # of the target's hidden states


def job(target: str, source: Path, output: Path, **settings: Any) -> EmbedJob:
    return EmbedJob(target=target, input=[str(source)], output=str(output), chat=False, **settings)


def embed(target: str, source: Path, output: Path, **settings: Any) -> list[dict[str, Any]]:
    assert execute(prepare(job(target, source, output, **settings))) == 0
    return rows_of(output)


def vectors(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [row["embedding"] for row in rows]


def reference(target: str, tokens: list[int], mean: bool) -> "np.ndarray[Any, Any]":
    """The hidden state of the last token, or the mean over all, by transformers."""
    with torch.no_grad():
        states = AutoModel.from_pretrained(target)(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return (states.mean(0) if mean else states[-1]).double().numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
def test_embeddings_are_those_of_transformers(
    pooling: str, normalize: bool, pair: jobs.Pair, source: Path, tmp_path: Path
) -> None:
    found = embed(pair[0], source, tmp_path / "out", pooling=pooling, normalize=normalize)
    assert len(found) == 60
    for row in found:
        tokens = jobs.prompt(row["key"])
        expected = reference(pair[0], tokens, pooling == "mean")
        expected = expected / np.linalg.norm(expected) if normalize else expected
        assert row["embedding"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert (row["prompt_tokens"], row["completion_tokens"]) == (len(tokens), 0)
        assert (row["completion"], row["error"]) == ("", None)
    assert audit(str(tmp_path / "out"), {}, 64, None, 0, True, {}) == 0


def test_no_bit_depends_on_the_shape(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    """Of batch, window and chunks, and whether the job is calibrated."""
    for pooling in ("last", "mean"):
        own = {"pooling": pooling, "draft_tokens": 7, "batch_size": 8}
        expected = vectors(embed(pair[0], source, tmp_path / pooling, **own))
        other = {"window": 8, "rows_per_chunk": 5, "memory_gib": 0.1}
        assert vectors(embed(pair[0], source, tmp_path / f"{pooling}-other", **own, **other)) == expected
    calibrated = embed(pair[0], source, tmp_path / "calibrated", tune_from=1, tune_seconds=3)
    for one, two in zip(vectors(calibrated), vectors(rows_of(tmp_path / "last")), strict=True):
        assert one == pytest.approx(two, abs=1e-5)


def test_dimensions_are_kept_before_the_length_is_scaled(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    found = vectors(embed(pair[0], source, tmp_path / "out", dimensions=5))
    whole = vectors(embed(pair[0], source, tmp_path / "whole", normalize=False))
    for short, long in zip(found, whole, strict=True):
        assert short == pytest.approx((np.array(long[:5]) / np.linalg.norm(long[:5])).tolist(), abs=1e-6)
    (part, *_) = sorted((tmp_path / "out").glob("part-*"))
    assert pq.read_schema(part).field("embedding").type == pa.list_(pa.float32(), 5)
    with pytest.raises(JobError, match=f"dimensions: is 33, but the hidden states of .* have {SIZE}"):
        prepare(job(pair[0], source, tmp_path / "long", dimensions=SIZE + 1))


def test_a_target_without_an_output_head(source: Path, tmp_path: Path) -> None:
    """As the files of an embedding model are: those of the body alone."""
    model: Any = tiny.model("qwen3", max_position_embeddings=64)
    model.save_pretrained(tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "body")
    for name in ("whole", "body"):
        jobs.tokenizer().save_pretrained(tmp_path / name)
    whole, body = (embed(str(tmp_path / n), source, tmp_path / f"{n}-out") for n in ("whole", "body"))
    assert vectors(whole) == vectors(body)
    assert json.loads((tmp_path / "body" / "config.json").read_text())["architectures"] == ["Qwen3Model"]


def test_rows_have_their_adapters(pair: jobs.Pair, tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    adapters = {name: str(save_adapter(tmp_path / name, target, seed=i)) for i, name in enumerate(("a", "b"))}
    source = table(tmp_path / "in", prompt=["w1 w2 w3"] * 3, style=["a", None, "b"])
    found = vectors(embed(pair[0], source, tmp_path / "out", adapters=adapters, adapter_column="style"))
    merged = vectors(embed(pair[0], source, tmp_path / "merged", adapter=adapters["b"]))
    assert found[2] == pytest.approx(merged[2], abs=1e-5)
    assert found[1] == pytest.approx(vectors(embed(pair[0], source, tmp_path / "bare"))[1], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(found[0], found[1], strict=True)) > 1e-3


def test_a_bad_row_costs_itself(pair: jobs.Pair, tmp_path: Path) -> None:
    texts = ["w1", None, " ".join(["w3"] * 64), " ".join(["w3"] * 63)]
    source = table(tmp_path / "in", prompt=texts)
    for pooling in ("last", "mean"):
        found = embed(pair[0], source, tmp_path / pooling, pooling=pooling)
        assert [len(row["embedding"] or []) for row in found] == [SIZE, 0, 0, SIZE]
        assert found[1]["error"] == "column 'prompt' is null"
        assert "leaves no room in the context of 64" in found[2]["error"]
    cut = embed(pair[0], source, tmp_path / "cut", truncate_prompt=True)
    assert cut[2]["embedding"] == cut[3]["embedding"]


def test_what_follows_a_job(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    """Its report, its conversions, its next run, and what is refused."""
    out = tmp_path / "out"
    found = embed(pair[0], source, out)
    page = (out / "_report.html").read_text()
    figures = jobs.report(out)
    assert figures["tokens_per_second"] > figures["completion_tokens"] == 0
    assert "Embeddings in out" in page
    assert f"{sum(row['prompt_tokens'] for row in found):,}" in page
    assert convert(str(out), str(tmp_path / "all.jsonl"), {}) == 60
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert vectors(lines) == vectors(found)
    assert convert(str(out), str(tmp_path / "all.csv"), {}, ["key", "embedding"]) == 60
    assert partition(str(out), str(tmp_path / "parts"), {}, ["finish_reason"]) == 60
    succeed("compact", out)
    assert vectors(rows_of(out)) == vectors(found)
    assert succeed("check", out)
    assert embed(pair[0], source, out, dimensions=SIZE) == rows_of(out)  # all of them are the default
    with pytest.raises(JobError, match="embeds was True and is None"):
        prepare(jobs.job((pair[0], None), source, out, max_new_tokens_column=None, id_column=None))
    with pytest.raises(JobError, match="pooling was 'last' and is 'mean'"):
        prepare(job(pair[0], source, out, pooling="mean"))
    with pytest.raises(JobError, match="has embeddings, and no completions to learn"):
        call("train", out, tmp_path / "head", "--drafter", "model", "--minutes", "0.1")


def test_an_audit_finds_another_embedding(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    found = embed(pair[0], source, tmp_path / "out")
    part = sorted((tmp_path / "out").glob("part-*"))[0]
    changed = [*found[3]["embedding"][:-1], np.nextafter(np.float32(found[3]["embedding"][-1]), np.float32(1)).item()]
    overwrite(part, "embedding", 3, changed)
    assert audit(str(tmp_path / "out"), {}, 60, None, 0, True, {}) == 1
    plain, forward = json.loads((tmp_path / "out" / "_audit.json").read_text())["comparisons"]
    assert (plain["rows"] - plain["equal"], forward["rows"] - forward["equal"]) == (1, 0)


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with the demo target, and the code below it."""
    page = (docs.FOLDER / "embed.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else a command would set it for all tests of this process
    succeed("messages", "messages", "--rows", "40")
    line = next(line for line in docs.examples(docs.commands()["embed"]) if "--input" in line)
    assert f"    {line}\n" in page
    succeed(*line.split()[1:])
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    assert len(found["nearest"]) == 5
    assert found["nearest"][0] == 0


def test_requests_of_the_batch_api_are_refused(pair: jobs.Pair, tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "w1"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(JobError, match="requests of the batch API cannot be embedded"):
        prepare(job(pair[0], tmp_path / "in.jsonl", tmp_path / "out"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens does not apply to an embedding job"),
        ({"temperature": 0.5}, "temperature does not apply to an embedding job"),
        ({"logprobs": 2}, "logprobs does not apply to an embedding job"),
        ({"max_thinking_tokens": 9}, "max_thinking_tokens does not apply to an embedding job"),
        ({"stop": ["."]}, "stop does not apply to an embedding job"),
        ({"draft": "d"}, "draft does not apply to an embedding job"),
        ({"draft_from": 9}, "draft_from does not apply to an embedding job"),
        ({"n": 2, "temperature": 1.0}, "does not apply to an embedding job"),
        ({"drafter": "suffix"}, "method and drafter do not apply to an embedding job"),
        ({"labels": ["a"]}, "labels: unknown setting"),
        ({"dimensions": 0}, "dimensions"),
        ({"pooling": "first"}, "pooling"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as error:
        load_job(EmbedJob, None, {"target": "t", "input": "in", "output": "out", **settings})
    assert message in str(error.value)
