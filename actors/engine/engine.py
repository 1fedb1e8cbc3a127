"""The engine: one loop of rounds for every method. It knows nothing about text, files or Ray."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable
from functools import cached_property, wraps
from itertools import takewhile
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.drafter import Draft, MakeDrafter
from exspec.actors.engine.graphs import HostCopy, Recorder
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.engine.kv.split import InFlight, SplitModel, States
from exspec.actors.engine.layers.adapters import adapters_of
from exspec.actors.engine.layers.headless import headless
from exspec.actors.engine.layers.programs import running
from exspec.actors.engine.methods import build, compiling, drafter_of, recorder_for, resolve
from exspec.actors.engine.request import (
    MOST_LIKELY,
    Completion,
    FinishReason,
    Logprob,
    Request,
    RequestError,
    Room,
    Sampling,
    Scores,
    TokenLogprobs,
)
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.scheduling.pool import Pool, Sequence
from exspec.actors.engine.scheduling.prefill import PrefillChunk
from exspec.actors.engine.statistics import EngineCounters, EngineStatistics
from exspec.actors.engine.tokens.constraint import Barred, Constraint, Guarded, forced
from exspec.actors.engine.tokens.constraint_walker import Candidates, ConstraintWalker, Masks, candidate_ids
from exspec.actors.engine.tokens.logprobs import Logprobs, logprobs
from exspec.actors.engine.tokens.sampling import Sampler, SamplerState

P = ParamSpec("P")
T = TypeVar("T")
Ending = tuple[FinishReason, int | str | None]


class Outcome(NamedTuple):
    """The result of a row's round.

    tokens: the accepted drafts and the target's own token after them. drafted: how many tokens were proposed. columns:
    width of the row's forward. scores: of the candidates, by position in `tokens`; none where there was no choice.
    by_drafter: the drafter's own counts, by field of SequenceStatistics. logprobs: of `tokens`, if the row asks for
    them. states: the hidden states [Q, D] that the tokens follow, if the engine embeds.
    """

    tokens: list[int]
    drafted: int
    columns: int
    scores: dict[int, Scores]
    by_drafter: dict[str, int]
    logprobs: list[TokenLogprobs]
    states: Any = None


class Round(NamedTuple):
    """A round that the device is working on.

    copies: the target's tokens [R, Q] after the pending one and after each draft, the lengths of the drafts [R], the
    drafts [R, N], and [R] for each name in `counted`. scores: the logits [R, Q, M] of the candidates, which are the
    tokens that scored rows may choose from. logprobs: `Logprobs`, if a row asks for them. states: hidden states
    [R, Q, D] in float32, if the engine embeds.
    """

    group: Group
    copies: HostCopy
    counted: list[str]
    scores: HostCopy | None
    candidates: Candidates
    logprobs: HostCopy | None
    states: HostCopy | None = None


class Started(NamedTuple):
    """A round whose verify is on its way through several devices. It becomes a `Round` once its tokens are chosen."""

    group: Group
    draft: Draft
    batch: Batch
    forward: InFlight


class Picked(NamedTuple):
    """tokens: [R, Q], chosen from logits. scores: the logits [R, Q, M] of tokens that were asked for."""

    tokens: Tensor
    scores: Tensor | None
    logprobs: Logprobs | None


def phase(method: "Callable[Concatenate[Engine, P], T]") -> "Callable[Concatenate[Engine, P], T]":
    """Adds the seconds that the method takes, without compiling, to the engine's statistics under its name."""

    @wraps(method)
    def timed(self: "Engine", /, *args: P.args, **kwargs: P.kwargs) -> T:
        start = running()
        result = method(self, *args, **kwargs)
        self.counters.spend(method.__name__, running() - start)
        return result

    return timed


