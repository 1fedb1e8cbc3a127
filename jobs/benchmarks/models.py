"""Models with random weights, and how long the device takes to read them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from exspec.jobs.benchmarks.decoding import timed
from exspec.jobs.benchmarks.shapes import SHAPES


def build(name: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model of the shape with random weights. It never ends a sequence."""
    torch.manual_seed(len(name))
    settings = dict(SHAPES[name])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    # Spread the logits. If they were nearly equal, rounding would choose the tokens, unlike in a trained model.
    model.get_output_embeddings().weight.data.mul_(4)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model  # type: ignore[no-any-return]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.ones((1 << 30) // (1 if device.type == "cuda" else 8), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), device)[1] for _ in range(6))
    return 2 * source.nbytes / seconds
