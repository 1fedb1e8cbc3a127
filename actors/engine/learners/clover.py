"""Each step of a Clover head learns the target's distribution of the token one, two or more positions further on
(arXiv:2405.00263; distributions: arXiv:2310.07177)."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel

from exspec.actors.engine.drafters.clover_head import CloverConfig, CloverHead
from exspec.actors.engine.layers.spans import layers_of
from exspec.actors.engine.learners.learner import Growth, Learner, Lesson, Outcome, copy_norm, final_norm, shape_of

NOISE = 0.01
LLAMAS = ("llama", "mistral")  # families whose layers have the same modules as the head's layer
BIASES = ("attention_bias", "mlp_bias")


class CloverLearner(Learner):
    """In a new head Q and K are nearly the identity; V and the MLPs are zero. For a Llama target the head's layer and
    norms are copies of the target's last layer and norm. For another target the layer is random and the norms are
    ones."""

    drafts = 3
    rate = 1e-2

    @classmethod
    def grow(cls, target: PreTrainedModel, growth: Growth) -> PreTrainedModel:
        if growth.layers not in (None, 1):
            raise ValueError(f"a head of Clover has one layer, not {growth.layers}")
        text, alike = target.config.get_text_config(), target.config.model_type in LLAMAS
        biases = {name: getattr(text, name) for name in BIASES if alike and hasattr(text, name)}
        head = CloverHead(CloverConfig(growth.drafts, **shape_of(target) | biases))
        with torch.no_grad():
            if alike:
                head.layers[0].load_state_dict(deepcopy(list(layers_of(target))[-1].state_dict()))
                norm = final_norm(target)
                copy_norm(norm, head.input_norm)
                copy_norm(norm, head.norm)
            for matrix in (head.q_proj.weight, head.k_proj.weight):
                matrix.copy_(torch.eye(len(matrix)) + NOISE * torch.randn_like(matrix))
            for tensor in (head.v_proj.weight, *head.mlps.parameters()):
                tensor.zero_()
        return head

    def __init__(self, target: PreTrainedModel, model: PreTrainedModel, drafts: int) -> None:
        super().__init__(target, model, min(drafts, model.config.heads))
        self.layers = (target.config.get_text_config().num_hidden_layers,)

    def outcome(self, lesson: Lesson) -> Outcome:
        tokens, text, own = lesson.tokens, lesson.text, lesson.own
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        head: Any = self.model
        hidden = head(input_ids=tokens, features=lesson.states, position_ids=positions).logits
        with torch.no_grad():
            number = text.flatten().cumsum(0).view_as(text) - 1  # of a place among those with a token
            expected = self.wanted(lesson.states[text]).softmax(-1)
        losses: list[Tensor] = []
        right, known = list[Tensor](), list[Tensor]()
        for i in range(self.count):
            # Token s + i + 2 from the states up to position s and token s + i + 1.
            hidden, output = head.step(
                i, hidden[:, : tokens.shape[1] - i - 2], self.score.weight[tokens[:, i + 1 : -1]]
            )
            wanted, here = tokens[:, i + 2 :], text[:, i + 2 :]
            hit = torch.zeros_like(here)
            if here.any():
                logits = self.score(output[here]).float()
                losses.append(cross_entropy(logits, expected[number[:, i + 1 : -1][here]]))
                hit[here] = logits.argmax(-1) == wanted[here]
            for found, values in ((right, hit), (known, own[:, i + 2 :])):
                found.append(pad(values, (0, i)))
        return Outcome.of_steps(losses, right, known)
