"""DFlash (arXiv:2602.06036): a head whose draft is one forward, whatever K is."""

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PretrainedConfig

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.dflash_head import DFlashConfig, DFlashHead, is_head, load_head, read_config
from exspec.actors.engine.drafters.drafter import DrafterContext, DraftRows
from exspec.actors.engine.drafters.head import HeadDrafter, widened
from exspec.actors.engine.drafters.model import Step
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.layers.cuts import cut


class DFlash(HeadDrafter):
    """The KV of the context depends on the target's hidden states alone. The block's KV lies behind it, and later
    context overwrites it.

    A forward takes the context of the last round together with the block. The block has the length that the head was
    trained with, whatever K is.

    score: maps the head's states to logits.
    """

    follows: ClassVar[bool] = False
    lengths: ClassVar[tuple[int, ...]] = (2, 3, 4, 5, 6, 8, 11, 15)
    probed_with: ClassVar[int] = 15
    asks: ClassVar[str] = "a head of DFlash"
    configures: ClassVar[type[PretrainedConfig]] = DFlashConfig
    learner = "exspec.actors.engine.learners.dflash:DFlashLearner"
    score: nn.Module

    @classmethod
    def reads(cls, values: dict[str, Any]) -> bool:
        return is_head(values)

    @classmethod
    def read(cls, values: dict[str, Any]) -> DFlashConfig:
        return read_config(values)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: str | torch.device, allow_pickle: bool) -> DFlashHead:
        return load_head(folder, dtype, device, allow_pickle=allow_pickle)

    @classmethod
    def aux_layers_of(cls, target: PretrainedConfig, draft: PretrainedConfig) -> tuple[int, ...]:
        return tuple(draft.aux_layers)

    @classmethod
    def longest(cls, draft: PretrainedConfig) -> int:
        return int(draft.block_size) - 1

    @classmethod
    def unfit(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:
        if reason := super().unfit(target, draft, config):
            return reason
        assert isinstance(draft, DFlashConfig)
        text = target.get_text_config()
        layers = text.num_hidden_layers
        if draft.target_layers not in (None, layers):
            return f"the head is for a target of {draft.target_layers} layers, but the target has {layers}"
        if outside := [n for n in draft.aux_layers if n >= layers]:  # formats differ in what follows the last one
            return f"the head asks for the output of layer {outside[0]} of the {layers} layers; expected an earlier one"
        shared = {"embedding": not draft.embeds, "output head": not draft.scores}
        if draft.hidden_size != text.hidden_size and (used := [name for name, is_used in shared.items() if is_used]):
            width = f"its width of {draft.hidden_size} differs from the target's {text.hidden_size}"
            return f"the head uses the target's {used[0]}, but {width}"
        return None

    @classmethod
    def widest(cls, draft: PretrainedConfig | None, config: EngineConfig) -> int:
        assert isinstance(draft, DFlashConfig)
        return max(config.widest, config.width + draft.block_size)

    @classmethod
    def build(cls, context: DrafterContext) -> Self:
        drafter = super().build(context)
        head: Any = drafter.head.model
        drafter.ahead = head.config.block_size
        if head.embed_tokens is None:
            embeddings: Any = context.target.get_input_embeddings()
            head.embed_tokens = nn.Embedding.from_pretrained(embeddings.weight)  # without a scale of the target's own
        drafter.score = head.lm_head or drafter.target.model.get_output_embeddings()
        return drafter

    def replace(self, batch: Batch) -> None:
        """Nothing: the next round feeds the context of these tokens."""

    def _fill(self, batch: Batch) -> None:
        self.head.fill(batch, features=self._features(batch))

    def _first(self, rows: DraftRows) -> Step:
        """The logits of the whole block; only those of the first column are returned, the others are the state."""
        config, before = self.head.model.config, self.context.config.width
        context = rows.batch(rows.pending.new_zeros(len(rows.pending), before), -before)
        if not rows.most:  # nothing is drafted, but the context must have no gap
            self._fill(context)
            return rows.pending, None
        block = pad(rows.pending[:, None], (0, config.block_size - 1), value=config.mask_token_id)
        batch = context._replace(tokens=torch.cat([context.tokens, block], dim=1))
        states = self.head.forward(batch, features=self._features(context))
        return self._next(context, self._logits(states[:, 1 : 1 + rows.most]).split(1, dim=1))

    def _next(self, batch: Batch, state: tuple[Tensor, ...]) -> Step:
        cut(state[0])  # so that the steps share their code
        return state[0], state[1:]

    @torch.inference_mode()
    def _logits(self, states: Tensor) -> Tensor:
        """Logits [R, K, V] of states [R, K, D]."""
        head: Any = self.head.model
        return widened(self.score(states.contiguous()), head.d2t, head.config.vocab_size)
