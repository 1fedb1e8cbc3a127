"""Models without an output head: they return hidden states."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Headless(nn.Module):
    """The body of a causal language model, behind the interface of the whole model: its logits [R, Q, D] are the hidden
    states after the last norm. Modules have the same names as in the whole model."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.base_model_prefix: str = body.base_model_prefix
        self.generation_config = None  # it generates nothing
        self.add_module(self.base_model_prefix, body)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self.base_model_prefix), name)  # the configuration, dtype and device

    def forward(self, logits_to_keep: int = 0, **inputs: Any) -> CausalLMOutputWithPast:
        found = getattr(self, self.base_model_prefix)(**inputs)
        states = found.last_hidden_state[:, -logits_to_keep:]
        return CausalLMOutputWithPast(logits=states, past_key_values=found.past_key_values)


def headless(model: PreTrainedModel) -> Any:
    """The model without its output head. It shares the weights."""
    return model if isinstance(model, Headless) else Headless(model.base_model)
