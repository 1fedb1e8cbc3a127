"""An EAGLE-3 head is trained as it drafts: in a row of steps, each on the head's output of the step before
("training-time test", arXiv:2503.01840).

In step i, the column of a token attends to the columns of the tokens up to it in the first step, and to its own columns
of the steps since.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from exspec.actors.engine.drafters.eagle3 import Eagle3
from exspec.actors.engine.drafters.eagle3_head import Eagle3Config, Eagle3Head, write_head
from exspec.actors.engine.drafters.head import proposed
from exspec.actors.engine.learners.learner import (
    Growth,
    Learner,
    Lesson,
    Outcome,
    copy_norm,
    final_norm,
    shape_of,
    spread,
)

DECAY = 0.8  # of the loss, by step
PROPOSED = 32_000  # tokens that a new head can propose, at most


class Eagle3Learner(Learner):
    """A new head has the target's width and shape of layers, and uses its embedding. Its output head and norm begin as
    copies of the target's. It can propose all tokens, or those that the target wrote most often."""

    @classmethod
    def grow(cls, target: PreTrainedModel, growth: Growth) -> PreTrainedModel:
        if growth.layers not in (None, 1):
            raise ValueError(f"a head of EAGLE-3 has one layer, not {growth.layers}")
        shape = shape_of(target)
        size = shape["vocab_size"]
        used = sorted(n for n, _ in growth.counts.most_common(PROPOSED)) if size > PROPOSED else list(range(size))
        total = target.config.get_text_config().num_hidden_layers
        if total < 4:
            raise ValueError(f"a head of EAGLE-3 reads three layers before the last; the target has {total} layers")
        layers = [2, total // 2, total - 3] if total > 6 else spread(3, 1, total - 1)
        head = Eagle3Head(Eagle3Config(aux_layers=layers, draft_vocab_size=len(used), **shape))
        tokens = torch.tensor(used)
        score: Any = target.get_output_embeddings()
        with torch.no_grad():
            head.d2t.copy_(tokens - torch.arange(len(used)))
            head.lm_head.weight.copy_(score.weight[tokens.to(score.weight.device)])
        copy_norm(final_norm(target), head.norm)
        return head

    def __init__(self, target: PreTrainedModel, model: PreTrainedModel, drafts: int) -> None:
        super().__init__(target, model, drafts)
        last = target.config.get_text_config().num_hidden_layers
        self.layers = (*Eagle3.aux_layers_of(target.config, model.config), last)
        self.embed = self.model.embed_tokens or target.get_input_embeddings()
        if self.model.embed_tokens is not None:
            self.model.embed_tokens.requires_grad_(False)
        self.proposed = proposed(model)

    def outcome(self, lesson: Lesson) -> Outcome:
        # Every place has all steps; past the end of a text nothing is learned.
        tokens, text, own = (pad(t, (0, self.count)) for t in (lesson.tokens, lesson.text, lesson.own))
        states = pad(lesson.states, (0, 0, 0, self.count))
        head, width = self.model, lesson.tokens.shape[1] - 1
        size = head.config.target_hidden_size
        with torch.no_grad():
            # The target's distribution of every token, over the tokens that the head can propose.
            before = pad(text[:, 1:], (0, 1))  # the columns before tokens
            number = before.flatten().cumsum(0).view_as(before) - 1  # of a column among them
            wanted = self.wanted(states[..., -size:][before])
            wanted, best = wanted[:, self.proposed].softmax(-1), wanted.argmax(-1)
            likely = self.proposed[wanted.argmax(-1)] == best
            embedded = self.embed(tokens)
        unrolled, losses, right, known = Unrolled(head), [], [], []
        feature = head.fc(states[..., :-size])
        for i in range(self.count):
            feature = unrolled.step(embedded[:, 1 + i : 1 + i + width], feature[:, :width])
            learned = text[:, 2 + i : 2 + i + width]
            column = number[:, 1 + i : 1 + i + width][learned]
            logits = head.lm_head(head.norm(feature[learned])).float()
            each = cross_entropy(logits, wanted[column], reduction="none") * likely[column]
            losses.append(DECAY**i * each.sum() / likely[column].sum().clamp(min=1))
            hit = torch.zeros_like(learned)
            hit[learned] = self.proposed[logits.argmax(-1)] == tokens[:, 2 + i : 2 + i + width][learned]
            right.append(hit)
            known.append(own[:, 2 + i : 2 + i + width])
        return Outcome.of_steps(losses, right, known)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        write_head(self.model, self.target, folder, dtype, self.count)


class Unrolled:
    """Runs the head over whole sequences, step by step."""

    def __init__(self, head: Any) -> None:
        self.head, self.layer = head, head.layers[0]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def step(self, embedding: Tensor, feature: Tensor) -> Tensor:
        """The hidden states [R, S, D] of the next step."""
        layer = self.layer
        attention, number = layer.self_attn, len(self.keys)
        rows, width, _ = feature.shape
        normed = layer.hidden_norm(feature)
        x = torch.cat([layer.input_layernorm(embedding), normed], dim=-1)
        query, key, value = (
            project(x).view(rows, width, -1, attention.head_dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        positions = torch.arange(number, number + width, device=x.device)[None]
        query, key = apply_rotary_pos_emb(query, key, *self.head.rotary_emb(x, positions))
        groups = attention.num_key_value_groups
        self.keys.append(key.repeat_interleave(groups, 1))
        self.values.append(value.repeat_interleave(groups, 1))
        later = torch.ones(width, width, dtype=torch.bool, device=x.device).triu(1)
        before = (query @ self.keys[0].transpose(2, 3)).masked_fill(later, -torch.inf)
        own = [(query * k).sum(-1, keepdim=True) for k in self.keys[1:]]
        weights = (torch.cat([before, *own], dim=-1) * attention.scaling).softmax(-1)
        mixed = weights[..., :width] @ self.values[0]
        for i, v in enumerate(self.values[1:]):
            mixed = mixed + weights[..., width + i : width + i + 1] * v
        hidden = (normed if layer.norm_before_residual else feature) + attention.o_proj(
            mixed.transpose(1, 2).reshape(rows, width, -1)
        )
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[no-any-return]
