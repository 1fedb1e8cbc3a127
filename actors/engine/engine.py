"""The engine: one loop of rounds for every method. It knows nothing of text, files or Ray."""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import cached_property, wraps
from itertools import takewhile
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.drafter import Draft, MakeDrafter
from exspec.actors.engine.graphs import Arriving, Recorder
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.engine.methods import build, drafter_of, recorder_for, settle
from exspec.actors.engine.request import Completion, FinishReason, Request, RequestError, Room, Sampling, Scores
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.scheduling.pool import Pool, Sequence
from exspec.actors.engine.scheduling.prefill import Chunk
from exspec.actors.engine.statistics import EngineCounters, EngineStatistics
from exspec.actors.engine.tokens.constraint import Barred, Constraint, forced
from exspec.actors.engine.tokens.guide import Candidates, Guide, Masks, candidate_ids
from exspec.actors.engine.tokens.sampling import Sampler, SamplerState

P = ParamSpec("P")
T = TypeVar("T")
Ending = tuple[FinishReason, int | str | None]


class Outcome(NamedTuple):
    """What came of a row's round.

    tokens: the drafts that the target agrees with and its own token after them. drafted: how many were proposed.
    columns: of the row's forward. scores: of the candidates, by place; of places with no choice there are none. early:
    tokens that the drafter's own verifier was shown, and those that it agreed with; empty where it has none.
    """

    tokens: list[int]
    drafted: int
    columns: int
    scores: dict[int, Scores]
    early: list[int]


class Round(NamedTuple):
    """A round that the device is at work on. arriving: the target's tokens [R, Q] after the pending one and after each
    draft, the lengths of the drafts [R, 1], what the drafter counted [R, 2] if it has `counted`, and the drafts [R, N],
    side by side. scores: of the candidates, the tokens that may stand at a place, the logits [R, Q, M], of scored rows.
    """

    group: Group
    width: int
    counted: bool
    arriving: Arriving
    scores: Arriving | None
    candidates: Candidates


def phase(method: "Callable[Concatenate[Engine, P], T]") -> "Callable[Concatenate[Engine, P], T]":
    """Adds the seconds that the method takes to the engine's statistics under its name."""
    name = method.__name__.strip("_")

    @wraps(method)
    def timed(self: "Engine", /, *args: P.args, **kwargs: P.kwargs) -> T:
        start = time.perf_counter()
        result = method(self, *args, **kwargs)
        self.counters.spend(name, time.perf_counter() - start)
        return result

    return timed


