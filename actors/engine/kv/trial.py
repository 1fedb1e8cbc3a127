"""Whether a model can be run in spans of its layers: in some families they hand on more than hidden states."""

from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from exspec.actors.engine.kv.attention import first_line
from exspec.actors.engine.kv.cached_model import GATHERED, PagedModel
from exspec.actors.engine.kv.pages import Pages

TOKENS = 6
FOUND: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], str | None]] = WeakKeyDictionary()


def spans_trial(model: PreTrainedModel, depths: tuple[int, ...] = (1,)) -> str | None:
    """Why the model cannot be left after so many layers, and gone on with from there to the next of them and to its
    end, in one line; None where it can. It is tried once."""
    known = FOUND.setdefault(model, {})
    if depths not in known:
        known[depths] = _try(model, depths)
    return known[depths]


@torch.inference_mode()
def _try(model: PreTrainedModel, depths: tuple[int, ...]) -> str | None:
    tokens = torch.arange(1, TOKENS + 1, device=model.device)[None] % model.config.get_text_config().vocab_size
    pages = Pages(1, pages=TOKENS, size=TOKENS, chunk=TOKENS, longest=2 * TOKENS, device=model.device)
    pages.begin(0, [], 0, TOKENS)
    slots = starts = torch.zeros(1, dtype=torch.long, device=model.device)
    try:
        cached = PagedModel(model, pages, GATHERED)
        expected = cached.forward(slots, tokens, starts, TOKENS)
        cached.remember(depths)
        cached.forward(slots, tokens, starts, TOKENS)  # layers tell what they return
        cached.fill(slots, tokens, starts, TOKENS, last=depths[0])
        for first, last in zip(depths, [*depths[1:], None], strict=True):
            found = cached.forward(slots, tokens, starts, TOKENS, first=first, last=last)
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # other people's layers fail in many ways
        return f"{type(model).__name__} cannot be left in its midst: {first_line(fault)}"
    off = (found - expected).float().abs().max() / expected.float().abs().max()
    if off <= 16 * torch.finfo(found.dtype).eps:
        return None
    return f"{type(model).__name__} left in its midst and gone on with has logits that are {off:.1e} off"
