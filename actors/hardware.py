"""The record of the hardware that tokens were computed on."""

import platform
from pathlib import Path

import torch


def hardware(device: torch.device) -> dict[str, str]:
    """The device's model and torch's version. In bfloat16, tokens may differ between devices and between versions."""
    return {"device": _model(device), "torch": torch.__version__}


def describe_hardware(device: torch.device) -> str:
    """The device in a few words, for a benchmark's report."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _model(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
