"""Quantized targets: they decode to their own tokens, and the memory plan counts what they hold."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exspec.actors.engine.kv.memory import LOADED, model_memory
from exspec.actors.engine.learners.learner import Growth
from exspec.actors.engine.learners.model import ModelLearner
from exspec.actors.models import load_model
from exspec.actors.source import ModelError, Source
from tests import tiny
from tests.actors.engine.test_logprobs import of, requests
from tests.actors.test_adapter import save_adapter
from tests.quantized import FORMATS, need_packages, save_quantized

need_packages()
PROMPTS = tiny.prompts(10)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
EXACT = pytest.mark.parametrize("form", FORMATS[:4])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = tmp_path_factory.mktemp("quantized")
    return {form: str(save_quantized(tiny.deep(dtype=torch.bfloat16), form, made / form)) for form in FORMATS}


@EXACT
@DTYPES
def test_no_drafter_and_no_neighbour_changes_a_bit(folders: dict[str, str], form: str, dtype: torch.dtype) -> None:
    """Tokens and log-probabilities equal those of plain decoding in the same shape, and of each row alone."""
    target, asked = load_model(Source(folders[form]), dtype), requests()
    plain = of(tiny.run(tiny.engine(target, method="plain", columns=4), asked))
    for drafter in ("model", "suffix", "early_exit"):
        draft = tiny.deep(agreement=0.05, dtype=dtype) if drafter == "model" else None
        engine = tiny.engine(target, draft=draft, drafter=drafter, kernels="compiled_packed")
        assert engine.config.kernels == "eager"
        assert of(tiny.run(engine, asked, shuffle=1)) == plain
    alone = tiny.engine(target, method="plain", columns=4)
    assert all(of(tiny.run(alone, [r]))[r.id] == plain[r.id] for r in asked[::4])


@pytest.mark.parametrize("form", ["int8", "w4a16"])
def test_float32_equals_generate(folders: dict[str, str], form: str) -> None:
    """Where activations are quantized, a difference in the last bit may become one of a whole step."""
    target = load_model(Source(folders[form]), torch.float32)
    assert tiny.decode(tiny.engine(target, method="plain"), tiny.requests(PROMPTS)) == tiny.greedy(target, PROMPTS)


@EXACT
def test_the_plan_counts_what_is_loaded(folders: dict[str, str], form: str) -> None:
    """torchao's tensors stay packed; compressed-tensors unpacks them at the first forward on a CPU."""
    target, config = load_model(Source(folders[form]), torch.float32), tiny.config()
    linear = {name: m for name, m in target.named_modules() if "proj" in name}
    numbers = sum(m.in_features * m.out_features for m in linear.values())
    others = sum(p.numel() for name, p in target.named_parameters() if "proj" not in name) * 4
    planned = model_memory(target.config, config, torch.float32, config.width).weights
    held = planned - others - sum(b.numel() * b.element_size() for b in target.buffers())
    each = 1 if form.startswith("int8") else 4
    assert numbers * each < held < numbers * each * 1.6, (held, numbers)
    delattr(target.config, LOADED)
    assert model_memory(target.config, config, torch.float32, config.width).weights > others + numbers * 4


@pytest.mark.parametrize("form", ["int8", "w4a16"])
def test_its_rows_may_have_adapters(folders: dict[str, str], form: str, tmp_path: Path) -> None:
    adapter = str(save_adapter(tmp_path / "adapter", tiny.deep()))
    target = load_model(Source(folders[form], adapters=(adapter,)), torch.float32)
    asked = [replace(request, adapter=i % 2) for i, request in enumerate(requests())]
    expected = of(tiny.run(tiny.engine(target, method="plain", columns=4), asked))
    assert of(tiny.run(tiny.engine(target, draft=tiny.deep(), drafter="model"), asked, shuffle=1)) == expected
    base = load_model(Source(folders[form]), torch.float32)
    without = of(tiny.run(tiny.engine(base, method="plain", columns=4), requests()))
    same = [without[r.id] == expected[r.id] for r in asked]
    assert all(same[::2]), "rows without an adapter"
    assert not all(same[1::2])
    with pytest.raises(ModelError, match="cannot be merged into quantized weights"):
        load_model(Source(folders[form], adapter=adapter), torch.float32)


def test_no_draft_model_is_made_from_it(folders: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="cannot be made from quantized weights"):
        ModelLearner.grow(load_model(Source(folders["int8"]), torch.float32), Growth(2))


def test_one_scale_for_all_rows_is_refused(folders: dict[str, str]) -> None:
    message = r"w8a8 tensor: quantized by compressed-tensors, a row's logits in llama depend on the other rows"
    with pytest.raises(ModelError, match=message):
        load_model(Source(folders["w8a8 tensor"]), torch.float32)
