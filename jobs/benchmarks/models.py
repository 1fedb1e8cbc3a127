"""Models with random weights, and how long the device takes to read them."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from exspec.actors.engine.kv.cached_model import kv_shape
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


def model_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a forward reads. An embedding table counts only if it is the output's weight too."""
    embedding: Any = model.get_input_embeddings()
    size = sum(p.nbytes for p in model.parameters())
    return size if model.config.tie_word_embeddings else size - int(embedding.weight.nbytes)


def kv_bytes(model: PreTrainedModel) -> int:
    """Bytes of one token's KV."""
    layers, heads, size = kv_shape(model.config)
    return int(2 * layers * heads * size * model.dtype.itemsize)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.ones((1 << 30) // (1 if device.type == "cuda" else 8), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), device)[1] for _ in range(6))
    return 2 * source.nbytes / seconds