class Engine:
    """Decodes token sequences in batches with a target and, unless the method is plain, a drafter.

    target, draft: causal language models of transformers with a full KV cache, of one vocabulary
        (`exspec.actors.models.load_pair` checks both), on one device. Not every drafter needs a draft. The target may
        be split over several devices (`exspec.actors.engine.kv.split.place`), with the draft on the first.
    config: default: exspec with a draft, plain without.
    end_ids: token ids that end a sequence; default: those of the target's generation config.
    recorder: records forwards of fixed shapes; default: CUDA graphs on a GPU, nothing elsewhere.
    drafter: builds the drafter; default: the one that the config names.

    `submit` takes requests at any time; `step` runs one round, in the phases admit, group, draft, verify, wait and
    commit; `take` hands out what has finished. One thread only: `EngineThread` wraps an engine for several. Raises
    ValueError for settings that the models cannot meet.
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
        self.config = config = resolve(target, draft, config)
        self.device = target.device
        self.vocabulary = target.config.get_text_config().vocab_size
        self.end_ids = model_end_ids(target) if end_ids is None else end_ids
        self.adapters = adapters_of(target)
        target = headless(target) if config.embeds else target
        self.picks: Any = hidden_states if config.embeds else pick
        recorder = compiling(recorder or recorder_for(self.device, config), config)
        parts = build(target, draft, config, recorder, drafter)
        self.target, self.drafter, self.drafter_context, self.draft_length, self.grouping, self.prefill, store = parts
        ahead = 0 if self.drafter.window else self.drafter.ahead  # a window's KV is not in the pool's pages
        if self.adapters:
            self.target.adapters = torch.zeros(config.slots + 1, dtype=torch.long, device=self.device)
        self.pool = Pool(config.slots, store, config.width, ahead, config.capacity)
        self.samplers = SamplerState(config.slots, self.vocabulary, self.device, recorder.wrap)
        if isinstance(self.target, SplitModel):
            self.fill, self.choose = self.target.fill, self._whole_choices
            self._head, self._choose = recorder.wrap(self.target.head), recorder.wrap(self._last_choices)
        else:
            self.fill, self._forward = recorder.wrap(self.target.fill), recorder.wrap(self.target.forward)
            self.choose = recorder.wrap(self._choices)
        self._pick = recorder.wrap(pick)
        self.counters = EngineCounters()
        self.learning = True  # the drafter learns from finished sequences
        self._running: deque[Round | Started] = deque()  # on the devices, while rounds overlap, the oldest first
        self._finished: list[Completion] = []
        self._ids: set[Hashable] = set()

    @property
    def busy(self) -> bool:
        return bool(self.pool.running or self.pool.waiting)

    @property
    def statistics(self) -> EngineStatistics:
        return self.counters.value

    def check_request(self, request: Request) -> None:
        """Raises RequestError for a request that could never be decoded."""
        length = len(request.prompt)
        name = f"request {request.id!r}"
        if length == 0:
            raise RequestError(f"{name}: the prompt is empty, expected at least one token")
        if request.max_new_tokens < 1:
            raise RequestError(f"{name}: max_new_tokens is {request.max_new_tokens}, expected at least 1")
        for key, ids in request.token_ids.items():
            if bad := [t for t in ids if not 0 <= t < self.vocabulary]:
                size = self.vocabulary
                raise RequestError(f"{name}: {key}: token id {bad[0]} is outside the vocabulary of {size} tokens")
        whole = request.given is not None
        if reason := Room(self.context, self.config.capacity).refusal(length, request.max_new_tokens, whole):
            raise RequestError(f"{name}: {reason}")
        if not 0 <= request.min_new_tokens <= request.max_new_tokens:
            raise RequestError(f"{name}: min_new_tokens is {request.min_new_tokens}, expected 0 to max_new_tokens")
        if not 0 <= request.adapter <= self.adapters:
            raise RequestError(f"{name}: adapter is {request.adapter}, expected 0 to {self.adapters}")
        if not all(request.bad_words):
            raise RequestError(f"{name}: bad_words: expected sequences of one token or more")
        if request.logprobs is not None and not 0 <= request.logprobs <= MOST_LIKELY:
            raise RequestError(f"{name}: logprobs is {request.logprobs}, expected 0 to {MOST_LIKELY}")
        if request.constraint and (request.min_new_tokens or request.bad_words or request.ignore_end):
            raise RequestError(f"{name}: constraint excludes min_new_tokens, bad_words and ignore_end")
        if self.config.embeds and (request.given is None or request.logprobs is not None):
            raise RequestError(f"{name}: the engine embeds: expected given tokens, and no logprobs")
        scored = request.given is not None and not self.config.embeds
        if scored and (request.logprobs is None or self.config.drafts):
            raise RequestError(f"{name}: given needs logprobs, and method plain")
        if request.given is not None and (
            request.constraint or request.stop or request.min_new_tokens or request.bad_words
        ):
            raise RequestError(f"{name}: given excludes stop, constraint, min_new_tokens and bad_words")
        if request.stop and request.constraint:
            raise RequestError(f"{name}: stop and constraint exclude each other")

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it could never be decoded, or if its id is already being decoded; and
        what the request's own functions raise."""
        self.check_request(request)
        if request.id in self._ids:
            raise RequestError(f"request {request.id!r}: a request with this id is already being decoded")
        sequence = Sequence(request, self.context)
        endless = request.ignore_end or request.given is not None
        sequence.ends = frozenset() if endless else self.end_ids | request.end_ids
        if request.constraint:
            sequence.constraint = Guarded(request.constraint(), self.vocabulary, sequence.failed)
        elif request.min_new_tokens or request.bad_words:
            sequence.constraint = Barred(self.vocabulary, sequence.ends, request.min_new_tokens, request.bad_words)
        self._begin(sequence)
        if sequence.error:
            raise sequence.error
        self._ids.add(request.id)
        self.pool.waiting.append(sequence)

    def _begin(self, sequence: Sequence) -> None:
        """Append the tokens that a constraint forces at the start: they are prefilled with the prompt, in no round."""
        if sequence.constraint is None or sequence.request.logprobs is not None:
            return
        first = forced(sequence.constraint, sequence.budget - 1)
        for token in takewhile(lambda token: not self._ends(sequence, token), first):
            self._append(sequence, token, {})
            sequence.counters.forced += 1

    def take(self) -> list[Completion]:
        """The completions since the last call, in order of finishing."""
        finished, self._finished = self._finished, []
        self._ids -= {completion.id for completion in finished}
        return finished

    def step(self) -> None:
        """Run one round. Does nothing without work."""
        self.admit()
        while self._running and len(self._others()) < self.config.batch_size:
            self._land()  # a round that the others do not fill costs as much as a full one
            self.admit()
        if not self.pool.running:
            return
        group = self.group()
        self._running.append(self.verify(group, self.draft(group)))
        most = self.config.devices if self.config.overlap else 0
        if group.walker and not isinstance(self._running[-1], Started):  # its masks are written in place
            most = 0
        while len(self._running) > most:
            self._land()

    def _others(self) -> list[Sequence]:
        """The running sequences that are not part of a round on the devices."""
        if not self._running:
            return self.pool.running
        busy = {s for started in self._running for s in started.group.sequences}
        return [s for s in self.pool.running if s not in busy]

    def _land(self) -> None:
        """Commit the oldest round on the devices, if there is one."""
        if self._running:
            started = self._running.popleft()
            self.commit(started.group, self.wait(started))

    def run(self) -> list[Completion]:
        """Step until no work is left; returns the completions."""
        while self.busy:
            self.step()
        return self.take()

    def forget(self) -> None:
        """Release the cached KV that no running sequence uses, and what the drafter has learned."""
        self.pool.store.forget()
        self.drafter.forget()

    def check(self) -> None:
        """Raise AssertionError where an invariant of pool or KV store does not hold. Call between rounds."""
        self.pool.check()
        self.target.check({s.slot: s.length for s in self.pool.running})
        for cache in self.drafter.caches:  # the last token before the pending one may be missing there
            cache.check({s.slot: max(0, s.length - 1) for s in self.pool.running})

    @phase
    def admit(self) -> None:
        """Admit waiting sequences and prefill their prompts."""
        admitted = self.pool.admit(self.grouping.room(self.pool))
        if not admitted:
            return
        if self.target.adapters is not None:
            slots, adapters = zip(*((s.slot, s.request.adapter) for s in admitted), strict=True)
            self.target.adapters[self._to_device(slots)] = self._to_device(adapters)
        for s in admitted:
            self.drafter.admit(s.slot, s.tokens)
        for chunks in self.prefill.plan(admitted):
            batch = self._batch(chunks, self.config.prefill_rows)
            self.fill(batch)
            if self.drafter.window is None:
                self.drafter.prefill(batch)
            count = sum(chunk.end - chunk.start for chunk in chunks if not chunk.sequence.preempted)
            self.counters.add(prefill_tokens=count)
        self._recompute([s for s in admitted if s.length > s.prefilled])
        if self.drafter.window is not None:
            shape = self.drafter.window, self.config.page_size, int(self.drafter.follows)
            for chunks in self.prefill.windows(admitted, *shape):
                self.drafter.prefill(self._batch(chunks, self.config.prefill_rows))
        self.counters.add(cached_tokens=sum(s.cached for s in admitted if not s.preempted))
        for s in admitted:
            self.samplers.admit(s.slot, s.request.sampling, s.request.prompt, s.committed)
            if not s.preempted:
                s.started = time.monotonic()

    def _recompute(self, sequences: list[Sequence]) -> None:
        """Cache again the tokens that rounds had cached before their sequences were preempted. They are fed in the
        shape of a round: in another shape their KV might differ in its last bits."""
        rows = self.config.batch_size
        parts: dict[tuple[int, int], list[PrefillChunk]] = defaultdict(list)
        for s in sequences:
            start = s.prefilled
            while start < s.length:
                (_, kv_columns), width = self.config.round_shape(rows, start + 1), self.config.width_at(start)
                end = min(start + width, kv_columns, s.length)
                parts[kv_columns, width].append(PrefillChunk(s, start, end, width, kv_columns))
                start = end
        for _, chunks in sorted(parts.items()):
            for i in range(0, len(chunks), rows):
                batch = self._batch(chunks[i : i + rows], rows)
                greedy = Sampler([Sampling()] * len(batch.slots), [[0]] * len(batch.slots), self.device)
                self.choose(batch, greedy)
                if self.drafter.window is None:
                    self.drafter.prefill(batch)

    def _batch(self, chunks: list[PrefillChunk], rows: int) -> Batch:
        """Chunks of one shape as one forward. Tokens are padded on the right, with columns that later tokens overwrite;
        where shapes are fixed, dead rows fill the batch up to `rows`."""
        width = chunks[0].width
        dead = max(rows - len(chunks), 0) if self.config.fixed_shapes else 0
        tokens = [*(c.tokens + [0] * (width - c.end + c.start) for c in chunks), *[[0] * width] * dead]
        slots = [*(c.sequence.slot for c in chunks), *[self.pool.slots] * dead]
        starts = [*(c.start for c in chunks), *[0] * dead]
        return Batch(self._to_device(slots), self._to_device(tokens), self._to_device(starts), chunks[0].kv_columns)

    def _to_device(self, values: Collection[Any]) -> Tensor:
        return torch.tensor(values).to(self.device, non_blocking=True)

    @phase
    def group(self) -> Group:
        """Choose the rows of the next round, and reserve their KV."""
        sequences: list[Sequence] | None = None
        while not sequences:
            sequences = self.pool.reserve(self.grouping.select(self._others()), preempt=not self._running)
            if sequences is None:
                self._land()
        for sequence in self.pool.running:
            sequence.waited += 1
        for sequence in sequences:
            sequence.waited = 0
        config, slots = self.config, self.pool.slots
        rows, kv_columns = config.round_shape(len(sequences), max(s.length for s in sequences) + 1)
        return Group.of(sequences, rows, slots, kv_columns, config, self.device, self._walker, self.samplers)

    def _walker(self, sequences: list[Sequence | None]) -> ConstraintWalker | None:
        constrained = any(s is not None and s.constraint is not None for s in sequences)
        return ConstraintWalker(sequences, *self._masks, self._ends) if constrained else None

    @cached_property
    def _masks(self) -> tuple[Masks, Masks]:
        """For all columns of a round, and for the first drafted token."""
        rows = self.config.batch_size, self.vocabulary, self.device
        return Masks(self.config.width, *rows), Masks(1, *rows)

    @phase
    def draft(self, group: Group) -> Draft:
        """Have the drafter propose tokens after each row's pending one. Given completions are their own drafts."""
        if group.given is None:
            draft = self.drafter.propose(group, self.draft_length.limits(group))
        else:
            draft = self._given(group, group.given)
        return self._walked(group, group.walker, draft) if group.walker else draft

    def _given(self, group: Group, given: Tensor) -> Draft:
        lengths = [n if s and s.request.given else 0 for s, n in zip(group.sequences, group.useful, strict=True)]
        return Draft(given[:, : max(lengths)].clamp(min=0), self._to_device(lengths))

    def _walked(self, group: Group, walker: ConstraintWalker, draft: Draft) -> Draft:
        """The draft as the constraints allow it; the host waits for the draft. A drafter whose tokens were replaced
        takes in the new ones."""
        drafted: list[list[int]] = draft.on_host or [[] for _ in group.sequences]
        if draft.on_host is None and draft.tokens.shape[1]:
            lengths, tokens = (tensor.tolist() for tensor in HostCopy(draft.lengths, draft.tokens).wait())
            drafted = [row[:length] for length, row in zip(lengths, tokens, strict=True)]
        walked = walker.walk(drafted, group.useful)
        if walked == drafted:
            return draft
        most = max(map(len, walked))
        values = [[len(tokens), *tokens, *[0] * (most - len(tokens))] for tokens in walked]
        on_device = self._to_device(values)
        allowed = Draft(on_device[:, 1:], on_device[:, 0], counts=draft.counts)
        replaced = any(tokens != drafted[row][: len(tokens)] for row, tokens in enumerate(walked))
        if replaced:
            self.drafter.replace(self._drafted(group, allowed))
        return allowed

    def _drafted(self, group: Group, draft: Draft) -> Batch:
        tokens = torch.cat([group.pending[:, None], draft.tokens], dim=1)
        dead = group.width - tokens.shape[1]
        tokens = pad(tokens, (0, dead)) if dead and self.config.fixed_shapes else tokens
        return Batch(group.slots, tokens, group.starts, group.kv_columns)

    @phase
    def verify(self, group: Group, draft: Draft) -> Round | Started:
        """Have the target choose the tokens after the pending one and after each draft. On several devices it only
        begins to."""
        batch = self._drafted(group, draft)
        if isinstance(self.target, SplitModel):
            return Started(group, draft, batch, self.target.start(batch))
        return self._round(group, draft, batch)

    def _round(self, group: Group, draft: Draft, batch: Batch, states: States | None = None) -> Round:
        """Have the target choose the tokens of a round. states: of the batch's tokens, if the target is on several
        devices."""
        candidates = Candidates()
        picked: Any
        if group.walker is None:
            more = () if group.likeliest is None else (group.likeliest, group.given)
            if states is None:
                picked = self.choose(batch, group.sampler, *more)
            else:
                picked = self._choose(states, batch.tokens, batch.starts, group.sampler, *more)
        else:
            logits = self._forward(batch) if states is None else self._head(states)
            width = batch.tokens.shape[1]
            # The masks are made while the device computes.
            masks, candidates = group.walker.write_masks(width), group.walker.candidates(width)
            asked = candidate_ids(candidates, len(group.sequences), width, self.device) if candidates else None
            wanted = group.likeliest, group.given, masks, asked
            picked = self._pick(logits, batch.tokens, batch.starts, group.sampler, *wanted)
        if self.config.embeds:
            assert group.given is not None
            copies = HostCopy(group.given[:, : batch.tokens.shape[1]], draft.lengths, draft.tokens)
            return Round(group, copies, [], None, candidates, None, HostCopy(picked))
        if self.drafter.follows:
            self.drafter.prefill(batch._replace(tokens=picked.tokens).shifted(1))
        copies = HostCopy(picked.tokens, draft.lengths, draft.tokens, *draft.counts.values())
        scores = None if picked.scores is None else HostCopy(picked.scores)
        found = None if picked.logprobs is None else HostCopy(*picked.logprobs)
        return Round(group, copies, list(draft.counts), scores, candidates, found)

    def _choices(
        self, batch: Batch, sampler: Sampler, likeliest: int | None = None, given: Tensor | None = None
    ) -> Picked:
        """The tokens [R, Q] that the target chooses after each token of the batch."""
        logits = self.target.forward(batch)
        picked: Picked = self.picks(logits, batch.tokens, batch.starts, sampler, likeliest, given)
        return picked

    def _whole_choices(self, batch: Batch, *rest: Any) -> Picked:
        """As `_choices`, on several devices: one forward from its start to its end."""
        assert isinstance(self.target, SplitModel)
        states = self.target.arrived(self.target.start(batch))
        picked: Picked = self._choose(states, batch.tokens, batch.starts, *rest)
        return picked

    def _last_choices(self, states: States, *rest: Any) -> Picked:
        """The tokens [R, Q] that follow from hidden states. rest: as in `pick`."""
        assert isinstance(self.target, SplitModel)
        picked: Picked = self.picks(self.target.head(states), *rest)
        return picked

    @phase
    def wait(self, started: Round | Started) -> list[Outcome]:
        """Wait for the devices. Returns each row's outcome."""
        if isinstance(started, Started):
            assert isinstance(self.target, SplitModel)
            arrived = self.target.arrived(started.forward)
            started = self._round(started.group, started.draft, started.batch, arrived)
        chosen, lengths, drafts, *counts = (tensor.numpy() for tensor in started.copies.wait())
        width, most = chosen.shape[1], drafts.shape[1]
        agreed = (drafts == chosen[:, :most]) & (np.arange(most) < lengths[:, None])
        accepted = np.logical_and.accumulate(agreed, axis=1).sum(axis=1)
        walker = started.group.walker
        proposed = walker.proposed if walker else lengths.tolist()  # tokens that a constraint cut off count too
        counted = np.stack(counts, axis=1).tolist() if counts else [[]] * len(chosen)
        states = started.states.wait()[0].numpy() if started.states else [None] * len(chosen)
        outcomes = [
            Outcome(tokens[: kept + 1], length, width, {}, dict(zip(started.counted, row, strict=True)), [], state)
            for tokens, kept, length, row, state in zip(
                chosen.tolist(), accepted.tolist(), proposed, counted, states, strict=True
            )
        ]
        if started.logprobs:
            self._read_logprobs(started.group, started.logprobs.wait(), outcomes)
        if started.scores:
            logits = started.scores.wait()[0].double()
            for (r, q), tokens in started.candidates.items():
                # Only over the row's own candidates: M depends on the other rows.
                scores = logits[r, q, : len(tokens)].log_softmax(0).tolist()
                outcomes[r].scores[q] = dict(zip(tokens, scores, strict=True))
        return outcomes

    def _read_logprobs(self, group: Group, found: list[Tensor], outcomes: list[Outcome]) -> None:
        for r, (sequence, outcome) in enumerate(zip(group.sequences, outcomes, strict=True)):
            if sequence is None or (most := sequence.request.logprobs) is None:
                continue
            tokens, pairs, ranks = (tensor[r].tolist() for tensor in found)
            for q in range(len(outcome.tokens)):
                chosen, *likeliest = (Logprob(t, *pair) for t, pair in zip(tokens[q], pairs[q], strict=True))
                outcome.logprobs.append(TokenLogprobs(chosen, ranks[q] + 1, likeliest[:most]))

    @phase
    def commit(self, group: Group, outcomes: list[Outcome]) -> None:
        """Commit the accepted drafts and the target's own token after them; end the sequences that are done."""
        live = [(r, s, outcomes[r]) for r, s in enumerate(group.sequences) if s]
        grouped = len({s.length // self.config.bucket for _, s, _ in live}) == 1
        if group.walker:
            group.walker.rewind()
        kept = 0
        new: dict[int, list[int]] = {}
        for row, sequence, outcome in live:
            accepted = len(outcome.tokens) - 1
            self.draft_length.learn(sequence, outcome.drafted, accepted)
            before = len(sequence.tokens)
            ending = self._extend(sequence, outcome)
            committed = len(sequence.tokens) - before
            sequence.logprobs += outcome.logprobs[:committed]
            if outcome.states is not None:
                for state in outcome.states[:committed]:  # one by one: the order of a sum decides its last bits
                    sequence.state = state.copy() if sequence.state is None else sequence.state + state
            # Drafts past an end do not count.
            drafted = min(outcome.drafted, committed) if ending else outcome.drafted
            counted = (0, 0) if sequence.request.given else (drafted, min(accepted, committed))
            sequence.counters.round(grouped, *counted, outcome.by_drafter)
            if group.walker and sequence.constraint:
                sequence.counters.forced += group.walker.forced(row, committed)
                ending = ending or self._finish(sequence, sequence.constraint)
            kept += len(sequence.tokens) - before
            if sequence.error:
                ending = "error", None
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
        """Append the outcome's tokens up to the first that ends the sequence; returns that ending."""
        if sequence.unwatched and sequence.ends.isdisjoint(outcome.tokens):
            sequence.tokens += outcome.tokens[: sequence.budget]
            return ("length", None) if sequence.budget == 0 else None
        for n, token in enumerate(outcome.tokens):
            if ending := self._append(sequence, token, outcome.scores.get(n, {})):
                return ending
        return None

    def _finish(self, sequence: Sequence, constraint: Constraint) -> Ending | None:
        """Append the tokens that a constraint forces, if they lead to the end: they need no round."""
        if sequence.request.logprobs is not None:
            return None
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
        """The reason why the sequence ends with its last token; None if it continues."""
        if last in sequence.ends:
            return "stop", last
        if sequence.stop and not sequence.error:
            stopped_by, least = None, sequence.request.min_new_tokens
            try:
                stopped_by = sequence.stop(last)
            except BaseException as error:  # SystemExit too
                sequence.failed(error)
            if stopped_by is not None and len(sequence.tokens) - len(sequence.request.prompt) >= least:
                return "stop", stopped_by
        return ("length", None) if sequence.budget == 0 else None


def pick(
    logits: Tensor,
    tokens: Tensor,
    starts: Tensor,
    sampler: Sampler,
    likeliest: int | None = None,
    given: Tensor | None = None,
    masks: Tensor | None = None,
    asked: Tensor | None = None,
) -> Picked:
    """Choose tokens from logits [R, Q, V] of a batch. likeliest: how many of the likeliest tokens of each position get
    log-probabilities, beside the chosen one; None: no log-probabilities. given: [R, Q] or wider, tokens to take in
    place of a choice; -1: choose. asked: [R, Q, M], tokens whose logits to give.

    tokens, starts: as in `Batch`. Its KV columns are left out, so that one recording serves every number of them.
    """
    positions = starts[:, None] + 1 + torch.arange(tokens.shape[1], device=tokens.device)
    scaled = sampler.distribution(logits, tokens[:, 1:], masks)
    chosen = sampler.draw(scaled, positions)
    if given is not None:
        given = given[:, : chosen.shape[1]]
        chosen = torch.where(given < 0, chosen, given)
    scores = None if asked is None else logits.float().gather(2, asked.clamp(0, logits.shape[-1] - 1))
    return Picked(chosen, scores, None if likeliest is None else logprobs(logits, scaled, chosen, likeliest))


def hidden_states(logits: Tensor, *_: Any) -> Tensor:
    """In place of `pick`, what a target without an output head returns: hidden states [R, Q, D], in float32."""
    return logits.float()


def model_end_ids(model: PreTrainedModel) -> frozenset[int]:
    """All end-token ids of the model's generation config or, if it has none, of the model's config."""
    ids = model.generation_config.eos_token_id if model.generation_config else None
    ids = model.config.get_text_config().eos_token_id if ids is None else ids
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)
