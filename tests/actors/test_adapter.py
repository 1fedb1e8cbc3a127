"""LoRA adapters: merged into a target's weights, or refused with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from exspec.actors.adapter import merge
from exspec.actors.models import load_model
from exspec.actors.source import ModelError, Source
from tests import tiny

NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def save_adapter(
    folder: Path, target: PreTrainedModel, names: tuple[str, ...] = NAMES, seed: int = 0, **config: Any
) -> Path:
    """An adapter with random weights, of rank 2 + i for the i-th name."""
    folder.mkdir(parents=True)
    random, tensors = torch.Generator().manual_seed(seed), {}
    for i, name in enumerate(names):
        module: Any = target.get_submodule(name)
        rows, columns = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape
        for part, shape in (("A", (2 + i, columns)), ("B", (rows, 2 + i))):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn(shape, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors")
    ranks = {name: 2 + i for i, name in enumerate(names)}
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "rank_pattern": ranks} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def applied(target: PreTrainedModel, folder: Path, prompt: list[int], scale: Any) -> Tensor:
    """The logits of a target whose adapted layers add s B A x. scale: s, by rank."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in NAMES:
        a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")

        def add(_: Any, given: tuple[Tensor, ...], out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            return out + scale(len(a)) * (given[0] @ a.T @ b.T)

        target.get_submodule(name).register_forward_hook(add)
    with torch.no_grad():
        return target(torch.tensor([prompt])).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, lambda rank: 3 / rank),
        ({"use_rslora": True}, lambda rank: 3 / rank**0.5),
        ({"alpha_pattern": {"mlp.down_proj": 5}}, lambda rank: (5 if rank == 3 else 3) / rank),
    ],
)
def test_merged_weights_compute_what_the_adapter_adds(config: dict[str, Any], scale: Any, tmp_path: Path) -> None:
    target = tiny.model()
    folder = save_adapter(tmp_path / "adapter", target, **config)
    target.save_pretrained(tmp_path / "target")
    loaded = load_model(Source(str(tmp_path / "target"), adapter=str(folder)), torch.float32)
    with torch.no_grad():
        found, without = loaded(torch.tensor([[1, 2, 3, 4]])).logits, target(torch.tensor([[1, 2, 3, 4]])).logits
    assert torch.allclose(found, applied(target, folder, [1, 2, 3, 4], scale), atol=1e-4)
    assert not torch.allclose(found, without, atol=1e-2)


def test_a_transposed_weight_is_merged_transposed(tmp_path: Path) -> None:
    """As in GPT-2, whose layers hold their weights as [in, out]."""
    target = tiny.model("gpt2")
    name = "transformer.h.0.attn.c_attn"
    before = target.get_submodule(name).weight.clone()  # type: ignore[union-attr, operator]
    folder = tmp_path / "adapter"
    folder.mkdir()
    a, b = torch.randn(2, before.shape[0]), torch.randn(before.shape[1], 2)
    names = (f"base_model.model.{name}.lora_{part}.weight" for part in "AB")
    save_file(dict(zip(names, (a, b), strict=True)), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "fan_in_fan_out": True})
    )
    merge(target, str(folder))
    assert torch.allclose(target.get_submodule(name).weight - before, (2 * b @ a).T, atol=1e-5)  # type: ignore[operator]


def spoil(folder: Path) -> None:
    """Put NaN into a tensor."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[min(tensors)][0, 0] = torch.nan
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "not a LoRA adapter"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "cannot be read"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"), "cannot be read"),
        (lambda folder: edit(folder, peft_type="IA3"), "peft_type is IA3; expected LORA"),
        (lambda folder: edit(folder, use_dora=True), "use_dora is not supported; expected plain LoRA"),
        (lambda folder: edit(folder, modules_to_save=["lm_head"]), "modules_to_save is not supported"),
        (lambda folder: edit(folder, bias="all"), "bias is all; expected none"),
        (lambda folder: edit(folder, init_lora_weights="pissa_niter_4"), "pissa_niter_4, which changes the target"),
        (lambda folder: edit(folder, lora_alpha=None), "not a LoRA adapter"),
        (lambda folder: edit(folder, alpha_pattern={"(": 1}), "not a LoRA adapter"),
        (lambda folder: edit(folder, rank_pattern={}), "has rank 3, but the configuration says 2"),
        (lambda folder: rename(folder, "0.self_attn.q_proj", "0.input_layernorm"), "which is no linear layer"),
        (spoil, r"lora_A\.weight holds NaN or infinity"),
        (lambda folder: rename(folder, ".lora_A.weight", ".magnitude"), "magnitude is not supported"),
        (lambda folder: rename(folder, "layers.0", "layers.9"), r"adapts model\.layers\.9.*does not have"),
        (lambda folder: rename(folder, "0.self_attn.q_proj.lora_A", "0.mlp.up_proj.lora_A"), "lacks lora_[AB]"),
    ],
)
def test_what_is_not_supported_is_named(break_it: Any, message: str, tmp_path: Path) -> None:
    target = tiny.model()
    folder = save_adapter(tmp_path / "adapter", target)
    break_it(folder)
    with pytest.raises(ModelError, match=message):
        merge(target, str(folder))


def test_an_adapter_of_another_model_does_not_fit(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", tiny.model(hidden_size=64))
    with pytest.raises(ModelError, match=r"does not fit model\.layers\.0\.self_attn\.q_proj"):
        merge(tiny.model(), str(folder))


def edit(folder: Path, **config: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def rename(folder: Path, old: str, new: str) -> None:
    """Replace a part of the tensors' names."""
    file = folder / "adapter_model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(file).items()}, file)
