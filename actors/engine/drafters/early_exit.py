"""Early exit: the target's first layers draft, some more layers check, and all layers verify.

HiSpec (arXiv:2510.01336) with exits as in LayerSkip (arXiv:2404.16710): the hidden states that leave a layer go through
the final norm and the head. The drafter has no weights and no KV of its own: it writes the target's.
"""

from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.draft_length import confidence
from exspec.actors.engine.drafters.drafter import Draft, Drafter, DrafterContext, DraftRows
from exspec.actors.engine.kv.cached_model import PagedModel
from exspec.actors.engine.kv.memory import MemoryPlan, states_memory
from exspec.actors.engine.kv.trial import spans_trial
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.tokens.sampling import Uses

EXIT_TOKENS = 2  # default of `exit_tokens`


class EarlyExit(Drafter):
    """Drafts `exit_tokens` tokens at depth d and checks them at depth i. It keeps the tokens that agree and depth i's
    own next token, and repeats this until there are enough. The kept tokens are proposed.

    The hidden states after depth d are remembered, and the check continues there: within a draft, no layer computes a
    token twice. Verification runs all layers again, in the target's own shape.

    depths: d and i, in layers.
    """

    inside: ClassVar[bool] = True
    lengths: ClassVar[tuple[int, ...]] = (2, 3, 4, 5, 6, 8)
    probed_with: ClassVar[int] = 4

    @classmethod
    def unfit(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:
        layers = target.get_text_config().num_hidden_layers
        if config.method == "eqspec":
            return "method eqspec moves the KV that early exit would share with the target"
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
    def variants(cls, target: PretrainedConfig, config: EngineConfig, longest: int) -> list[dict[str, Any]]:
        variants: list[dict[str, Any]] = []
        for part, usual in ((1, EXIT_TOKENS), (1, EXIT_TOKENS + 1), (2, EXIT_TOKENS)):
            d, i = depths(target, config, part)
            variant: dict[str, Any] = {"exit_depth": d, "check_depth": i, "exit_tokens": config.exit_tokens or usual}
            if variant not in variants and cls.refusal(target, None, replace(config, **variant)) is None:
                variants.append(variant)
        return variants

    @classmethod
    def label(cls, config: EngineConfig) -> str:
        settings = (config.exit_depth, config.check_depth, config.exit_tokens)
        return config.drafter if None in settings else f"{config.drafter} {'/'.join(map(str, settings))}"

    @classmethod
    def memory(
        cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig, dtype: torch.dtype
    ) -> MemoryPlan:
        width = target.get_text_config().hidden_size  # of the states after depth d
        return super().memory(target, draft, config, dtype) + states_memory(config, width, dtype)

    @classmethod
    def build(cls, context: DrafterContext) -> Self:
        assert isinstance(context.verifier, PagedModel)
        return cls(context, context.verifier)

    def __init__(self, context: DrafterContext, target: PagedModel) -> None:
        self.context, self.target = context, target
        self.depths = depths(context.target.config, context.config)
        self.exit_tokens = context.config.exit_tokens or EXIT_TOKENS
        self.confidence = confidence(context.config)
        target.remember(self.depths[:1])
        self.no_slot = len(target.pages.table) - 1  # the slot of dead rows
        self.ends_early = not context.recorder.records  # asking whether any row continues waits for the device
        self._loop = context.recorder.wrap(self._draft)

    def propose(self, group: Group, limits: list[int]) -> Draft:
        kv_columns = self.context.kv_columns(group.longest + max(limits) + self.exit_tokens)
        tokens, lengths, drafted, accepted = self._loop(DraftRows.of(group, limits, kv_columns))
        return Draft(tokens, lengths, counts={"early_drafted": drafted, "early_accepted": accepted})

    def _draft(self, rows: DraftRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [R, most] and lengths [R] <= limits [R]; and [R] each, how many tokens were drafted at depth d and how
        many of them agreed with depth i."""
        d, i = self.depths
        exit_tokens = max(min(self.exit_tokens, rows.most), 1)
        columns = torch.arange(exit_tokens + 1, device=rows.slots.device)
        kept = rows.pending.new_zeros(len(rows.pending), rows.most + len(columns))
        lengths, drafted, accepted = (torch.zeros_like(rows.pending) for _ in range(3))
        last, chance = rows.pending, torch.ones_like(rows.pending, dtype=torch.float32)
        live = rows.limits > 0

        def choose(logits: Tensor, offset: int, before: Tensor) -> Tensor:
            """A token for each column of logits [R, Q, V], the first of them `offset` tokens into this turn. before:
            [R, N], the tokens of this turn before the last column."""
            drafted_before = lengths[:, None] + offset + torch.arange(logits.shape[1], device=rows.slots.device)
            logits = rows.allowed(logits, drafted_before)
            if rows.sampler.uses & Uses.PENALISED:
                before = torch.cat([_last_tokens(kept, lengths, rows.most, logits.shape[-1]), before], dim=1)
            return rows.sampler.propose(logits, rows.starts[:, None] + 1 + drafted_before, before)

        for _ in range(-(-rows.most // exit_tokens)):
            here = rows._replace(slots=torch.where(live, rows.slots, self.no_slot))
            fed = last[:, None]
            for n in range(exit_tokens):
                logits = self.target.forward(here.batch(fed[:, -1:], lengths + n), last=d)
                fed = torch.cat([fed, choose(logits, n, fed[:, 1:])], dim=1)
            self.target.fill(here.batch(fed[:, -1:], lengths + exit_tokens), last=d)
            logits = self.target.forward(here.batch(fed, lengths), first=d, last=i)
            choices = choose(logits, 0, fed[:, 1:])  # [R, exit_tokens + 1]
            agrees = choices[:, :-1] == fed[:, 1:]
            fits = live[:, None] & (lengths[:, None] + columns < rows.limits[:, None])
            stands = fits & pad(agrees, (1, 0), value=True).cumprod(dim=1).bool()
            stands, chance, live = self._confident(stands, chance, live, logits, choices)
            drafted = drafted + fits[:, :-1].sum(dim=1)
            accepted = accepted + (stands[:, :-1] & agrees).sum(dim=1)
            kept = kept.scatter(1, lengths[:, None] + columns, choices)
            lengths = lengths + stands.sum(dim=1)
            last = torch.where(lengths > 0, kept.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0], rows.pending)
            live = live & (lengths < rows.limits)
            if self.ends_early and not self.confidence.pays(chance, live, rows.limits > 0):
                break
        return kept[:, : rows.most], lengths, drafted, accepted

    def _confident(
        self, stands: Tensor, chance: Tensor, live: Tensor, logits: Tensor, choices: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """After the checked columns: `stands` [R, Q] without the columns that confidence cuts off, the chances [R] and
        the live rows [R]."""
        columns = torch.arange(choices.shape[1], device=choices.device)
        for q in range(choices.shape[1]):
            so_far, sure = self.confidence.survives(chance, logits[:, q : q + 1], choices[:, q : q + 1])
            chance, goes_on = torch.where(stands[:, q], so_far, chance), sure | ~stands[:, q]
            live, stands = live & goes_on, stands & (goes_on[:, None] | (columns < q))
        return stands, chance, live


def depths(target: PretrainedConfig, config: EngineConfig, part: int = 1) -> tuple[int, int]:
    """d and i of the config; default: `part` eighths and `part` quarters of the layers."""
    layers = target.get_text_config().num_hidden_layers
    d = config.exit_depth or max(min(part * layers // 8, (config.check_depth or layers) - 1), 1)
    return d, config.check_depth or max(part * layers // 4, d + 1)


def _last_tokens(kept: Tensor, lengths: Tensor, count: int, nothing: int) -> Tensor:
    """The last `count` of the first lengths[r] tokens of each row, padded on the left with `nothing`."""
    indices = lengths[:, None] + torch.arange(-count, 0, device=kept.device)
    return kept.gather(1, indices.clamp(min=0)).masked_fill(indices < 0, nothing)
