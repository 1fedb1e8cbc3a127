"""Clover (arXiv:2405.00263, arXiv:2408.00264): one layer over the target's last hidden states, and for each drafted
token a step of a few matrix products and the target's own head."""

import json
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from exspec.actors.engine.drafters.clover_head import NAME, CloverConfig, CloverHead, read_config
from exspec.actors.engine.drafters.drafter import DrafterContext, DraftRows
from exspec.actors.engine.drafters.head import HeadDrafter, filled, read_tensors
from exspec.actors.engine.drafters.model import Step
from exspec.actors.engine.kv.batch import Batch


class Clover(HeadDrafter):
    """The head's layer runs once for each token that the target has chosen; drafts do not enter its KV.

    embedding: the rows of the target's output head, by token. score: maps hidden states to the target's logits.
    """

    asks: ClassVar[str] = "a head of Clover"
    configures: ClassVar[type[PretrainedConfig]] = CloverConfig
    learner = "exspec.actors.engine.learners.clover:CloverLearner"
    embedding: Tensor
    score: nn.Module

    @classmethod
    def reads(cls, values: dict[str, Any]) -> bool:
        return values.get("model_type") == NAME

    @classmethod
    def read(cls, values: dict[str, Any]) -> CloverConfig:
        return read_config(values)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: str | torch.device, allow_pickle: bool) -> CloverHead:
        config = read_config(json.loads((folder / "config.json").read_text()))
        return filled(CloverHead(config), read_tensors(folder, allow_pickle), folder, cls.asks, dtype, device)

    @classmethod
    def aux_layers_of(cls, target: PretrainedConfig, draft: PretrainedConfig) -> tuple[int, ...]:
        return (target.get_text_config().num_hidden_layers,)

    @classmethod
    def longest(cls, draft: PretrainedConfig) -> int:
        return int(draft.heads)

    @classmethod
    def build(cls, context: DrafterContext) -> Self:
        drafter = super().build(context)
        score: Any = context.target.get_output_embeddings()
        drafter.embedding, drafter.score = score.weight, drafter.target.model.get_output_embeddings()
        return drafter

    def _first(self, rows: DraftRows) -> Step:
        batch = rows.batch(rows.pending[:, None], -1)
        return self._step(0, self.head.forward(batch, features=self._features(batch)), batch.tokens)

    def _next(self, batch: Batch, state: tuple[int, Tensor]) -> Step:
        return self._step(*state, batch.tokens)

    @torch.inference_mode()
    def _step(self, number: int, hidden: Tensor, tokens: Tensor) -> Step:
        head: Any = self.head.model
        hidden, output = head.step(number, hidden, self.embedding[tokens])
        return self.score(output), (number + 1, hidden)
