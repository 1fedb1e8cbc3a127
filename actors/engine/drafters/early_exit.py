"""Early exit: the target's own first layers draft, some more of them check, and all of them verify.

HiSpec (arXiv:2510.01336) with exits as in LayerSkip (arXiv:2404.16710): what leaves a layer goes through the final norm
and the head. No weights and no KV of its own: its layers are the target's, and so is the KV that they write.
"""

from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.draft_length import Confidence, confidence
from exspec.actors.engine.drafters.drafter import Draft, Drafter, Given
from exspec.actors.engine.graphs import Recorder
from exspec.actors.engine.kv.cached_model import PagedModel
from exspec.actors.engine.kv.memory import MemoryPlan, states_memory
from exspec.actors.engine.kv.trial import spans_trial
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.tokens.guide import narrowed
from exspec.actors.engine.tokens.sampling import Sampler, Uses

AHEAD = 2  # tokens that are drafted before they are checked, where nobody says


class EarlyExit(Drafter):
    """Drafts `ahead` tokens at depth d, checks them at depth i, keeps those that agree and depth i's own next one, and
    so on until there are enough. What is kept at depth i is proposed.

    Hidden states are remembered where they leave depth d and depth i, so that no layer computes a token twice: the
    check goes on from depth d. The target verifies with all its layers, in its own shape; where shapes are free it goes
    on from depth i.

    depths: d and i, in layers. columns, step: as a draft model's. resumes: whether the target goes on from depth i.
    """

    lengths: ClassVar[tuple[int, ...]] = (2, 3, 4, 5, 6, 8)
    looked_at: ClassVar[int] = 4

    @classmethod
    def refusal(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:  # noqa: ARG003
        layers = target.get_text_config().num_hidden_layers
        if config.method == "eqspec":
            return "method eqspec moves the KV that it would share with the target"
        d, i = depths(target, config)
        if 0 < d < i < layers:
            return None
        return (
            f"it leaves at exit_depth {d} and check_depth {i}; expected 0 < {d} < {i} < {layers}, the target's layers"
        )

    @classmethod
    def trial(cls, target: PreTrainedModel, config: EngineConfig) -> str | None:
        return spans_trial(target, depths(target.config, config))

    @classmethod
    def variants(cls, target: PretrainedConfig, config: EngineConfig) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for part, ahead in ((1, AHEAD), (1, AHEAD + 1), (2, AHEAD)):
            d, i = depths(target, config, part)
            made: dict[str, Any] = {"exit_depth": d, "check_depth": i, "exit_tokens": config.exit_tokens or ahead}
            if made not in found and cls.refusal(target, None, replace(config, **made)) is None:
                found.append(made)
        return found

    @classmethod
    def label(cls, config: EngineConfig) -> str:
        asked = (config.exit_depth, config.check_depth, config.exit_tokens)
        return config.drafter if None in asked else f"{config.drafter} {'/'.join(map(str, asked))}"

    @classmethod
    def memory(
        cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig, dtype: torch.dtype
    ) -> MemoryPlan:
        width = len(depths(target, config)) * target.get_text_config().hidden_size
        return super().memory(target, draft, config, dtype) + states_memory(config, width, dtype)

    @classmethod
    def build(cls, given: Given) -> Self:
        assert isinstance(given.verifier, PagedModel)
        config = given.config
        return cls(
            given.verifier,
            depths(given.target.config, config),
            config.exit_tokens or AHEAD,
            (config.capacity, given.step),
            not config.fixed_shapes,
            confidence(config),
            given.recorder,
        )

    def __init__(
        self,
        target: PagedModel,
        depths: tuple[int, int],
        ahead: int,
        shape: tuple[int, int],
        resumes: bool,
        confidence: Confidence,
        recorder: Recorder,
    ) -> None:
        target.remember(depths)
        self.target, self.depths, self.ahead, self.resumes, self.confidence = target, depths, ahead, resumes, confidence
        self.columns, self.step = shape
        self.nobody = len(target.pages.table) - 1
        self.ends_early = not recorder.records  # to look whether any row goes on is to wait for the device
        self._loop = recorder.wrap(self._draft)

    def propose(self, group: Group, limits: list[int]) -> Draft:
        count = max(limits)
        needed = -(-(group.longest + count + self.ahead) // self.step) * self.step
        most = torch.from_numpy(np.array(limits)).to(group.pending.device, non_blocking=True)
        ahead = group.guide.ahead(count) if group.guide else None
        rows = (group.slots, group.pending, group.starts, most, group.sampler, count, min(needed, self.columns))
        tokens, lengths, early = self._loop(*rows, *(ahead or (None, None)))
        return Draft(tokens, lengths, early=early, since=self.depths[1] if self.resumes else 0)

    def _draft(
        self,
        slots: Tensor,
        pending: Tensor,
        starts: Tensor,
        most: Tensor,
        sampler: Sampler,
        count: int,
        attended: int,
        must: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [R, count], lengths [R] <= most [R]; and [R, 2], how many were drafted at depth d, and how many of
        those agreed with depth i. must, masks: of constrained rows."""
        d, i = self.depths
        ahead = max(min(self.ahead, count), 1)
        columns = torch.arange(ahead + 1, device=slots.device)
        kept = pending.new_zeros(len(pending), count + len(columns))
        lengths, early = torch.zeros_like(pending), pending.new_zeros(len(pending), 2)
        last, chance = pending, torch.ones_like(pending, dtype=torch.float32)
        live, computed = most > 0, torch.zeros_like(most, dtype=torch.bool)

        def choose(logits: Tensor, place: int, drafted: Tensor) -> Tensor:
            """Of logits [R, Q, V] of columns from `place` on, behind the tokens [R, N] of this turn."""
            places = lengths[:, None] + place + torch.arange(logits.shape[1], device=slots.device)
            if must is not None and masks is not None:
                logits = narrowed(logits, places, must, masks)
            if sampler.uses & Uses.PENALISED:
                drafted = torch.cat([_last_tokens(kept, lengths, count, logits.shape[-1]), drafted], dim=1)
            return sampler.propose(logits, starts[:, None] + 1 + places, drafted)

        for _ in range(-(-count // ahead)):
            here, at, fed = torch.where(live, slots, self.nobody), starts + lengths, last[:, None]
            for n in range(ahead):
                logits = self.target.forward(here, fed[:, -1:], at + n, attended, last=d)
                fed = torch.cat([fed, choose(logits, n, fed[:, 1:])], dim=1)
            self.target.fill(here, fed[:, -1:], at + ahead, attended, last=d)
            logits = self.target.forward(here, fed, at, attended, first=d, last=i)
            choices = choose(logits, 0, fed[:, 1:])  # [R, ahead + 1]
            agrees = choices[:, :-1] == fed[:, 1:]
            fits = live[:, None] & (lengths[:, None] + columns < most[:, None])
            stands = fits & pad(agrees, (1, 0), value=True).cumprod(dim=1).bool()
            for q in range(len(columns)):
                so_far, sure = self.confidence.survives(chance, logits[:, q : q + 1], choices[:, q : q + 1])
                chance = torch.where(stands[:, q], so_far, chance)
                live = live & (sure | ~stands[:, q])
                stands[:, q:] &= sure[:, None] | ~stands[:, q : q + 1]
            early += torch.stack([fits[:, :-1].sum(dim=1), (stands[:, :-1] & agrees).sum(dim=1)], dim=1)
            kept.scatter_(1, lengths[:, None] + columns, choices)
            new = stands.sum(dim=1)
            lengths = lengths + new
            # Where the limit has cut a draft that agreed, its last token has been through the layers already.
            reached = (new - 1).clamp(min=0)[:, None]
            computed = torch.where(new > 0, pad(agrees, (0, 1)).gather(1, reached)[:, 0], computed)
            last = torch.where(lengths > 0, kept.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0], pending)
            live = live & (lengths < most)
            if self.ends_early and not self.confidence.pays(chance, live, most > 0):
                break
        if self.resumes:
            left = torch.where(computed, self.nobody, slots)
            self.target.fill(left, last[:, None], starts + lengths, attended, last=i)
        return kept[:, :count], lengths, early


def depths(target: PretrainedConfig, config: EngineConfig, part: int = 1) -> tuple[int, int]:
    """d and i as the config says, or `part` eighths and `part` quarters of the layers."""
    layers = target.get_text_config().num_hidden_layers
    d = config.exit_depth or max(min(part * layers // 8, (config.check_depth or layers) - 1), 1)
    return d, config.check_depth or max(part * layers // 4, d + 1)


def _last_tokens(kept: Tensor, lengths: Tensor, count: int, nothing: int) -> Tensor:
    """The last `count` of the first lengths[r] tokens of each row, on the right; on their left `nothing`."""
    places = lengths[:, None] + torch.arange(-count, 0, device=kept.device)
    return kept.gather(1, places.clamp(min=0)).masked_fill(places < 0, nothing)
