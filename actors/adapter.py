"""LoRA adapters (arXiv:2106.09685) in the folders that peft writes: merged into a target's weights, or by row."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from exspec.actors.engine.faults import first_line
from exspec.actors.engine.layers.adapters import AdaptedLinear
from exspec.actors.engine.layers.packed import is_quantized
from exspec.actors.source import ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALIGNED = 32  # ranks of a layer are padded to a multiple of this, so that the rows of products are aligned
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Settings of an adapter that is more than W + s B A.
MORE = ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "target_parameters",
        "alora_invocation_tokens")  # fmt: skip
# Initial weights with which an adapter changes the target's own weights too.
CHANGES = ("pissa", "olora", "corda", "loftq", "lora_ga")
UNMERGED = "an adapter cannot be merged into quantized weights; expected adapters by row, or another target"
Parts = dict[str, tuple[Tensor, Tensor]]  # by module: A [r, in], and B [out, r] times the adapter's scale


@torch.no_grad()
def merge(model: PreTrainedModel, folder: str) -> None:
    """Add an adapter to the weights of the model: W + B A, computed in float32 and rounded once. Raises ModelError as
    `read` does, and for quantized weights."""
    if is_quantized(model.config):
        raise ModelError(UNMERGED)
    for name, (down, up) in read(model, folder).items():
        module: Any = model.get_submodule(name)
        delta = (up @ down).to(module.weight.device)
        module.weight.copy_(module.weight.float() + (delta.T if _is_transposed(module) else delta))


@torch.no_grad()
def adapt(model: PreTrainedModel, folders: Sequence[str]) -> None:
    """Let each row of the model have one of these adapters; see `AdaptedLinear`. Raises ModelError as `read` does."""
    adapters = [read(model, folder) for folder in folders]
    for name in dict.fromkeys(name for parts in adapters for name in parts):
        found = {number: parts[name] for number, parts in enumerate(adapters, 1) if name in parts}
        down, up = torch.cat([a for a, _ in found.values()]), torch.cat([b for _, b in found.values()], dim=1)
        of_rank = torch.tensor([number for number, (a, _) in found.items() for _ in a])
        mask = of_rank == torch.arange(len(folders) + 1)[:, None]  # [N + 1, S]
        pad = -len(down) % ALIGNED
        factors = functional.pad(down, (0, 0, 0, pad)), functional.pad(up, (0, pad))
        base = model.get_submodule(name)
        device = getattr(getattr(base, "weight", None), "device", model.device)
        down, up = (factor.to(device, model.dtype) for factor in factors)
        mask = functional.pad(mask, (0, pad)).to(device)
        model.set_submodule(name, AdaptedLinear(base, down, up, mask))


def read(model: PreTrainedModel, folder: str) -> Parts:
    """An adapter that was trained for the model. s = alpha / r, or alpha / sqrt(r) with `use_rslora`, scales it.

    Raises ModelError naming the file and what is not supported or does not fit.
    """
    config, file = _config(Path(folder)), Path(folder) / WEIGHTS
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read ({first_line(error)}); expected the weights of an adapter") from error
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if not (found := TENSOR.fullmatch(name)):
            raise ModelError(f"{file}: the tensor {name} is not supported; expected lora_A and lora_B of linear layers")
        if not tensor.isfinite().all():
            raise ModelError(f"{file}: the tensor {name} holds NaN or infinity; expected finite numbers")
        pairs.setdefault(found[1], {})[found[2]] = tensor.float()
    if not pairs:
        raise ModelError(f"{file}: has no tensors; expected the weights of an adapter")
    parts: Parts = {}
    for name, pair in pairs.items():
        if lacking := {"A", "B"} - set(pair):
            raise ModelError(f"{file}: {name} lacks lora_{min(lacking)}")
        _check_module(model, name, pair, folder)
        rank = _by_module(config, name, "r", "rank_pattern")
        alpha = _by_module(config, name, "lora_alpha", "alpha_pattern")
        if rank != len(pair["A"]):
            raise ModelError(f"{file}: {name} has rank {len(pair['A'])}, but the configuration says {rank:g}")
        parts[name] = pair["A"], alpha / (math.sqrt(rank) if config.get("use_rslora") else rank) * pair["B"]
    return parts


def _check_module(model: PreTrainedModel, name: str, pair: dict[str, Tensor], folder: str) -> None:
    try:
        module: Any = model.get_submodule(name)
    except AttributeError as error:
        raise ModelError(f"{folder}: adapts {name}, which the target does not have") from error
    if _is_transposed(module):
        expected = module.weight.shape[::-1]
    elif isinstance(module, nn.Linear) or (is_quantized(model.config) and hasattr(module, "in_features")):
        expected = torch.Size([module.out_features, module.in_features])
    else:
        raise ModelError(f"{folder}: adapts {name}, which is no linear layer; not supported")
    if ".experts." in name:
        raise ModelError(f"{folder}: adapts {name}, an expert of a mixture; not supported")
    if getattr(module, "weight", None) is model.get_input_embeddings().weight:
        raise ModelError(f"{folder}: adapts {name}, whose weights the target's embedding shares; not supported")
    delta = pair["B"].shape[:1] + pair["A"].shape[1:]
    if delta != expected or len(pair["A"]) != pair["B"].shape[1]:
        shapes = f"its weights are {tuple(delta)}, and the layer's {tuple(expected)}"
        raise ModelError(f"{folder}: does not fit {name} ({shapes}); expected an adapter for this target")


def _is_transposed(module: nn.Module) -> bool:
    """Whether a layer holds its weights as [in, out], as GPT-2's do."""
    return isinstance(module, Conv1D)


def _config(folder: Path) -> dict[str, Any]:
    """The configuration of an adapter. Raises ModelError naming what is missing or not supported."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; expected a folder or URL with an adapter")
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind = config["peft_type"]
        for name, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
            for pattern, value in ((config.get(patterns) or {}) | {"": config[name]}).items():
                re.compile(pattern)
                float(value)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        raise ModelError(f"{folder}: not a LoRA adapter ({first_line(error)}); expected peft's {CONFIG}") from error
    file = folder / CONFIG
    if kind != "LORA":
        raise ModelError(f"{file}: peft_type is {kind}; expected LORA")
    if other := [name for name in MORE if config.get(name)]:
        raise ModelError(f"{file}: {other[0]} is not supported; expected plain LoRA")
    if (biases := config.get("bias", "none")) != "none":
        raise ModelError(f"{file}: bias is {biases}; expected none")
    if (start := str(config.get("init_lora_weights")).lower()).startswith(CHANGES):
        raise ModelError(f"{file}: init_lora_weights is {start}, which changes the target; convert it to plain LoRA")
    return config


def _by_module(config: dict[str, Any], name: str, setting: str, patterns: str) -> float:
    """A setting of a module. `patterns` holds values by regular expressions of the ends of names."""
    given = config.get(patterns) or {}
    return float(next((v for key, v in given.items() if re.match(rf"(.*\.)?({key})$", name)), config[setting]))
