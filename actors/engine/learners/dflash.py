"""A DFlash head learns to draft blocks that begin at random places of a text (arXiv:2602.06036). One forward has many.

The weights of the columns are those of D-PACE (arXiv:2605.18810). With the cross-entropy CE_j of column j, all columns
up to m are right with a chance of about q_1 * ... * q_m, where q = (1 - a) exp(-CE) + a. The weight of column j is the
sum of these products over m >= j, without gradients. A column learns the target's distribution of its token: from a few
thousand rows, it learns more than from the token alone.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from exspec.actors.engine.drafters.dflash_head import DFlashConfig, DFlashHead, write_head
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

LAYERS, FEATURES = 5, 5  # of a head for a target of many layers, as the authors have them
SMOOTHING = 0.5  # a
ANCHORS = 0.25  # blocks of a text, for each place where one could begin
MOST = 256  # blocks of a text


class DFlashLearner(Learner):
    """A new head has the target's width and shape of layers, and uses the target's embedding and output head."""

    drafts = 7

    @classmethod
    def grow(cls, target: PreTrainedModel, growth: Growth) -> PreTrainedModel:
        total = target.config.get_text_config().num_hidden_layers
        if total < 2:
            raise ValueError("a head of DFlash reads hidden states before the last layer; the target has one layer")
        features = min(FEATURES, total - 1)
        shape = shape_of(target)
        unused = (n for n in reversed(range(shape["vocab_size"])) if not growth.counts[n])
        config = DFlashConfig(
            aux_layers=sorted(set(spread(features, min(2, total - 1), max(total - 2, 1)))),
            block_size=growth.drafts + 1,
            mask_token_id=next(unused, 0),
            target_layers=total,
            num_hidden_layers=growth.layers or min(LAYERS, max(2, total // 4)),
            **shape,
        )
        head = DFlashHead(config)
        copy_norm(final_norm(target), head.norm)
        return head

    def __init__(self, target: PreTrainedModel, model: PreTrainedModel, drafts: int) -> None:
        config: Any = model.config
        super().__init__(target, model, min(drafts, config.block_size - 1))
        if any(config.causal):
            raise ValueError("a head of DFlash with causal layers cannot be trained; expected one without them")
        self.layers = (*config.aux_layers, target.config.get_text_config().num_hidden_layers)
        config._attn_implementation = "sdpa"
        for layer in self.model.layers:
            layer.self_attn.causal = True  # each column has a query of its own: the mask says what it sees
        embeddings: Any = self.model.embed_tokens or target.get_input_embeddings()
        self.embedding = embeddings.weight  # without a scale of the target's own
        if self.model.lm_head is not None:
            self.score = self.model.lm_head
        self.proposed = proposed(self.model)
        self.numbers = torch.full((config.vocab_size,), -1, device=self.proposed.device)  # -1: it cannot propose that
        self.numbers[self.proposed] = torch.arange(len(self.proposed), device=self.proposed.device)
        for module in (self.model.embed_tokens, self.model.lm_head):
            if module is not None:
                module.requires_grad_(False)

    def outcome(self, lesson: Lesson) -> Outcome:
        tokens, text, own = lesson.tokens, lesson.text, lesson.own
        config: Any = self.model.config
        begins = (text if self.model.training else own)[:, 1:]  # a block begins before a token
        count = min(max(1, int(ANCHORS * int(begins.sum(1).max()))), MOST)
        drawn = torch.rand(begins.shape).to(begins.device) + begins.float()  # of the CPU's random state
        anchors = drawn.topk(count, dim=1).indices.sort(dim=1).values  # [R, A]
        places = anchors[..., None] + torch.arange(config.block_size, device=tokens.device)  # [R, A, N]
        inside = places.clamp(max=tokens.shape[1] - 1)
        block = tokens.gather(1, inside.flatten(1)).view_as(places)
        known, judged = (t.gather(1, inside.flatten(1)).view_as(places)[..., 1:] for t in (text, own))
        known &= (places == inside)[..., 1:] & begins.gather(1, anchors)[..., None]  # [R, A, K]
        size = config.target_hidden_size
        hidden = self._states(block, places, anchors, lesson.states[..., :-size])[..., 1:, :][known]
        logs, expected = self.score(hidden).float().log_softmax(-1), block[..., 1:][known]
        with torch.no_grad():
            # The target's distribution of these tokens, over the tokens that the head can propose.
            number = begins.flatten().cumsum(0).view_as(begins) - 1  # of a place among those before such tokens
            wanted = self.wanted(lesson.states[:, :-1, -size:][begins])
            wanted = wanted[:, self.proposed].softmax(-1)
            column = number.gather(1, (inside[..., 1:] - 1).flatten(1)).view_as(known)[known]
            own_number = self.numbers[expected]
            can = own_number >= 0
            chances, losses = (torch.zeros(known.shape, device=tokens.device) for _ in range(2))
            chances[known] = logs.gather(-1, own_number.clamp(min=0)[:, None])[:, 0].exp() * can
        losses[known] = -(wanted[column] * logs).sum(-1) * can
        right = torch.zeros_like(known)
        right[known] = self.proposed[logs.argmax(-1)] == expected
        begun = (known & judged)[..., 0]
        return Outcome((pace(chances, known) * losses).sum() / known.sum(), right[begun], known[begun])

    def _states(self, block: Tensor, places: Tensor, anchors: Tensor, features: Tensor) -> Tensor:
        """The last states [R, A, N, D] of blocks [R, A, N] behind the features [R, S, F] before their anchors."""
        head, (rows, count, size) = self.model, block.shape
        width, device = features.shape[1], block.device
        masked = block.clone()
        masked[..., 1:] = head.config.mask_token_id
        hidden = embedding(masked, self.embedding) * head.config.embedding_scale
        if head.mask_embedding is not None:
            hidden = torch.cat([hidden[..., :1, :], head.mask_embedding.expand_as(hidden[..., 1:, :])], dim=-2)
        hidden = hidden.flatten(1, 2)
        context = head.hidden_norm(head.fc(features))
        positions = torch.cat([torch.arange(width, device=device).expand(rows, -1), places.flatten(1)], dim=1)
        turns = head.rotary_emb(context, positions)
        before = torch.arange(width, device=device) < anchors[..., None]  # [R, A, S]
        blocks = torch.eye(count, dtype=torch.bool, device=device).repeat_interleave(size, 1)  # [A, A * N]
        mask = torch.cat([before, blocks.expand(rows, -1, -1)], dim=-1).repeat_interleave(size, 1)[:, None]
        for layer in head.layers:
            hidden = layer(hidden, context, turns, (mask, mask), _Together())
        found: Tensor = head.norm(hidden).unflatten(1, (count, size))
        return found

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        write_head(self.model, self.target, folder, dtype)


class _Together:
    """A cache that keeps nothing: context and blocks are computed together."""

    def update(self, keys: Tensor, values: Tensor, _: int) -> tuple[Tensor, Tensor]:
        return keys, values


def pace(chances: Tensor, known: Tensor) -> Tensor:
    """The weights of the columns' losses, [..., K] each. chances: of the columns' tokens, which are exp(-CE). known:
    which columns have a token, always the first ones."""
    products = ((1 - SMOOTHING) * chances + SMOOTHING).cumprod(-1) * known
    return products.flip(-1).cumsum(-1).flip(-1)
