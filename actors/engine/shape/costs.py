"""What forwards cost on the device at hand, by shape."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters import kind, label
from exspec.actors.engine.drafters.drafter import Drafter
from exspec.actors.engine.engine import Engine
from exspec.actors.engine.kv.cached_model import PagedModel
from exspec.actors.engine.methods import drafter_of
from exspec.actors.engine.request import Request
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.scheduling.pool import Sequence as Decoded
from exspec.actors.engine.tokens.sampling import Sampler


class Clock:
    """Seconds of measuring: what devices record, and compilers make, does not count."""

    def __init__(self) -> None:
        self.stood = 0.0

    def now(self) -> float:
        return time.monotonic() - self.stood

    @contextmanager
    def stopped(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.stood += time.monotonic() - start


class OutOfTimeError(Exception):
    """The clock ran out before a forward was timed."""


class Costs:
    """Seconds of forwards on the device, timed when first asked for; between attended columns interpolated.

    requests: their sampling is what tokens are chosen with. longest: tokens of the longest sequence expected. config:
    what the shapes asked for have in common. deadline: once past it by the clock, a forward that was not timed yet
    raises OutOfTimeError.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        requests: Sequence[Request],
        longest: int,
        config: EngineConfig,
        clock: Clock | None = None,
    ) -> None:
        self.target, self.draft, self.requests, self.config = target, draft, requests, config
        self.clock = clock or Clock()
        self.deadline = math.inf
        attended = longest if config.attention == "in_place" else config.attended(longest)
        self.points = sorted({min(config.capacity, c) for c in (64, attended, (64 + attended) // 2, config.capacity)})
        self.known: dict[Any, float] = {}
        self.engines: dict[int, Engine] = {}
        self.drafters: dict[str, Drafter] = {}  # beside the engine

    def round(self, config: EngineConfig, attended: int) -> float:
        """Draft and verify of a full group."""
        verify = self._between(attended, lambda a: self.verify(config.batch_size, config.width, a))
        if not config.drafts:
            return verify
        first = self._between(attended, lambda a: self.propose(config, 1, a))
        return verify + first + (config.draft_tokens - 1) * self.draft_step(config, attended)

    def draft_step(self, config: EngineConfig, attended: int) -> float:
        """One more drafted token."""
        lengths = kind(config).lengths_with(None if self.draft is None else self.draft.config)
        if (most := min(4, max(lengths))) == 1:
            return 0.0
        one, many = (
            self._between(attended, lambda a, n=n: self.propose(config, n, a))  # type: ignore[misc]
            for n in (1, most)
        )
        return max(many - one, 0.0) / (most - 1)

    def prefill(self, config: EngineConfig, length: int) -> float:
        """A prompt of so many tokens."""
        chunks = -(-length // config.prefill_columns)
        return chunks * self.chunk(config) / config.prefill_rows

    def _between(self, attended: int, timed: Callable[[int], float]) -> float:
        low = max((p for p in self.points if p <= attended), default=self.points[0])
        high = min((p for p in self.points if p >= attended), default=self.points[-1])
        share = 0.0 if low == high else (attended - low) / (high - low)
        return timed(low) * (1 - share) + timed(high) * share

    def _engine(self, rows: int) -> Engine:
        if rows not in self.engines:
            shape = replace(
                self.config.plain(),
                batch_size=rows,
                window=rows,
                bucket=self.config.capacity,
                columns=None,
                overlap=False,
            )
            self.forget()  # one at a time: each holds KV
            self.engines[rows] = engine = Engine(self.target, self.draft, replace(shape, exact=True))
            for slot in range(rows):
                engine.pool.store.begin(slot, [], 0, engine.config.capacity)
        return self.engines[rows]

    def _drafter(self, config: EngineConfig, engine: Engine) -> Drafter:
        """The drafter of a config, beside the engine."""
        name = label(config)
        if name not in self.drafters:
            self.drafters.clear()  # one at a time, as engines
            if isinstance(engine.target, PagedModel) and not engine.given.recorder.records:
                engine.target.forget()  # what was recorded would go on writing there
            # Whatever the candidates' buckets: drafts are timed for what their rows attend.
            its = replace(
                config,
                method="exspec" if config.drafts else "plain",
                batch_size=engine.config.batch_size,
                window=engine.config.window,
                bucket=engine.config.bucket,
                capacity=engine.config.capacity,
            )
            given = replace(engine.given, config=its, step=engine.config.page_size)
            self.drafters[name] = drafter_of(given)
        return self.drafters[name]

    def forget(self) -> None:
        """Let go of the engines, and of their memory."""
        self.engines.clear()
        self.drafters.clear()
        gc.collect()

    def verify(self, rows: int, width: int, attended: int) -> float:
        """One verify forward and the choice of its tokens."""

        def prepare() -> Callable[[], Any]:
            engine = self._engine(rows)
            slots, _, starts = self._rows(engine, rows, attended)
            tokens = torch.ones(rows, width, dtype=torch.long, device=engine.device)
            starts = (starts - width).clamp(min=1)
            sampler = self._sampler(rows)
            return lambda: engine._choose(slots, tokens, starts, sampler, self._given(engine, attended), 0)

        return self._seconds(("verify", rows, width, attended), prepare)

    def propose(self, config: EngineConfig, count: int, attended: int) -> float:
        """A whole draft of `count` tokens, and taking in what the target makes of it."""
        rows = config.batch_size

        def prepare() -> Callable[[], Any]:
            engine = self._engine(rows)
            group, its = self._group(engine, rows, max(attended - count, 2)), self._drafter(config, engine)
            for sequence in group.sequences:
                assert sequence is not None
                its.admit(sequence.slot, sequence.tokens)
            chosen = torch.ones(rows, count + 1, dtype=torch.long, device=engine.device)

            def run() -> None:
                its.propose(group, [count] * rows)
                if its.follows:
                    its.prefill(group.slots, chosen, group.starts + 1, group.attended)

            return run

        return self._seconds(("propose", label(config), rows, count, attended), prepare)

    def chunk(self, config: EngineConfig) -> float:
        """One prefill forward, of the target and of the drafter."""

        def prepare() -> Callable[[], Any]:
            rows, columns = self.config.prefill_rows, self.config.prefill_columns
            engine = next(iter(self.engines.values()), None) or self._engine(self.config.batch_size)
            slots = torch.arange(rows, device=engine.device) % engine.pool.slots
            ids = torch.ones(rows, columns, dtype=torch.long, device=engine.device)
            first, attended = torch.zeros_like(slots), engine.config.attended(columns)
            its = self._drafter(config, engine)

            def run() -> None:
                engine._fill(slots, ids, first, attended)
                its.prefill(slots, ids, first, attended)

            return run

        return self._seconds(("prefill", label(config)), prepare)

    def _group(self, engine: Engine, rows: int, length: int) -> Group:
        """Rows of so many tokens, whose tokens are chosen as those of the requests are."""
        sequences, capacity = [], engine.config.capacity
        for slot, request in zip(range(rows), cycle(self.requests), strict=False):
            made = Decoded(Request(slot, [1] * length, capacity, request.sampling), length + capacity)
            made.slot = slot
            engine.samplers.admit(slot, request.sampling, [1], [])
            sequences.append(made)
        return Group.of(sequences, rows, rows, capacity, capacity, engine.device, lambda _: None, engine.samplers)

    def _rows(self, engine: Engine, rows: int, attended: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slots = torch.arange(rows, device=engine.device)
        ones = torch.ones_like(slots)
        return slots, ones, torch.full_like(slots, attended - 1)

    def _given(self, engine: Engine, attended: int) -> int:
        """What a forward is told to attend: where it reads in place, the rows' lengths tell it."""
        return attended if engine.config.attention == "gathered" else engine.config.capacity

    def _sampler(self, rows: int) -> Sampler:
        chosen = [r.sampling for r, _ in zip(cycle(self.requests), range(rows), strict=False)]
        return Sampler(chosen, [[1]] * rows, self.target.device)

    def _seconds(self, key: Any, prepare: Callable[[], Callable[[], Any]]) -> float:
        if key not in self.known:
            if self.clock.now() > self.deadline:
                raise OutOfTimeError
            with self.clock.stopped():
                run = prepare()
                run()
                run()  # what was recorded and compiled is warm
            self.known[key] = median(_timed(run, self.target.device) for _ in range(3))
        return self.known[key]


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
