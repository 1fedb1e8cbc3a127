"""The sequences of an engine: they wait in a queue, or run in a slot with their KV."""

import time
from collections import deque
from collections.abc import Set
from typing import Any

from exspec.actors.engine.kv.pages import Store
from exspec.actors.engine.request import Completion, FinishReason, Request, Scores, TokenLogprobs
from exspec.actors.engine.statistics import SequenceCounters, SequenceStatistics
from exspec.actors.engine.tokens.constraint import Constraint


class Sequence:
    """A request on its way to a completion.

    Invariant: tokens = prompt + committed. Between rounds the KV of `length` = len(tokens) - 1 tokens is cached: of all
    but the last token, which is pending. Prefill chunks compute the first `prefilled` tokens, except the first `cached`
    ones, which another sequence has computed; while it waits, this is an estimate. Rounds compute the others.
    """

    def __init__(self, request: Request, longest: int) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.constraint: Constraint | None = None
        self.error: BaseException | None = None  # of one of the request's own functions
        self.scores: list[Scores] = []
        self.logprobs: list[TokenLogprobs] = []
        self.state: Any = None  # as in `Completion`
        self.limit = min(len(self.tokens) + request.max_new_tokens, longest)  # tokens at most, prompt included
        self.slot = -1
        self.prefilled, self.cached = -1, 0
        self.preempted = False  # at least once
        self.waited = 0  # rounds since its last round
        self.accepted = self.decided = 0  # drafts that the target agreed with; drafts up to the first rejected one
        self.counters = SequenceCounters(len(self.tokens))
        self.stop = request.stop() if request.stop else None
        self.ends: Set[int] = request.end_ids
        self.submitted = self.admitted = self.started = time.monotonic()

    @property
    def statistics(self) -> SequenceStatistics:
        """The statistics of the rounds so far."""
        return self.counters.value

    @property
    def unwatched(self) -> bool:
        """Whether only end tokens can end the sequence early, and no scores are kept."""
        return self.constraint is None and self.stop is None and not self.request.scored

    @property
    def length(self) -> int:
        return len(self.tokens) - 1

    def failed(self, error: BaseException) -> None:
        """One of the request's own functions raised this. The first error ends the sequence with its round."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        self.error = self.error or error

    @property
    def committed(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def budget(self) -> int:
        """Tokens that may still be committed."""
        return self.limit - len(self.tokens)


class Pool:
    """W slots and their sequences, the oldest first; other sequences wait in order of arrival.

    store: allocates the slots' KV. width: tokens of each sequence that a round feeds. ahead: positions from the pending
    token on that a draft writes to, up to the capacity.

    Invariant: every slot is either free or held by exactly one running sequence.
    """

    def __init__(self, slots: int, store: Store, width: int, ahead: int = 0, capacity: int = 0) -> None:
        self.slots, self.store, self.width, self.ahead, self.capacity = slots, store, width, ahead, capacity
        self.free = list(range(slots))
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()

    def admit(self, room: int) -> list[Sequence]:
        """Give slots to at most `room` waiting sequences, as long as there is KV for them."""
        admitted: list[Sequence] = []
        while self.waiting and self.free and len(admitted) < room:
            sequence, slot = self.waiting[0], self.free[0]
            if sequence.prefilled < 0:
                sequence.prefilled = sequence.length
            reach, adapter = self._reach(sequence), sequence.request.adapter
            cached = self.store.begin(slot, sequence.tokens, sequence.prefilled, reach, adapter)
            if cached is None:
                break
            sequence.slot, sequence.cached = slot, cached
            if not sequence.preempted:
                sequence.admitted = time.monotonic()
            self.free.pop(0)
            self.running.append(self.waiting.popleft())
            admitted.append(sequence)
        return admitted

    def to_prefill(self, sequence: Sequence) -> int:
        """Tokens that a waiting sequence has to prefill. Only the first call counts cached tokens, because every round
        may ask."""
        if sequence.prefilled < 0:
            sequence.prefilled = sequence.length
            sequence.cached = self.store.cached(sequence.tokens, sequence.prefilled, sequence.request.adapter)
        return sequence.prefilled - sequence.cached

    def reserve(self, sequences: list[Sequence], preempt: bool = True) -> list[Sequence] | None:
        """Reserve KV for the sequences' next round. While KV is short, preempt the youngest running sequence: it goes
        back to the head of the queue with its tokens. Returns the sequences that still run. Without `preempt`, returns
        None if one would have to be preempted."""
        chosen = set(sequences)
        for sequence in [s for s in self.running if s in chosen]:
            while sequence.slot >= 0 and not self.store.extend(sequence.slot, self._reach(sequence)):
                if not preempt:
                    return None
                self._preempt(self.running[-1])
        return [s for s in sequences if s.slot >= 0]

    def _reach(self, sequence: Sequence) -> int:
        """The most tokens that the sequence may have cached in its next round."""
        drafted = min(sequence.length + self.ahead, self.capacity)
        return max(min(sequence.length + self.width, sequence.limit), drafted)

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.preempted = True
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free.append(sequence.slot)
        self.store.end(sequence.slot)
        sequence.slot = -1

    def end(self, sequence: Sequence, reason: FinishReason, stopped_by: int | str | None) -> Completion:
        """Remove the sequence and free its slot."""
        self._leave(sequence)
        committed = sequence.committed
        timing = SequenceStatistics(
            completion_tokens=len(committed),
            seconds_queued=sequence.admitted - sequence.submitted,
            seconds_prefill=sequence.started - sequence.admitted,
            seconds_decode=time.monotonic() - sequence.started,
        )
        counted = sequence.statistics + timing
        name = sequence.request.id
        found = sequence.scores, sequence.logprobs
        return Completion(name, committed, reason, stopped_by, counted, *found, sequence.error, sequence.state)

    def check(self) -> None:
        """Raise AssertionError if the invariants do not hold."""
        held = [s.slot for s in self.running]
        assert sorted([*self.free, *held]) == list(range(self.slots)), f"free {self.free}, held {held}"
        for s in self.running:
            assert s.tokens[: len(s.request.prompt)] == list(s.request.prompt), f"prompt of {s.request.id} changed"
            assert s.budget > 0, f"{s.request.id} runs past its limit of {s.limit} tokens"
        assert all(s.slot == -1 for s in self.waiting), "a waiting sequence holds a slot"
