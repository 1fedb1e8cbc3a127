"""What the compiler generates for a GPU compiles for its type, at the sizes of known models, without a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime.hints import HeuristicType
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from exspec.actors.engine import Engine
from exspec.jobs.benchmarks.shapes import SHAPES
from tests import tiny
from tests.actors.engine.fake_compiler import lowering
from tests.actors.engine.fake_cuda import load_guard, placed, rehearsing
from tests.actors.engine.test_cuda_rehearsal import decode

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")]
SHARED = 227 * 1024  # bytes that a block may have on sm_90
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14336, "vocab_size": 128256}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "Qwen3-8B with Qwen3-0.6B": (SHAPES["Qwen/Qwen3-8B"], SHAPES["Qwen/Qwen3-0.6B"]),
    "Llama-3.1-8B": (LLAMA, None),
    "Mistral-7B": (LLAMA | {"model_type": "mistral", "vocab_size": 32768, "sliding_window": 4096}, None),
    "GPT-2": ({"model_type": "gpt2"}, None),
}


def model(settings: dict[str, Any]) -> PreTrainedModel:
    """Two layers without values, on the GPU, in bfloat16."""
    kind = settings["model_type"]
    config = AutoConfig.for_model(
        kind, **{k: v for k, v in settings.items() if k != "model_type"} | {"num_hidden_layers": 2}
    )

    def make() -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    return placed(make)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_all_kernels_compile_for_sm_90(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if (reason := load_guard()) is not None:
        pytest.skip(reason)
    triton = pytest.importorskip("triton")
    target, draft = MODELS[name]
    with rehearsing() as (rehearsal, _), lowering() as code:
        method = {"drafter": "model", "draft_tokens": 5} if draft else {"method": "plain", "drafter": "none"}
        shape = {"batch_size": 8, "window": 8, "prefill_rows": 4, "prefill_columns": 128, "capacity": 512}
        config = tiny.config(**shape | method, kernels="compiled", attention="in_place")
        made = Engine(model(target), model(draft) if draft else None, config, recorder=rehearsal.recorder())
        decode(made, tiny.requests(tiny.prompts(8, longest=12), 6))
    assert len(code.graphs) >= 8
    assert code.kernels
    with triton.knobs.cache.scope(), triton.knobs.nvidia.scope():
        triton.knobs.cache.dir = str(tmp_path)
        triton.knobs.nvidia.dump_ptxas_log = True
        capfd.readouterr()
        for kernel, found in code.compile():
            log = capfd.readouterr().out
            spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
            assert ("0", "0") in spilled, f"{kernel} spills in every configuration: {log}"
            assert all(result.kernel.shared <= SHARED for result in found.compile_results)
            if found.heuristic_type != HeuristicType.POINTWISE:
                assert len(found.compile_results) == 1, f"{kernel}: a measurement would choose how it adds up"
