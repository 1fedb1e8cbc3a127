"""`exspec bench --synthetic`: acceptance is a dial, tokens are plain decoding's, and little is needed to run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from exspec.jobs import cli
from exspec.jobs.synthetic import SHAPES, Settings, model_bytes


@pytest.mark.slow
def test_acceptance_is_what_was_asked_for_and_every_token_is_plain(tmp_path: Path) -> None:
    options = ["--synthetic", "tiny:tiny", "--batch-sizes", "1,4", "--acceptances", "0.3,0.9", "--limit", "8",
               "--max-new-tokens", "40", "--device", "cpu", "--dtype", "bfloat16", "--repeats", "1",
               "--tune-seconds", "0.5", "--output", str(tmp_path / "made" / "out.json")]  # fmt: skip
    result = CliRunner().invoke(cli.app, ["bench", *options], catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads((tmp_path / "made" / "out.json").read_text())
    assert json.loads(result.stdout.splitlines()[-1]) == report
    assert [b["batch_size"] for b in report["batches"]] == [1, 4]
    for batch in report["batches"]:
        methods = batch["methods"]
        assert {"plain", "generate", "continuous batching", "exspec 0.3", "exspec 0.9"} <= set(methods)
        assert sum(name.startswith("auto 0.") for name in methods) == 2
        for right in ("0.3", "0.9"):
            found = methods[f"exspec {right}"]
            assert found["exact"] == found["of"] == 8
            assert found["acceptance_by_place"][0] == pytest.approx(float(right), abs=0.15)
        assert set(batch["phases"]) == {"plain", "verify", "draft", "prefill"}
        assert all(phase["ms"] > 0 and phase["floor_ms"] > 0 for phase in batch["phases"].values())


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="--synthetic: no shape 'GPT-9'; expected TARGET:DRAFT of Qwen/Qwen3-8B"):
        Settings("GPT-9:tiny")


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen/Qwen3-8B", 8.19), ("Qwen/Qwen3-0.6B", 0.596), ("Vicuna-7B", 6.74), ("GLM-4-9B", 9.4)]
)
def test_shapes_are_those_of_the_models_they_are_named_after(name: str, billions: float) -> None:
    """Parameters, counted without allocating any."""
    settings = dict(SHAPES[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
    assert model_bytes(model) > 0


def test_engine_and_benchmark_need_torch_and_transformers_alone() -> None:
    """A machine with a GPU may have little else: what is imported here must do without the rest."""
    others = [
        "ray",
        "typer",
        "pydantic",
        "rich",
        "pyarrow",
        "fsspec",
        "s3fs",
        "jinja2",
        "matplotlib",
        "tenacity",
    ]
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); import exspec.jobs.synthetic, exspec.jobs.bench"
    subprocess.run([sys.executable, "-c", code], check=True)
