"""The seconds of forwards on this device, by shape."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.drafter import Drafter
from exspec.actors.engine.drafters.lookup import kind, label
from exspec.actors.engine.engine import Engine
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import PagedModel
from exspec.actors.engine.kv.split import SplitModel, layer_counts
from exspec.actors.engine.layers.programs import OutOfTimeError
from exspec.actors.engine.methods import drafter_of
from exspec.actors.engine.request import Request
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.scheduling.pool import Sequence as Decoded
from exspec.actors.engine.shape.kept import Kept
from exspec.actors.engine.shape.plan import Models
from exspec.actors.engine.tokens.sampling import Sampler

WIDTHS = (1, 9, 17, 33, 65)  # columns of a compiled verify that are timed; others lie between two of them
RUNS, LEAST = 5, 0.1  # runs of a forward, at least, and seconds of them; the shortest counts: other work lengthens it


class Costs:
    """Seconds of forwards on the device, timed at the first request and interpolated between numbers of KV columns.

    A compiled verify is also interpolated between widths, because each width takes seconds to compile.

    requests: tokens are chosen with their sampling settings. longest: tokens of the longest expected sequence. config:
    the settings that all shapes share. kept: measurements of earlier processes. deadline: a value of time.monotonic;
    after it, a forward that was not timed yet raises OutOfTimeError.
    """

    def __init__(
        self,
        models: Models,
        requests: Sequence[Request],
        longest: int,
        config: EngineConfig,
        kept: Kept | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.models, self.requests, self.config = models, requests, config
        self.deadline = deadline
        widest = longest if config.attention == "in_place" else config.kv_columns(longest)
        widest = 1 << (widest - 1).bit_length()  # few numbers, so that other jobs have measured them
        self.points = sorted({min(config.capacity, c) for c in (64, widest // 2, widest, config.capacity)})
        same: list[Any] = [config.kernels, config.attention, config.capacity, config.page_size]
        same += [self._sampler(len(requests)).uses, *(["embeds"] if config.embeds else [])]
        self.devices = len(layer_counts(models.target.config) or [0])  # a forward keeps each one busy for a share of it
        self.kept, self.form = kept, " ".join(map(str, same))
        self.known: dict[str, float] = kept.seconds(self.form) if kept else {}
        self.engines: dict[int, Engine] = {}
        self.drafters: dict[str, Drafter] = {}  # by label, for the engine

    def round(self, config: EngineConfig, kv_columns: int, length: int | None = None) -> float:
        """Seconds of draft and verify for a full group. length: cached tokens of its rows; default: the capacity."""
        length = config.capacity if length is None else length
        drafts, width = config.drafted_at(length), config.width_at(length)
        verify = _between(self.points, kv_columns, lambda a: self._verify(config.batch_size, width, a)) / self.devices
        if not config.drafts:
            return verify
        first = _between(self.points, kv_columns, lambda a: self.propose(config, min(drafts, 1), a))
        return verify + first + max(drafts - 1, 0) * self.draft_step(config, kv_columns)

    def draft_step(self, config: EngineConfig, kv_columns: int) -> float:
        """Seconds of one more drafted token."""
        lengths = kind(config).lengths_with(self.models.draft_config)
        if (most := min(4, max(lengths))) == 1:
            return 0.0
        one, many = (
            _between(self.points, kv_columns, lambda a, n=n: self.propose(config, n, a))  # type: ignore[misc]
            for n in (1, most)
        )
        return max(many - one, 0.0) / (most - 1)

    def prefill(self, config: EngineConfig, *lengths: int) -> float:
        """Seconds to prefill prompts of these lengths together."""
        window = config.draft_window if kind(config).models(self.models.draft_config) else None
        if window is None and self.devices == 1:
            return _forwards(config, lengths) * self.chunk(config)
        alone = self.chunk(config.plain())  # a drafter with a window is fed less than the target
        fed = [length if window is None else min(length, window + config.page_size) for length in lengths]
        own = max(self.chunk(config) - alone, 0.0)
        return _forwards(config, lengths) * alone / self.devices + _forwards(config, fed) * own

    def _verify(self, rows: int, width: int, kv_columns: int) -> float:
        if not self.config.compiles or width > WIDTHS[-1]:
            return self.verify(rows, width, kv_columns)
        return _between(WIDTHS, width, lambda w: self.verify(rows, w, kv_columns))

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
            self.engines[rows] = engine = Engine(self.models.target, self.models.draft, replace(shape, exact=True))
            for slot in range(rows):
                engine.pool.store.begin(slot, [], 0, engine.config.capacity, 0)
        return self.engines[rows]

    def _drafter(self, config: EngineConfig, engine: Engine) -> Drafter:
        name = label(config)
        if name not in self.drafters:
            self.drafters.clear()  # one at a time, like engines
            # Recordings continue to write to remembered states, so states are only dropped if nothing is recorded.
            if isinstance(engine.target, PagedModel) and not engine.drafter_context.recorder.records:
                engine.target.forget()
            # Drafts are timed for the KV columns that their rows need, whatever the candidate's bucket.
            shape = replace(
                config,
                method="exspec" if config.drafts else "plain",
                batch_size=engine.config.batch_size,
                window=engine.config.window,
                bucket=engine.config.bucket,
                capacity=engine.config.capacity,
            )
            context = replace(engine.drafter_context, config=shape, step=engine.config.page_size)
            self.drafters[name] = drafter_of(context)
        return self.drafters[name]

    def forget(self) -> None:
        """Release the engines and their memory."""
        self.engines.clear()
        self.drafters.clear()
        gc.collect()

    def verify(self, rows: int, width: int, kv_columns: int) -> float:
        """Seconds of a verify forward and the choice of its tokens."""

        def prepare() -> Callable[[], Any]:
            engine = self._engine(rows)
            slots = torch.arange(rows, device=engine.device)
            tokens = torch.ones(rows, width, dtype=torch.long, device=engine.device)
            starts = torch.full_like(slots, max(kv_columns - 1 - width, 1))
            # In place, the rows' lengths decide what is read.
            limit = kv_columns if engine.config.attention == "gathered" else engine.config.capacity
            batch, sampler = Batch(slots, tokens, starts, limit), self._sampler(rows)
            return lambda: engine.choose(batch, sampler)

        return self._seconds(f"verify B={rows} Q={width} kv={kv_columns}", prepare)

    def propose(self, config: EngineConfig, count: int, kv_columns: int) -> float:
        """Seconds to draft `count` tokens and to take in the target's choices."""
        rows = config.batch_size

        def prepare() -> Callable[[], Any]:
            engine = self._engine(rows)
            group, drafter = self._group(engine, rows, max(kv_columns - count, 2)), self._drafter(config, engine)
            for sequence in group.sequences:
                assert sequence is not None
                drafter.admit(sequence.slot, sequence.tokens)
            chosen = torch.ones(rows, count + 1, dtype=torch.long, device=engine.device)
            choices = Batch(group.slots, chosen, group.starts + 1, group.kv_columns)

            def run() -> None:
                drafter.propose(group, [count] * rows)
                if drafter.follows:
                    drafter.prefill(choices)

            return run

        return self._seconds(f"propose {label(config)} B={rows} K={count} kv={kv_columns}", prepare)

    def chunk(self, config: EngineConfig) -> float:
        """Seconds of a prefill forward of target and drafter."""

        rows, columns = self.config.prefill_rows, self.config.prefill_columns

        def prepare() -> Callable[[], Any]:
            engine = next(iter(self.engines.values()), None) or self._engine(self.config.batch_size)
            slots = torch.arange(rows, device=engine.device) % engine.pool.slots
            ids = torch.ones(rows, columns, dtype=torch.long, device=engine.device)
            batch = Batch(slots, ids, torch.zeros_like(slots), engine.config.kv_columns(columns))
            drafter = self._drafter(config, engine)

            def run() -> None:
                engine.fill(batch)
                drafter.prefill(batch)
                if isinstance(engine.target, SplitModel):
                    engine.target.finish()

            return run

        return self._seconds(f"prefill {label(config)} P={rows} C={columns}", prepare)

    def _group(self, engine: Engine, rows: int, length: int) -> Group:
        """A group whose rows have `length` tokens and the sampling of the requests."""
        sequences, capacity = [], engine.config.capacity
        for slot, request in zip(range(rows), cycle(self.requests), strict=False):
            sequence = Decoded(Request(slot, [1] * length, capacity, request.sampling), length + capacity)
            sequence.slot = slot
            engine.samplers.admit(slot, request.sampling, [1], [])
            sequences.append(sequence)
        return Group.of(sequences, rows, rows, capacity, engine.config, engine.device, lambda _: None, engine.samplers)

    def _sampler(self, rows: int) -> Sampler:
        chosen = [r.sampling for r, _ in zip(cycle(self.requests), range(rows), strict=False)]
        return Sampler(chosen, [[1]] * rows, self.models.target.device)

    def _seconds(self, name: str, prepare: Callable[[], Callable[[], Any]]) -> float:
        if name not in self.known:
            if time.monotonic() > self.deadline:
                raise OutOfTimeError
            run = prepare()
            run()
            run()  # the first runs record and compile
            start, times = time.monotonic(), list[float]()
            while len(times) < RUNS or time.monotonic() < start + LEAST:
                times.append(_timed(run, self.models.target.device))
            self.known[name] = min(times)
            if self.kept:
                self.kept.keep_seconds(self.form, {name: self.known[name]})
        return self.known[name]


def _forwards(config: EngineConfig, lengths: Sequence[int]) -> int:
    """Prefill forwards of prompts of these lengths."""
    chunks = sum(-(-length // config.prefill_columns) for length in lengths)
    return -(-chunks // config.prefill_rows)


def _between(points: Sequence[int], value: int, timed: Callable[[int], float]) -> float:
    """The seconds at a value between two of the points, or at the nearest point."""
    low = max((p for p in points if p <= value), default=points[0])
    high = min((p for p in points if p >= value), default=points[-1])
    share = 0.0 if low == high else (value - low) / (high - low)
    return timed(low) * (1 - share) + timed(high) * share


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
