"""Tiny models with quantized weights, in the formats that transformers loads on a CPU."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

PACKAGES = ("torchao", "compressed_tensors")  # packages that `make test` does not install; .ci/run does
FORMATS = ("int8", "int8 dynamic", "w4a16", "w8a8", "w8a8 tensor")


def need_packages() -> None:
    for name in PACKAGES:
        pytest.importorskip(name)


def save_quantized(model: PreTrainedModel, form: str, folder: Path) -> Path:
    """The model's weights in one of the FORMATS: two of torchao, three of compressed-tensors.

    int8, w4a16: weights only. int8 dynamic, w8a8: activations are quantized too, with a scale per token; w8a8 tensor:
    with one scale for all rows.
    """
    if form.startswith("int8"):
        return _torchao(model, form, folder)
    return _compressed(model, form, folder)


def _torchao(model: PreTrainedModel, form: str, folder: Path) -> Path:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    plain = folder.with_name(f"{folder.name}-plain")
    model.save_pretrained(plain)
    kind = Int8DynamicActivationInt8WeightConfig() if "dynamic" in form else Int8WeightOnlyConfig()
    quantized = AutoModelForCausalLM.from_pretrained(plain, dtype=model.dtype, quantization_config=TorchAoConfig(kind))
    quantized.save_pretrained(folder)
    return folder


def _compressed(model: PreTrainedModel, form: str, folder: Path) -> Path:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    bits, group = int(form[1]), 16 if form.startswith("w4") else None
    weights = QuantizationArgs(num_bits=bits, strategy="group" if group else "channel", group_size=group)
    scale = "tensor" if form.endswith("tensor") else "token"
    inputs = QuantizationArgs(num_bits=8, dynamic=True, strategy=scale) if "a8" in form else None
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    kind = "int-quantized" if inputs else "pack-quantized"
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], format=kind)
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            parts = module.weight.data.float().view(len(module.weight), -1, group or module.weight.shape[1])
            scales = parts.abs().amax(-1) / (2 ** (bits - 1) - 1)
            module.weight_scale.data = scales.to(module.weight.dtype).view(module.weight_scale.shape)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=kind)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder
