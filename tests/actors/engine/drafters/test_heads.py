"""What holds for the heads of every drafter that has one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exspec.actors.models import load_pair
from exspec.actors.source import ModelError
from exspec.jobs.demo import TARGET
from tests import tiny
from tests.actors.engine.drafters import test_dflash, test_eagle3
from tests.actors.engine.drafters.slow import Slow, slow_engine
from tests.actors.engine.drafters.test_clover import SlowClover
from tests.actors.engine.drafters.test_dflash import SlowDFlash
from tests.actors.engine.drafters.test_eagle3 import SlowEagle3

SLOW: dict[str, type[Slow]] = {"clover": SlowClover, "eagle3": SlowEagle3, "dflash": SlowDFlash}
PUBLISHED: dict[str, Any] = {"eagle3": test_eagle3.as_published, "dflash": test_dflash.as_published}
every = pytest.mark.parametrize("drafter", SLOW)


def save(drafter: str, target: Any, folder: Path, layout: str = "authors") -> Path:
    head: Any = tiny.HEADS[drafter](target)
    if drafter in PUBLISHED:
        return PUBLISHED[drafter](head, folder, layout)  # type: ignore[no-any-return]
    head.save_pretrained(folder)
    return folder


@every
def test_drafts_are_right_after_cached_tokens(drafter: str) -> None:
    """Cached tokens come with the features that the head needs. EAGLE-3 lacks the last one, so the prompts come one
    by one here."""
    target = tiny.deep(5, 0.3)
    engine = slow_engine(SLOW[drafter], target, tiny.HEADS[drafter](target), batch_size=1, window=1)
    trunk = tiny.prompts(3)[2][:24]
    for tail in ([3], [4, 5], [3, 9]):
        found = tiny.decode(engine, tiny.requests([[*trunk, *tail]], 9))
        assert found[0] == tiny.generate(target, [*trunk, *tail], 9)
    assert engine.statistics.cached_tokens == 2 * 24


@pytest.mark.parametrize(
    ("drafter", "name", "tensor", "message"),
    [
        ("clover", "v_proj.weight", None, r"head: no tensor v_proj.weight; expected one of \[32, 32\]"),
        ("clover", "mlps.0.weight", torch.ones(8, 32),
         r"head: mlps.0.weight is \[8, 32\], but its config.json asks for \[32, 32\]"),
        ("clover", "o_proj.weight", torch.zeros(2), "head: a head of Clover has no tensor o_proj.weight"),
        ("eagle3", "midlayer.hidden_norm.weight", None,
         r"no tensor layers.0.hidden_norm.weight; expected one of \[32\]"),
        ("eagle3", "fc.weight", torch.ones(32, 32),
         r"fc.weight is \[32, 32\], but its config.json asks for \[32, 96\]"),
        ("eagle3", "fc_norm.0.weight", torch.ones(32), "a head of EAGLE-3 has no tensor fc_norm.0.weight"),
        ("dflash", "layers.1.self_attn.q_norm.weight", None, r"no tensor layers.1.self_attn.q_norm.weight"),
        ("dflash", "fc.weight", torch.ones(32, 32), r"fc.weight is .*, but its config.json asks for \[32, 64\]"),
        ("dflash", "mask_hidden", torch.ones(32), "a head of DFlash has no tensor mask_hidden"),
        ("eagle3", "d2t", torch.full((41,), tiny.VOCABULARY), "d2t has tokens outside the vocabulary of 61 tokens"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_refused_by_name(
    drafter: str, name: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    folder = save(drafter, tiny.deep(5), tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        tiny.load_head(folder)


@every
def test_rotary_factors_stay_in_float32(drafter: str, tmp_path: Path) -> None:
    folder = save(drafter, tiny.deep(5), tmp_path / "head")
    rounded, whole = (tiny.load_head(folder, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}
    assert torch.equal(rounded.rotary_emb.inv_freq, whole.rotary_emb.inv_freq)


@every
def test_a_pair_of_a_target_and_a_head_loads(drafter: str, tmp_path: Path) -> None:
    """A head has no tokenizer; its config says what it is."""
    folder = save(drafter, load_pair(str(TARGET), None).target, tmp_path / "head", "speculators")
    head = load_pair(str(TARGET), str(folder), torch.bfloat16).draft
    assert head is not None
    assert head.config.head_for == drafter
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    other = save(drafter, tiny.deep(5), tmp_path / "other")
    with pytest.raises(ModelError, match="other: the head is for a vocabulary of 61"):
        load_pair(str(TARGET), str(other))
