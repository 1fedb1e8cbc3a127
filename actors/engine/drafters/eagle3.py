"""EAGLE-3 (arXiv:2503.01840): a head of one layer that goes on from hidden states of the target. Chains, no trees."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.drafter import Given
from exspec.actors.engine.drafters.eagle3_head import Eagle3Config, Eagle3Head
from exspec.actors.engine.drafters.model import DraftModel
from exspec.actors.engine.kv.cached_model import PagedModel
from exspec.actors.engine.kv.memory import MemoryPlan, states_memory
from exspec.actors.engine.kv.trial import spans_trial

OWN = (1,)  # the layer whose output is the next feature


class Eagle3(DraftModel):
    """A token is fed with the feature of the token before it, at that one's place: token j at place j - 1.

    Features lie in pages, as KV does. What a round has chosen is fed when its features are known. Where prompts begin
    alike, the last place of what they share depends on the token behind it: there stands what was fed last.
    """

    follows: ClassVar[bool] = True

    @classmethod
    def refusal(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:
        if not isinstance(draft, Eagle3Config):
            return "it needs a head of EAGLE-3 as its draft"
        if config.method == "eqspec":
            return "method eqspec moves the KV beside which its features lie"
        text = target.get_text_config()
        if (draft.vocab_size, draft.target_hidden_size) != (text.vocab_size, text.hidden_size):
            return (
                f"the head is for a vocabulary of {draft.vocab_size} and hidden states of {draft.target_hidden_size}, "
                f"and the target has {text.vocab_size} and {text.hidden_size}"
            )
        if not draft.embeds and draft.hidden_size != text.hidden_size:
            return f"the head has no embedding, and its width of {draft.hidden_size} is not the target's"
        if outside := [n for n in taps(target, draft) if not 0 < n < text.num_hidden_layers]:
            return f"the head asks for the input of layer {outside[0]}; the target has {text.num_hidden_layers} layers"
        return None

    @classmethod
    def trial(cls, target: PreTrainedModel, config: EngineConfig) -> str | None:  # noqa: ARG003
        return spans_trial(target)

    @classmethod
    def memory(
        cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig, dtype: torch.dtype
    ) -> MemoryPlan:
        assert isinstance(draft, Eagle3Config)
        width = len(set(taps(target, draft))) * draft.target_hidden_size + draft.hidden_size
        return super().memory(target, draft, config, dtype) + states_memory(config, width, dtype)

    @classmethod
    def build(cls, given: Given) -> Self:
        assert isinstance(given.draft, Eagle3Head)
        head, target = given.cached(given.draft), given.verifier
        assert isinstance(head, PagedModel)
        assert isinstance(target, PagedModel)
        made = cls.of(given, head)
        made.head, made.target, made.taps = head, target, taps(given.target.config, given.draft.config)
        if head.model.embed_tokens is None:
            head.model.embed_tokens = given.target.get_input_embeddings()
        head.last_position = target.last_position  # a head's own config tells what it was trained with
        head.remember(OWN)
        target.remember(made.taps)
        return made

    head: PagedModel
    target: PagedModel
    taps: tuple[int, ...]

    def _fill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        features = self._features(slots, starts - 1, tokens.shape[1], attended)
        self.head.fill(slots, tokens, starts - 1, attended, features=features)

    def _first(self, slots: Tensor, previous: Tensor, pending: Tensor, starts: Tensor, attended: int) -> Tensor:  # noqa: ARG002
        features = self._features(slots, starts - 1, 1, attended)
        return self.head.forward(slots, pending[:, None], starts - 1, attended, features=features)

    def _next(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> Tensor:
        features = self.head.recall(OWN, slots, starts - 2, 1, attended)
        return self.head.forward(slots, tokens, starts - 1, attended, features=features)

    @torch.inference_mode()
    def _features(self, slots: Tensor, starts: Tensor, width: int, attended: int) -> Tensor:
        """The target's features [R, width, D] of tokens from starts on."""
        project: Any = self.head.model.fc
        return project(self.target.recall(self.taps, slots, starts, width, attended))  # type: ignore[no-any-return]


def taps(target: PretrainedConfig, draft: PretrainedConfig) -> tuple[int, ...]:
    """Layers of the target whose inputs are the features: those of the head, or a low, a middle and a high one."""
    layers = target.get_text_config().num_hidden_layers
    return tuple(draft.taps or (2, layers // 2, layers - 3))
