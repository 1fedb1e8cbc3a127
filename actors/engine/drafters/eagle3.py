"""EAGLE-3 (arXiv:2503.01840): a head of one layer over hidden states of the target. Drafts are chains, not trees."""

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.drafter import DrafterContext, DraftRows
from exspec.actors.engine.drafters.eagle3_head import Eagle3Config, Eagle3Head, is_head, load_head, read_config
from exspec.actors.engine.drafters.head import HeadDrafter
from exspec.actors.engine.drafters.model import Step
from exspec.actors.engine.kv.batch import Batch


class Eagle3(HeadDrafter):
    """Where the target has no feature yet, the head's own hidden state at the previous position takes its place.

    The head's KV at the last position of a shared prefix depends on the token after it: the last prompt fed decides.
    """

    asks: ClassVar[str] = "a head of EAGLE-3"
    configures: ClassVar[type[PretrainedConfig]] = Eagle3Config
    remembers: ClassVar[tuple[int, ...]] = (1,)
    learner = "exspec.actors.engine.learners.eagle3:Eagle3Learner"

    @classmethod
    def reads(cls, values: dict[str, Any]) -> bool:
        return is_head(values)

    @classmethod
    def read(cls, values: dict[str, Any]) -> Eagle3Config:
        return read_config(values)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: str | torch.device, allow_pickle: bool) -> Eagle3Head:
        return load_head(folder, dtype, device, allow_pickle=allow_pickle)

    @classmethod
    def aux_layers_of(cls, target: PretrainedConfig, draft: PretrainedConfig) -> tuple[int, ...]:
        """The layers that the head names, or a low, a middle and a high one."""
        layers = target.get_text_config().num_hidden_layers
        return tuple(draft.aux_layers or (2, layers // 2, layers - 3))

    @classmethod
    def unfit(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:
        if reason := super().unfit(target, draft, config):
            return reason
        assert isinstance(draft, Eagle3Config)
        text = target.get_text_config()
        if not draft.embeds and draft.hidden_size != text.hidden_size:
            return f"the head has no embedding, and its width of {draft.hidden_size} differs from the target's"
        if outside := [n for n in cls.aux_layers_of(target, draft) if not 0 < n < text.num_hidden_layers]:
            return f"the head asks for the input of layer {outside[0]}; the target has {text.num_hidden_layers} layers"
        return None

    @classmethod
    def build(cls, context: DrafterContext) -> Self:
        drafter = super().build(context)
        if drafter.head.model.embed_tokens is None:
            drafter.head.model.embed_tokens = context.target.get_input_embeddings()
        return drafter

    def _first(self, rows: DraftRows) -> Step:
        batch = rows.batch(rows.pending[:, None], -1)
        return self.head.forward(batch, features=self._features(batch)), None

    def _next(self, batch: Batch, state: None) -> Step:
        batch = batch.shifted(-1)
        return self.head.forward(batch, features=self.head.recall(self.remembers, batch.shifted(-1))), None

    @torch.inference_mode()
    def _features(self, batch: Batch) -> Tensor:
        project: Any = self.head.model.fc
        return project(super()._features(batch))  # type: ignore[no-any-return]
