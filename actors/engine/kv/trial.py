"""Tests on the device: whether attention in place works there for a model, and whether a model can run a part of its
layers. In some families layers pass on more than hidden states."""

from weakref import WeakKeyDictionary

import torch
from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.faults import first_line
from exspec.actors.engine.kv.attention import trial
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import GATHERED, PagedModel, kv_shape
from exspec.actors.engine.kv.pages import Pages

TOKENS = 6
RESULTS: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], str | None]] = WeakKeyDictionary()


def attention_trial(
    model: PretrainedConfig, device: torch.device, dtype: torch.dtype, page: int, *, weighs: bool = False
) -> str | None:
    """The reason why attention in place does not work on the device for a model, see `trial`; None if it does."""
    _, kv_heads, size = kv_shape(model)
    return trial(device, dtype, model.get_text_config().num_attention_heads, kv_heads, size, page, weighs)


def spans_trial(model: PreTrainedModel, depths: tuple[int, ...] = (1,)) -> str | None:
    """The reason why a forward cannot end after these numbers of layers and another resume there; None if it can. A
    model is tested once with the same numbers."""
    results = RESULTS.setdefault(model, {})
    if depths not in results:
        results[depths] = _try(model, depths)
    return results[depths]


@torch.inference_mode()
def _try(model: PreTrainedModel, depths: tuple[int, ...]) -> str | None:
    tokens = torch.arange(1, TOKENS + 1, device=model.device)[None] % model.config.get_text_config().vocab_size
    pages = Pages(1, pages=TOKENS, size=TOKENS, chunk=TOKENS, longest=2 * TOKENS, device=model.device)
    pages.begin(0, [], 0, TOKENS, 0)
    slots = starts = torch.zeros(1, dtype=torch.long, device=model.device)
    try:
        cached = PagedModel(model, pages, GATHERED)
        batch = Batch(slots, tokens, starts, TOKENS)
        expected = cached.forward(batch)
        cached.remember(depths)
        cached.forward(batch)  # the gates record what the layers return
        cached.fill(batch, last=depths[0])
        for first, last in zip(depths, [*depths[1:], None], strict=True):
            resumed = cached.forward(batch, first=first, last=last)
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # layers of unknown families fail in many ways
        return f"{type(model).__name__} cannot run a part of its layers: {first_line(fault)}"
    off = (resumed - expected).float().abs().max() / expected.float().abs().max()
    if off <= 16 * torch.finfo(resumed.dtype).eps:
        return None
    return f"{type(model).__name__} run in two parts has logits that are {off:.1e} off"
