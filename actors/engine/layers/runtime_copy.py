"""The runtime copy of a model: the caller's weights, the engine's attention, and optionally packed linear layers."""

import copy
from typing import Any

from transformers import PreTrainedModel

from exspec.actors.engine.layers.packed import PackedLinear, is_plain


def runtime_copy(model: PreTrainedModel, attention: str | None, packed: bool) -> PreTrainedModel:
    """A copy of the modules that shares the model's weights. The caller's model stays unchanged.

    attention: name of the attention implementation; None keeps the model's own.
    packed: hold the weights of linear layers a second time, in a faster layout.
    """
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    runtime = copy.deepcopy(model, shared)
    if attention is not None:
        runtime.config._attn_implementation = attention
    if packed:
        for module in list(runtime.modules()):
            for name, child in module.named_children():
                if is_plain(child):
                    setattr(module, name, PackedLinear(child))
    return runtime
