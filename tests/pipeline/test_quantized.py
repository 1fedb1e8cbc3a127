"""Jobs with quantized targets."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from exspec.actors.engine.kv.memory import LOADED
from exspec.jobs.commands.audit import audit
from exspec.pipeline.errors import JobError
from exspec.pipeline.prepare import prepare
from tests.actors.test_adapter import save_adapter
from tests.pipeline import jobs
from tests.pipeline.test_logprobs import run
from tests.quantized import need_packages, save_quantized

need_packages()


@pytest.mark.parametrize("form", ["int8", "w4a16"])
def test_a_job_is_audited_against_the_quantized_target(
    pair: jobs.Pair, source: Path, tmp_path: Path, form: str
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    adapter = save_adapter(tmp_path / "adapter", plain)
    target = save_quantized(plain, form, tmp_path / "target")
    jobs.tokenizer().save_pretrained(target)
    quantized = str(target), pair[1]
    rows = run(quantized, source, tmp_path / "out", logprobs=0)
    others = run(pair, source, tmp_path / "plain", logprobs=0)
    assert [row["logprobs"] for row in rows] != [row["logprobs"] for row in others]
    assert audit(str(tmp_path / "out"), {}, 64, None, 0, True, {}) == 0
    held = prepare(jobs.job(quantized, source, tmp_path / "small")).models.configs[0]
    file = (target / "model.safetensors").stat().st_size
    assert getattr(held, LOADED, None) == (file if form == "int8" else None), "on a CPU, the other one is unpacked"
    with pytest.raises(JobError, match="cannot be merged into quantized weights"):
        prepare(jobs.job(quantized, source, tmp_path / "refused", adapter=str(adapter)))
