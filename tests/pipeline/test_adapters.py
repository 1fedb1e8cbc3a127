"""Jobs with an adapter write what the merged target writes."""

import json
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from exspec.actors.adapter import WEIGHTS, merge
from exspec.jobs.commands.audit import audit
from exspec.jobs.commands.train import train
from exspec.jobs.training.settings import TrainSettings
from exspec.pipeline.errors import JobError
from exspec.pipeline.prepare import prepare
from exspec.pipeline.storage import Folder
from tests import tiny
from tests.actors.test_adapter import edit, save_adapter
from tests.pipeline import jobs
from tests.pipeline.test_logprobs import run
from tests.pipeline.test_scores import score


def test_a_job_with_an_adapter_equals_one_with_the_merged_target(
    pair: jobs.Pair, source: Path, tmp_path: Path, moto: dict[str, Any]
) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    folder = save_adapter(tmp_path / "adapter", target)
    merge(target, str(folder))
    target.save_pretrained(tmp_path / "merged")
    jobs.tokenizer().save_pretrained(tmp_path / "merged")
    expected = run((str(tmp_path / "merged"), pair[1]), source, tmp_path / "expected")
    found = run(pair, source, tmp_path / "out", adapter=str(folder))
    without = run(pair, source, tmp_path / "without")
    texts = [[row["completion"] for row in rows] for rows in (found, expected, without)]
    assert texts[0] == texts[1] != texts[2]
    assert audit(str(tmp_path / "out"), {}, 64, None, 0, True, {}) == 0
    bucket = Folder("s3://adapters/one", moto)
    bucket.fs.mkdir("adapters")
    for file in folder.iterdir():
        bucket.write(file.name, file.read_bytes())
    stored = run(pair, source, tmp_path / "stored", adapter="s3://adapters/one", storage_options=moto)
    assert [row["completion"] for row in stored] == texts[0]
    edit(folder, lora_alpha=9)
    with pytest.raises(JobError, match=r"adapter \(content\) was"):
        prepare(jobs.job(pair, source, tmp_path / "out", adapter=str(folder)))


@pytest.mark.parametrize(
    ("config", "message"),
    [(None, "adapter .*not a LoRA adapter"), ({"peft_type": "IA3"}, "adapter .*peft_type is IA3; expected LORA")],
)
def test_an_adapter_that_cannot_be_used_is_refused(
    config: dict[str, Any] | None, message: str, pair: jobs.Pair, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter").mkdir()
    if config is not None:
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 1, "r": 1} | config))
    with pytest.raises(JobError, match=message):
        prepare(jobs.job(pair, source, tmp_path / "out", adapter=str(tmp_path / "adapter")))


@pytest.fixture
def adapters(pair: jobs.Pair, tmp_path: Path) -> dict[str, str]:
    """Two adapters for the pair's target."""
    target = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    return {name: str(save_adapter(tmp_path / name, target, seed=i)) for i, name in enumerate(("poet", "clerk"))}


def with_names(source: Path, names: list[str | None]) -> None:
    """Add a column `style` with the names in turn."""
    for file in source.iterdir():
        table = pq.read_table(file)
        column = [names[key % len(names)] for key in table["key"].to_pylist()]
        pq.write_table(table.append_column("style", pa.array(column, pa.string())), file)


def test_each_row_has_the_adapter_of_its_column(
    pair: jobs.Pair, source: Path, tmp_path: Path, adapters: dict[str, str]
) -> None:
    """As in jobs with one adapter for all rows. A name that is not declared costs its row."""
    names = ["poet", None, "clerk", "cook"]
    with_names(source, names)
    settings = {"adapters": adapters, "adapter_column": "style"}
    found = run(pair, source, tmp_path / "out", **settings)
    alone = {name: run(pair, source, tmp_path / f"only-{name}", adapter=adapters[name]) for name in adapters}
    alone |= {None: run(pair, source, tmp_path / "without")}
    for i, row in enumerate(found):
        if row["style"] == "cook":
            assert row["error"] == "column 'style': expected one of clerk, poet, null, not 'cook'"
        else:
            assert (row["completion"], row["error"]) == (alone[row["style"]][i]["completion"], None)
    assert {row["style"] for row in found} == set(names)
    assert len({tuple(row["completion"] for row in rows) for rows in alone.values()}) == 3
    assert audit(str(tmp_path / "out"), {}, 64, None, 0, True, {}) == 0
    with pytest.raises(JobError, match="adapters by row, whose tokens are not learned"):
        train(str(tmp_path / "out"), {}, tmp_path / "draft", TrainSettings(drafter="model"))
    edit(Path(adapters["poet"]), lora_alpha=9)
    with pytest.raises(JobError, match=r"adapters\.poet \(content\) was"):
        prepare(jobs.job(pair, source, tmp_path / "out", **settings))


