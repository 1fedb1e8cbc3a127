"""What the compiler makes of a round's programs for a GPU, without one: Triton code, compiled to binaries for sm_90."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import async_compile
from torch._inductor import config as compiler
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.hints import DeviceProperties
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling
from exspec.actors.engine.layers import programs
from exspec.jobs.benchmarks.shapes import SHAPES
from tests.actors.engine.fake_cuda import CUDA, Uncompiled, load_guard, rehearsing

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")]
H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10, L2_cache_size=50 << 20,
)  # fmt: skip
WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": SHAPES["Qwen/Qwen3-8B"],
    "Llama-3.1-8B": WIDE | {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072},
    "Mistral-7B": WIDE | {"model_type": "mistral", "vocab_size": 32768, "sliding_window": None},
    "GPT-2": {"model_type": "gpt2", "vocab_size": 50257},
}


class Card:
    """Stands in for Triton's driver."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0


class Generated(Uncompiled):
    """Compiles pieces for the card, and runs them as they are. binaries: by the name of the Triton function."""

    def __init__(self) -> None:
        super().__init__()
        self.code = programs.Code()
        self.binaries: dict[str, list[Any]] = {}

    def of(self, graph: Any, inputs: Any) -> Any:
        self.code.of(graph, inputs)
        return super().of(graph, inputs)

    def triton(self, name: str, source: str, device_str: str = "cuda") -> Any:
        """Stands in for what loads a generated Triton function: it compiles all variants and loads none."""
        import triton

        assert device_str == "cuda"
        compile_one, made = triton.compile, self.binaries.setdefault(name, [])

        def kept(*given: Any, **options: Any) -> Any:
            made.append(compile_one(*given, **options))
            return made[-1]

        function = getattr(PyCodeCache.load(source), name)
        with patch.object(triton, "compile", kept):
            for variant in function.configs:
                function._precompile_config(variant)
        return function


@contextmanager
def card() -> Iterator[Generated]:
    """The compiler believes in an H100."""
    from triton.runtime import driver

    generated = Generated()
    known = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)
    with ExitStack() as stack:
        for place, name, value in (
            (DeviceProperties, "create", lambda _: known),
            (torch.cuda, "get_device_properties", lambda *_: H100),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "current_device", lambda: 0),
            (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
            (torch.version, "cuda", "13.0"),
            (CudaInterface, "is_bf16_supported", staticmethod(lambda *_, **__: True)),
            (CudaInterface, "get_device_properties", staticmethod(lambda *_: H100)),
            (async_compile.AsyncCompile, "triton", generated.triton),
        ):
            stack.enter_context(patch.object(place, name, value, create=True))
        stack.enter_context(patch("torch._inductor.scheduler.has_triton", lambda *_: True))
        stack.enter_context(patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", lambda: None))
        stack.enter_context(compiler.patch(compile_threads=1, fx_graph_cache=False))
        stack.enter_context(patch.object(type(driver), "active", Card()))
        yield generated


def shaped(name: str) -> PreTrainedModel:
    """Two layers of a model in bfloat16."""
    settings = MODELS[name] | {"n_layer" if name == "GPT-2" else "num_hidden_layers": 2}
    config = AutoConfig.for_model(**settings, eos_token_id=None, pad_token_id=0)
    with CUDA:
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return made


@pytest.mark.parametrize("name", MODELS)
def test_programs_compile_for_a_card(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a round of sampled and greedy rows: prefill, draft and verify."""
    pytest.importorskip("triton")
    if torch.backends.cuda.is_built():
        pytest.skip("torch is built with CUDA, and asks the GPU")
    if (reason := load_guard()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    with rehearsing() as (rehearsal, _), card() as generated, patch.object(programs, "CODE", generated):
        model = shaped(name)
        config = EngineConfig(
            batch_size=4, window=4, draft_tokens=5, capacity=512, attention="in_place", kernels="compiled"
        )
        engine = Engine(model, model, config, frozenset(), rehearsal.recorder())
        for i, sampling in enumerate([Sampling(), Sampling(temperature=0.8)]):
            engine.submit(Request(i, list(range(1, 140)), 6, sampling))
        engine.step()
    assert generated.binaries
    for function, binaries in generated.binaries.items():
        adds_up = "_red_" in function or "_per_" in function
        assert len(binaries) == 1 or not adds_up, f"{function}: a measurement would choose between orders of adding up"
        for binary in binaries:
            assert binary.asm["cubin"].startswith(b"\x7fELF"), function
            assert binary.metadata.shared <= H100.shared_memory_per_block_optin, function
