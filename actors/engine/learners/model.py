"""A draft model learns the target's distribution of every token of a text (arXiv:2310.07177)."""

from copy import deepcopy
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from exspec.actors.engine.layers.packed import is_quantized
from exspec.actors.engine.layers.spans import layers_of
from exspec.actors.engine.learners.learner import Growth, Learner, Lesson, Outcome, logits_of, runs, spread

FEWEST = 2  # layers of a new draft model: one learns much less


class ModelLearner(Learner):
    """A new draft model has a quarter of the target's own layers, but at least two if the target has three, and the
    target's embedding and output head."""

    @classmethod
    def grow(cls, target: PreTrainedModel, growth: Growth) -> PreTrainedModel:
        if is_quantized(target.config):
            raise ValueError("a draft model cannot be made from quantized weights")
        layers = layers_of(target)
        total = len(layers)
        count = growth.layers or max(1, min(FEWEST, total - 1), total // 4)
        if count > total:
            raise ValueError(f"a draft model of {count} layers cannot be made from the {total} layers of the target")
        chosen = spread(count, 0, total - 1)
        config: Any = deepcopy(target.config)
        text = config.get_text_config()
        text.num_hidden_layers = count
        if getattr(text, "layer_types", None):
            text.layer_types = [text.layer_types[n] for n in chosen]
        make: Any = type(target)
        model: PreTrainedModel = make(config)
        place = next(name for name, module in target.named_modules() if module is layers)
        renamed = {f"{place}.{old}.": f"{place}.{new}." for new, old in enumerate(chosen)}
        weights = {}
        for name, tensor in target.state_dict().items():
            if not name.startswith(f"{place}."):
                weights[name] = tensor
            for old, new in renamed.items():
                if name.startswith(old):
                    weights[new + name.removeprefix(old)] = tensor
        model.load_state_dict(weights)
        return model

    def __init__(self, target: PreTrainedModel, model: PreTrainedModel, drafts: int) -> None:
        super().__init__(target, model, drafts)
        self.layers = (target.config.get_text_config().num_hidden_layers,)

    def outcome(self, lesson: Lesson) -> Outcome:
        text, own = lesson.text[:, 1:], lesson.own[:, 1:]
        with torch.no_grad():
            wanted = self.wanted(lesson.states[:, :-1][text])
        # Padding is on the right, so no token before it sees it.
        hidden = self.model.base_model(input_ids=lesson.tokens[:, :-1], use_cache=False).last_hidden_state
        logits = logits_of(self.model, hidden[text])
        shared = min(logits.shape[-1], wanted.shape[-1])
        right = torch.zeros_like(text)
        right[text] = logits.argmax(-1) == lesson.tokens[:, 1:][text]
        loss = cross_entropy(logits[..., :shared], wanted[..., :shared].softmax(-1))
        return Outcome(loss, *runs(right, own, self.count))