def test_scores_of_choices_are_those_with_the_rows_adapter(
    pair: jobs.Pair, source: Path, tmp_path: Path, adapters: dict[str, str]
) -> None:
    with_names(source, ["poet", None])
    scores = partial(score, pair[0], source, choices=["w10", "w11 w12"])
    found = scores(tmp_path / "out", adapters=adapters, adapter_column="style")
    alone = {"poet": scores(tmp_path / "a", adapter=adapters["poet"]), None: scores(tmp_path / "b")}
    for i, row in enumerate(found):
        assert row["choice_logprobs"] == pytest.approx(alone[row["style"]][i]["choice_logprobs"], abs=1e-4)
    assert audit(str(tmp_path / "out"), {}, 64, None, 0, True, {}) == 0


def test_a_batch_request_names_its_adapter(pair: jobs.Pair, tmp_path: Path, adapters: dict[str, str]) -> None:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions",
         "body": {"model": model, "prompt": "w1 w2 w3", "max_tokens": 9}}
        for i, model in enumerate(["poet", pair[0], "cook", Path(pair[0]).name])
    ]  # fmt: skip
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "batch.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = {"id_column": None, "max_new_tokens_column": None, "chat": False}
    rows = run(pair, tmp_path / "in", tmp_path / "out", adapters=adapters, **settings)
    assert rows[0]["completion"] != rows[1]["completion"]
    assert [row["error"] for row in rows[:2]] == [None, None]
    assert rows[3]["completion"] == rows[1]["completion"]
    assert rows[2]["error"] == f"body.model: expected one of clerk, poet, {pair[0]}, not 'cook'"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter": "a", "adapters": {"b": "b"}}, "expected adapter or adapters, not both"),
        ({"adapter_column": "style"}, "adapter_column needs adapters"),
        ({"adapters": {"a": "a"}, "learn": "model"}, "learn does not work with adapters"),
        ({"adapters": ["a"]}, "expected NAME=VALUE, not 'a'"),
        ({"adapters": ["a=b", "a=c"]}, "expected every name once, but 'a' is there twice"),
    ],
)
def test_settings_that_exclude_each_other(settings: dict[str, Any], message: str, pair: jobs.Pair) -> None:
    with pytest.raises(ValueError, match=message):
        jobs.job(pair, Path("in"), Path("out"), **settings)


def test_an_adapter_of_another_target_is_refused_before_anything_starts(
    pair: jobs.Pair, source: Path, tmp_path: Path
) -> None:
    other = save_adapter(tmp_path / "other", tiny.model(hidden_size=64))
    with pytest.raises(JobError, match=r"adapter .*does not fit model\.layers\.0\.self_attn\.q_proj"):
        prepare(jobs.job(pair, source, tmp_path / "out", adapter=str(other)))
    with pytest.raises(JobError, match=r"adapters\.one .*does not fit"):
        prepare(jobs.job(pair, source, tmp_path / "out", adapters={"one": str(other)}, adapter_column="key"))


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_a_missing_package_is_named_before_anything_starts(
    pair: jobs.Pair, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exspec.pipeline.prepare.starts_here", lambda _: True)  # another test may have a Ray running
    quantized = tmp_path / "quantized"
    shutil.copytree(pair[0], quantized)
    file = quantized / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "torchao"}}))
    with pytest.raises(JobError, match=r"its weights need torchao; pip install 'exspec\[quantized\]'"):
        prepare(jobs.job((str(quantized), None), source, tmp_path / "out"))


def test_adapters_need_a_column(pair: jobs.Pair, source: Path, tmp_path: Path, adapters: dict[str, str]) -> None:
    with pytest.raises(JobError, match="adapters: needs adapter_column"):
        prepare(jobs.job(pair, source, tmp_path / "out", adapters=adapters))


def test_an_adapter_that_cannot_be_listed_is_named_as_such(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    settings = {"adapters": {"one": f"memory://nowhere-{tmp_path.name}"}, "adapter_column": "key"}
    with pytest.raises(JobError, match=r"^adapters\.one memory://nowhere"):
        prepare(jobs.job(pair, source, tmp_path / "out", **settings))


def test_the_plan_counts_the_adapters_of_rows(pair: jobs.Pair, source: Path, adapters: dict[str, str]) -> None:
    with_names(source, ["poet"])
    plans = []
    for given in ({}, {"adapters": adapters, "adapter_column": "style"}):
        prepared = prepare(jobs.job(pair, source, source.parent / "out", **given))
        plans.append(prepared.memory(prepared.shape.config)[0].weights)
    numbers = sum(t.numel() for folder in adapters.values() for t in load_file(f"{folder}/{WEIGHTS}").values())
    assert plans[1] - plans[0] == 4 * numbers