class Engine:
    """Decodes token sequences in batches with a target and, unless the method is plain, a drafter.

    target, draft: causal language models of transformers that hold keys and values of every token, of one vocabulary
        (`exspec.actors.models.load_pair` checks that), on one device. Not every drafter needs a draft.
    config: default: exspec with a draft, plain without.
    end_ids: token ids that end a sequence; default: those of the target's generation config.
    recorder: records forwards of fixed shapes; default: CUDA graphs on a GPU, nothing elsewhere.
    drafter: makes one from what it is given, instead of that which the config names.

    `submit` takes requests at any time; `step` runs one round; `take` hands out what has finished. One thread only:
    `EngineThread` wraps an engine for several. Raises ValueError for settings that the models cannot meet.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None = None,
        config: EngineConfig | None = None,
        end_ids: frozenset[int] | None = None,
        recorder: Recorder | None = None,
        drafter: MakeDrafter = drafter_of,
    ) -> None:
        config = config or EngineConfig(method="exspec" if draft else "plain")
        self.context = context_length(target.config)
        self.config = config = settle(target, draft, config)
        self.device = target.device
        self.vocabulary = target.config.get_text_config().vocab_size
        self.end_ids = model_end_ids(target) if end_ids is None else end_ids
        recorder = recorder or recorder_for(self.device, config)
        parts = build(target, draft, config, recorder, drafter)
        self.target, self.drafter, self.given, self.draft_length, self.grouping, self.prefill, store = parts
        self.pool = Pool(config.slots, store, config.width)
        self.samplers = SamplerState(config.slots, self.vocabulary, self.device, recorder.wrap)
        self._fill, self._forward = recorder.wrap(self.target.fill), recorder.wrap(self.target.forward)
        self._choose, self._pick = recorder.wrap(self._choices), recorder.wrap(picked)
        self.counters = EngineCounters()
        self.learning = True  # the drafter is told of what has ended
        self._flying: Round | None = None  # while rounds overlap, the last one
        self._finished: list[Completion] = []
        self._ids: set[Hashable] = set()

    @property
    def busy(self) -> bool:
        return bool(self.pool.running or self.pool.waiting)

    @property
    def statistics(self) -> EngineStatistics:
        return self.counters.value

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV of target and drafter take now."""
        return self.target.bytes + sum(cache.bytes for cache in self.drafter.caches)

    def check_request(self, request: Request) -> None:
        """Raises RequestError where a request could never be decoded."""
        length = len(request.prompt)
        name = f"request {request.id!r}"
        if length == 0:
            raise RequestError(f"{name}: the prompt is empty, expected at least one token")
        if request.max_new_tokens < 1:
            raise RequestError(f"{name}: max_new_tokens is {request.max_new_tokens}, expected at least 1")
        if bad := [t for t in request.prompt if not 0 <= t < self.vocabulary]:
            raise RequestError(f"{name}: token id {bad[0]} is outside the vocabulary of {self.vocabulary} tokens")
        if why := Room(self.context, self.config.capacity).refusal(length, request.max_new_tokens):
            raise RequestError(f"{name}: {why}")
        if not 0 <= request.min_new_tokens <= request.max_new_tokens:
            raise RequestError(f"{name}: min_new_tokens is {request.min_new_tokens}, expected 0 to max_new_tokens")
        if not all(request.bad_words):
            raise RequestError(f"{name}: bad_words: expected sequences of one token or more")
        if request.constraint and (request.min_new_tokens or request.bad_words or request.ignore_end):
            raise RequestError(f"{name}: a constraint tells itself which tokens may come, and where it ends")
        if request.stop and request.constraint:
            raise RequestError(f"{name}: stop and constraint exclude each other, a constraint tells its own end")

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError where it could never be decoded, or one with its id is being decoded."""
        self.check_request(request)
        if request.id in self._ids:
            raise RequestError(f"request {request.id!r}: a request with this id is already being decoded")
        self._ids.add(request.id)
        sequence = Sequence(request, self.context)
        sequence.ends = frozenset() if request.ignore_end else self.end_ids | request.end_ids
        if request.min_new_tokens or request.bad_words:
            sequence.constraint = Barred(self.vocabulary, sequence.ends, request.min_new_tokens, request.bad_words)
        self._begin(sequence)
        self.pool.waiting.append(sequence)

    def _begin(self, sequence: Sequence) -> None:
        """Put the tokens that a constraint begins with behind the prompt: they are prefilled with it, in no round."""
        foregone = forced(sequence.constraint, sequence.budget - 1) if sequence.constraint else []
        for token in takewhile(lambda token: not self._ends(sequence, token), foregone):
            self._append(sequence, token, {})
            sequence.counters.forced += 1

    def take(self) -> list[Completion]:
        """What has finished since the last call, in order of finishing."""
        finished, self._finished = self._finished, []
        self._ids -= {completion.id for completion in finished}
        return finished

    def step(self) -> None:
        """One round. Does nothing without work."""
        self._admit()
        if self._flying and len(self._others()) < self.config.batch_size:
            self._land()  # a round that others do not fill would cost as much
            self._admit()
        if not self.pool.running:
            return
        group = self._group()
        started = self._verify(group, self._draft(group))
        self._land()
        self._flying = started
        if not self.config.overlap or group.guide:  # masks are written in place
            self._land()

    def _others(self) -> list[Sequence]:
        """Those that run, and are not part of the round that the device is at work on."""
        if self._flying is None:
            return self.pool.running
        flying = set(self._flying.group.sequences)
        return [s for s in self.pool.running if s not in flying]

    def _land(self) -> None:
        """Commit the round that the device is at work on, if there is one."""
        if self._flying:
            started, self._flying = self._flying, None
            self._commit(started.group, self._wait(started))

    def run(self) -> list[Completion]:
        """Steps until nothing is left to do; returns what has finished."""
        while self.busy:
            self.step()
        return self.take()

    def forget(self) -> None:
        """Let go of the KV of prompts that no running sequence has, and of what was learned to draft."""
        self.pool.store.forget()
        self.drafter.forget()

    def check(self) -> None:
        """Raise AssertionError where an invariant of pool or KV store does not hold. Call between rounds."""
        self.pool.check()
        self.target.check({s.slot: s.length for s in self.pool.running})
        for cache in self.drafter.caches:  # which may lack the last token before the pending one
            cache.check({s.slot: max(0, s.length - 1) for s in self.pool.running})

    @phase
    def _admit(self) -> None:
        admitted = self.pool.admit(self.grouping.room(self.pool))
        if not admitted:
            return
        for s in admitted:
            self.drafter.admit(s.slot, s.tokens)
        for chunks in self.prefill.plan(admitted):
            slots, ids, starts, attended = self._rows(chunks, self.config.prefill_rows)
            self._fill(slots, ids, starts, attended)
            self.drafter.prefill(slots, ids, starts, attended)
            count = sum(chunk.end - chunk.start for chunk in chunks if not chunk.sequence.returned)
            self.counters.add(prefill_tokens=count, prefill_columns=ids.numel())
        self._again([s for s in admitted if s.length > s.prefilled])
        self.counters.add(found_tokens=sum(s.found for s in admitted if not s.returned))
        for s in admitted:
            self.samplers.admit(s.slot, s.request.sampling, s.request.prompt, s.committed)
            if not s.returned:
                s.started = time.monotonic()

    def _again(self, sequences: list[Sequence]) -> None:
        """Cache again the tokens that rounds had cached before their sequences were taken back: in the shape of a
        round, for in any other their KV might differ in its last bits."""
        width, rows = self.config.width, self.config.batch_size
        parts: dict[int, list[Chunk]] = defaultdict(list)
        for s in sequences:
            start = s.prefilled
            while start < s.length:
                _, attended = self.config.round_shape(rows, start + 1)
                end = min(start + width, attended, s.length)
                parts[attended].append(Chunk(s, start, end, width, attended))
                start = end
        for _, chunks in sorted(parts.items()):
            for i in range(0, len(chunks), rows):
                slots, ids, starts, attended = self._rows(chunks[i : i + rows], rows)
                greedy = Sampler([Sampling()] * len(ids), [[0]] * len(ids), self.device)
                self._choose(slots, ids, starts, greedy, attended, 0)
                self.drafter.prefill(slots, ids, starts, attended)

    def _rows(self, chunks: list[Chunk], rows: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """Slots [R], tokens [R, C] and starts [R] of chunks of one shape, and what they attend. They are padded on the
        right, with columns that are overwritten in time; where shapes are fixed, dead rows make them `rows`."""
        width, attended = chunks[0].width, chunks[0].attended
        dead = max(rows - len(chunks), 0) if self.config.fixed_shapes else 0
        tokens = [*(c.tokens + [0] * (width - c.end + c.start) for c in chunks), *[[0] * width] * dead]
        slots = [*(c.sequence.slot for c in chunks), *[self.pool.slots] * dead]
        starts = [*(c.start for c in chunks), *[0] * dead]
        places, ids, first = (
            torch.tensor(values).to(self.device, non_blocking=True) for values in (slots, tokens, starts)
        )
        return places, ids, first, attended

    @phase
    def _group(self) -> Group:
        sequences: list[Sequence] = []
        while not sequences:
            found = self.pool.reserve(self.grouping.select(self._others()), take_back=self._flying is None)
            if found is None:
                self._land()
            else:
                sequences = found
        for sequence in self.pool.running:
            sequence.waited += 1
        for sequence in sequences:
            sequence.waited = 0
        rows, attended = self.config.round_shape(len(sequences), max(s.length for s in sequences) + 1)
        drafts = self.config.drafted
        return Group.of(sequences, rows, self.pool.slots, attended, drafts, self.device, self._guide, self.samplers)

    def _guide(self, sequences: list[Sequence | None]) -> Guide | None:
        constrained = any(s is not None and s.constraint is not None for s in sequences)
        return Guide(sequences, *self._masks, self._ends) if constrained else None

    @cached_property
    def _masks(self) -> tuple[Masks, Masks]:
        """Of all places of a round, and of the first that is chosen."""
        rows = self.config.batch_size, self.vocabulary, self.device
        return Masks(self.config.width, *rows), Masks(1, *rows)

    @phase
    def _draft(self, group: Group) -> Draft:
        draft = self.drafter.propose(group, self.draft_length.limits(group))
        return self._guided(group, group.guide, draft) if group.guide else draft

    def _guided(self, group: Group, guide: Guide, draft: Draft) -> Draft:
        """The draft as the constraints let it stand, for which the round waits. A drafter whose tokens were replaced
        takes in those that are there now."""
        drafted: list[list[int]] = draft.known or [[] for _ in group.sequences]
        if draft.known is None and draft.tokens.shape[1]:
            rows = Arriving(torch.cat([draft.lengths[:, None], draft.tokens], dim=1)).wait().numpy().tolist()
            drafted = [tokens[:length] for length, *tokens in rows]
        walked = guide.walk(drafted, group.useful)
        if walked == drafted:
            return draft
        most = max(map(len, walked))
        values = [[len(tokens), *tokens, *[0] * (most - len(tokens))] for tokens in walked]
        lengths, tokens = torch.tensor(values).to(self.device, non_blocking=True).split([1, most], dim=1)
        stands = Draft(tokens, lengths[:, 0], early=draft.early)
        replaced = any(tokens != drafted[row][: len(tokens)] for row, tokens in enumerate(walked))
        if replaced and not self.drafter.follows:
            self.drafter.prefill(group.slots, self._fed(group, stands), group.starts, group.attended)
        return stands

    def _fed(self, group: Group, draft: Draft) -> Tensor:
        """Each row's pending token and what was drafted after it: [R, Q]."""
        tokens = torch.cat([group.pending[:, None], draft.tokens], dim=1)
        dead = self.config.width - tokens.shape[1]
        return pad(tokens, (0, dead)) if dead and self.config.fixed_shapes else tokens

    @phase
    def _verify(self, group: Group, draft: Draft) -> Round:
        """Have the target say what follows the pending token and each draft."""
        tokens = self._fed(group, draft)
        width = tokens.shape[1]
        scores, candidates = None, Candidates()
        if group.guide is None:
            choices = self._choose(group.slots, tokens, group.starts, group.sampler, group.attended, draft.since)
        else:
            logits = self._forward(group.slots, tokens, group.starts, group.attended, 0, draft.since)
            # The masks are made while the device computes.
            masks, candidates = group.guide.along(width), group.guide.candidates(width)
            asked = candidate_ids(candidates, len(group.sequences), width, self.device) if candidates else None
            choices, scores = self._pick(logits, tokens, group.starts, group.sampler, masks, asked)
        if self.drafter.follows:
            self.drafter.prefill(group.slots, choices, group.starts + 1, group.attended)
        counted = [] if draft.early is None else [draft.early]
        rows = torch.cat([choices, draft.lengths[:, None], *counted, draft.tokens], dim=1)
        return Round(
            group, width, bool(counted), Arriving(rows), None if scores is None else Arriving(scores), candidates
        )

    def _choices(
        self, slots: Tensor, tokens: Tensor, starts: Tensor, sampler: Sampler, attended: int, since: int = 0
    ) -> Tensor:
        """The tokens [R, Q] that follow tokens [R, Q], which have been through `since` layers already."""
        logits = self.target.forward(slots, tokens, starts, attended, first=since)
        return picked(logits, tokens, starts, sampler)[0]

    @phase
    def _wait(self, started: Round) -> list[Outcome]:
        """The round's wait for the device: what came of each row."""
        width, rows = started.width, started.arriving.wait().numpy()
        after = width + (3 if started.counted else 1)
        chosen, lengths, early, drafted = np.split(rows, [width, width + 1, after], axis=1)
        lengths = lengths[:, 0]
        drafts = drafted.shape[1]
        agreed = (drafted == chosen[:, :drafts]) & (np.arange(drafts) < lengths[:, None])
        accepted = np.logical_and.accumulate(agreed, axis=1).sum(axis=1)
        # What a constraint has cut off was proposed too, in vain.
        proposed = started.group.guide.proposed if started.group.guide else lengths.tolist()
        outcomes = [
            Outcome(tokens[: kept + 1], length, width, {}, count)
            for tokens, kept, length, count in zip(
                chosen.tolist(), accepted.tolist(), proposed, early.tolist(), strict=True
            )
        ]
        logits = started.scores.wait().double() if started.scores else None
        for (r, q), tokens in started.candidates.items():
            assert logits is not None
            # Among themselves alone: M is what the neighbours make it, and a sum over it would depend on them.
            outcomes[r].scores[q] = dict(zip(tokens, logits[r, q, : len(tokens)].log_softmax(0).tolist(), strict=True))
        return outcomes

    @phase
    def _commit(self, group: Group, outcomes: list[Outcome]) -> None:
        """Commit the drafts that the target agrees with and its own token after them; end what has come to its end."""
        live = [(r, s, outcomes[r]) for r, s in enumerate(group.sequences) if s]
        grouped = len({s.length // self.config.bucket for _, s, _ in live}) == 1
        if group.guide:
            group.guide.back()
        kept = 0
        new: dict[int, list[int]] = {}
        for row, sequence, outcome in live:
            accepted = len(outcome.tokens) - 1
            self.draft_length.learn(sequence, outcome.drafted, accepted)
            before = len(sequence.tokens)
            ending = self._extend(sequence, outcome)
            committed = len(sequence.tokens) - before
            # Drafts past an end are as if they had never been drafted.
            drafted = min(outcome.drafted, committed) if ending else outcome.drafted
            sequence.counters.round(grouped, drafted, min(accepted, committed), outcome.early)
            if group.guide and sequence.constraint:
                sequence.counters.forced += group.guide.forced(row, committed)
                ending = ending or self._finish(sequence, sequence.constraint)
            kept += len(sequence.tokens) - before
            if ending:
                self.drafter.end(sequence.slot)
                if self.learning:
                    self.drafter.learn(sequence.request.prompt, sequence.committed)
                self._finished.append(self.pool.end(sequence, *ending))
            else:
                new[sequence.slot] = sequence.tokens[before:]
        self.samplers.committed(new)
        self.drafter.committed(new)
        columns = sum(outcome.columns for outcome in outcomes)
        self.counters.add(
            rounds=1,
            rows=self.config.batch_size,
            busy_rows=len(live),
            grouped_rounds=int(grouped),
            ragged_rounds=int(not grouped),
            columns=columns,
            dead_columns=columns - len(live) - sum(min(o.drafted, o.columns - 1) for _, _, o in live),
            tokens=kept,
        )

    def _extend(self, sequence: Sequence, outcome: Outcome) -> Ending | None:
        """Append committed tokens up to the first that ends the sequence; returns that ending."""
        if sequence.unwatched and sequence.ends.isdisjoint(outcome.tokens):
            sequence.tokens += outcome.tokens[: sequence.budget]
            return ("length", None) if sequence.budget == 0 else None
        for place, token in enumerate(outcome.tokens):
            if ending := self._append(sequence, token, outcome.scores.get(place, {})):
                return ending
        return None

    def _finish(self, sequence: Sequence, constraint: Constraint) -> Ending | None:
        """Where a constraint leaves one way to the end, go it: those tokens need no round."""
        rest = forced(constraint, sequence.budget)
        if not any(self._ends(sequence, token) for token in rest):
            return None
        ending = None
        while ending is None:
            sequence.counters.forced += 1
            ending = self._append(sequence, rest.pop(0), {})
        return ending

    def _append(self, sequence: Sequence, token: int, scores: Scores) -> Ending | None:
        sequence.tokens.append(token)
        if sequence.request.scored:
            sequence.scores.append(scores)
        ending = self._ending(sequence, token)
        if ending is None and sequence.constraint:
            sequence.constraint.advance(token)
        return ending

    def _ends(self, sequence: Sequence, token: int) -> bool:
        return token in sequence.ends

    def _ending(self, sequence: Sequence, last: int) -> Ending | None:
        """Why the sequence ends with its last token, if it does."""
        if last in sequence.ends:
            return "stop", last
        if sequence.stop:
            found, least = sequence.stop(last), sequence.request.min_new_tokens
            if found is not None and len(sequence.tokens) - len(sequence.request.prompt) >= least:
                return "stop", found
        return ("length", None) if sequence.budget == 0 else None


def picked(
    logits: Tensor,
    tokens: Tensor,
    starts: Tensor,
    sampler: Sampler,
    masks: Tensor | None = None,
    asked: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The tokens [R, Q] that follow tokens [R, Q], by logits [R, Q, V]; and the logits [R, Q, M] of those asked for."""
    positions = starts[:, None] + 1 + torch.arange(tokens.shape[1], device=tokens.device)
    choices = sampler.choose(logits, positions, tokens[:, 1:], masks)
    return choices, None if asked is None else logits.float().gather(2, asked.clamp(min=0))


def model_end_ids(model: PreTrainedModel) -> frozenset[int]:
    """Every end-token id of the model's generation config, or of its config where that names none."""
    ids = model.generation_config.eos_token_id if model.generation_config else None
    ids = model.config.get_text_config().eos_token_id if ids is None else ids
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)
