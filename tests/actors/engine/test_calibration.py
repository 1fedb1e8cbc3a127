"""Calibration predicts speed from costs and acceptance, changes only free settings, and changes no token."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from exspec.actors.engine import Engine, EngineConfig, Request
from exspec.actors.engine.drafters.suffix import CONTEXT, Suffix
from exspec.actors.engine.layers import programs
from exspec.actors.engine.scheduling import grouping
from exspec.actors.engine.shape import calibration
from exspec.actors.engine.shape.calibration import Calibrator, Candidate, calibrate, decided, in_reach, later, partly
from exspec.actors.engine.shape.candidates import FREE, probe_shape
from exspec.actors.engine.shape.plan import Models, fit, plan_memory
from exspec.actors.engine.shape.prediction import predict
from exspec.actors.engine.shape.sample import Feed, Sample, probe
from exspec.actors.engine.shape.trials import Trials
from tests import tiny

SHAPE = tiny.config(window=8, prefill_rows=4)
REQUESTS = tiny.requests(tiny.prompts(12), 10)


class Costs:
    """A device whose forwards take `verify` seconds, and whose drafts take `draft` seconds per token."""

    def __init__(
        self, verify: float, draft: float, prefill: float = 0.0, column: float = 0.0, token: float = 0.0
    ) -> None:
        self.verify, self.draft, self.each, self.column, self.token = verify, draft, prefill, column, token
        self.deadline = math.inf

    def round(self, config: EngineConfig, kv_columns: int, length: int) -> float:
        return self.verify + self.column * kv_columns + config.drafted_at(length) * self.draft

    def prefill(self, config: EngineConfig, *lengths: int) -> float:  # noqa: ARG002
        return self.each * len(lengths) + self.token * sum(lengths)


def speed(costs: Costs, chance: float, **changes: Any) -> float:
    """The predicted tokens per second, where each drafted token is accepted with this chance."""
    survival = tuple(chance ** (i + 1) for i in range(8))
    sample = Sample([], [(10, 30), (20, 50), (5, 60)], {"model": survival}, {"model": 0.0})
    return predict(replace(SHAPE, **{"bucket": tiny.CONTEXT, **changes}), costs, sample)  # type: ignore[arg-type]


def test_plain_decoding_gives_one_token_per_row_and_round() -> None:
    assert speed(Costs(0.01, 0.001), 0.9, method="plain") == pytest.approx(4 / 0.01)


def test_the_prediction_groups_as_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses the same class."""
    rounds: list[int] = []

    class Watched(grouping.LengthBuckets):
        def select(self, running: Any) -> Any:
            rounds.append(len(running))
            return super().select(running)

    monkeypatch.setattr(grouping, "LengthBuckets", Watched)
    speed(Costs(0.01, 0.001), 0.9)
    predicted = len(rounds)
    tiny.decode(Engine(tiny.model(), tiny.model(seed=1), SHAPE), tiny.requests(tiny.prompts(3)))
    assert 0 < predicted < len(rounds)


def test_the_speed_of_speculation_is_tokens_over_costs() -> None:
    """A round gives 1 + p + p^2 + p^3 tokens, a little fewer at the end of a budget."""
    expected = 4 * (1 + 0.8 + 0.64 + 0.512) / (0.01 + 3 * 0.001)
    assert speed(Costs(0.01, 0.001), 0.8) == pytest.approx(expected, rel=0.12)


def test_a_useless_draft_loses_and_a_good_cheap_one_wins() -> None:
    assert speed(Costs(0.01, 0.002), 0.0) < speed(Costs(0.01, 0.002), 0.0, method="plain")
    assert speed(Costs(0.01, 0.001), 0.9) > 2 * speed(Costs(0.01, 0.001), 0.9, method="plain")


def test_longer_drafts_win_if_they_are_accepted() -> None:
    cheap = Costs(0.01, 0.0005)
    assert speed(cheap, 0.95, draft_tokens=8) > speed(cheap, 0.95, draft_tokens=2)
    assert speed(cheap, 0.3, draft_tokens=8) < speed(cheap, 0.3, draft_tokens=2)


def test_prefill_costs_speed() -> None:
    assert speed(Costs(0.01, 0.001, prefill=0.05), 0.5) < 0.9 * speed(Costs(0.01, 0.001), 0.5)


def test_in_place_a_row_commits_all_that_it_accepts_however_long_it_is() -> None:
    """KV columns of a round are then a mean, and no limit."""
    costs = Costs(0.01, 0.001)
    gathered, in_place = (speed(costs, 1.0, attention=attention) for attention in ("gathered", "in_place"))
    assert in_place == pytest.approx(gathered, rel=0.01)


def test_prompts_that_others_have_cached_cost_less() -> None:
    costs = Costs(0.01, 0.001, token=0.001)
    sample = Sample([], [(40, 30)], {"model": (0.5,) * 8}, {"model": 0.0})
    half = replace(sample, cached=0.5)
    assert predict(SHAPE, costs, half) > 1.1 * predict(SHAPE, costs, sample)  # type: ignore[arg-type]


def test_narrow_buckets_pay_if_columns_are_expensive_and_slots_many() -> None:
    expensive = Costs(0.001, 0.0, column=0.001)
    assert speed(expensive, 0.5, bucket=32, window=16) > speed(expensive, 0.5)


def test_drafts_for_long_rows_only_win_where_they_do_not_pay_for_short_ones() -> None:
    """A draft costs as much as a verify of a short row, and much less than one of a long row."""
    sample = Sample([], [(4, 20)] * 4 + [(70, 20)], {"model": (0.8, 0.6, 0.5)}, {"model": 0.0})
    costs = Costs(0.01, 0.02, column=0.001)

    def predicted(**changes: Any) -> float:
        shape = replace(SHAPE, bucket=tiny.CONTEXT, attention="in_place", window=12, **changes)
        return predict(shape, costs, sample)  # type: ignore[arg-type]

    always, plain = predicted(), predicted(method="plain", drafter="none", columns=1)
    assert predicted(draft_from=32) > 1.05 * max(always, plain)
    candidates = [Candidate(SHAPE, 2.0), Candidate(replace(SHAPE, draft_tokens=5), 3.0), raced(0)]
    found = partly(candidates, replace(sample, lengths=[(300, 9), (900, 200)]))
    assert [(shape.draft_tokens, shape.draft_from) for shape in found] == [(5, 512), (5, 1024)]


def test_drafts_for_long_rows_only_are_compared_and_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "DRAFT_FROM", (24,))
    rows, shape = tiny.requests(tiny.prompts(14), 10), replace(SHAPE, attention="gathered")
    found = calibrate(tiny.model(), tiny.model(seed=1), rows, shape, ("method", "draft_from"), seconds=20.0)
    predicted = {c.config.draft_from: c.predicted for c in found.candidates}
    assert set(predicted) == {0, 24}
    assert {c.config.draft_from for c in found.candidates if c.turns} == {0}, "the final would see one kind of rows"
    for chosen in predicted:
        made = Engine(tiny.model(), tiny.model(seed=1), replace(shape, draft_from=chosen))
        assert tiny.decode(made, rows) == tiny.greedy(tiny.model(), tiny.prompts(14), 10)
    asked = replace(shape, draft_from=24)
    assert probe_shape(Models(tiny.model(), None), asked, {"drafter": "suffix"}, ()).draft_from == 0, "all rounds draft"


def test_drafts_for_long_rows_only_are_chosen_if_they_are_faster_by_a_margin() -> None:
    """The final corrects the prediction of the drafter."""
    plain, always = raced(0, 100, 100, 100), replace(raced(3, 80, 80, 80), predicted=100.0)
    split = Candidate(replace(SHAPE, draft_from=24), 150.0)
    chosen, reason = later(plain, "why", [plain, always], [plain, always, split])
    assert (chosen, reason) == (split, "model, K=3 from 24 tokens should be 1.20 times as fast as plain, by prediction")
    for predicted, finalists in [(130.0, [plain, always]), (150.0, [plain]), (150.0, [])]:
        worse = replace(split, predicted=predicted)
        assert later(plain, "why", finalists, [plain, always, worse]) == (plain, "why")
    assert later(split, "why", [split, always], [split, always]) == (split, "why")


def test_rows_are_only_kept_apart_where_their_forwards_have_different_widths() -> None:
    both = replace(SHAPE, bucket=SHAPE.capacity, draft_from=24)
    plain = replace(both, method="plain", drafter="none")
    assert (both.alike, both.plain().alike, plain.alike) == (False, False, True)
    assert (both.slots, both.spare, plain.spare) == (SHAPE.window, 0, plain.slots - SHAPE.batch_size)


@pytest.mark.fast("free0")
@pytest.mark.parametrize("free", [FREE, ("draft_tokens",), ("method",), ("window", "bucket")])
def test_only_free_settings_change_and_no_token(free: tuple[str, ...]) -> None:
    target, draft = tiny.model(), tiny.model(seed=1)
    found = calibrate(target, draft, REQUESTS, SHAPE, free, seconds=1.0)
    settings = {"prefill": ("prefill_rows", "prefill_columns")}
    for name in FREE:
        if name not in free and (name, found.config.method) != ("drafter", "plain"):
            for setting in settings.get(name, (name,)):
                assert getattr(found.config, setting) == getattr(SHAPE, setting)
    assert any(c.config.drafts for c in found.candidates)
    assert any(not c.config.drafts for c in found.candidates) == ("method" in free)
    table = found.table()
    assert sum(row["chosen"] for row in table) == 1
    assert all(row["predicted"] > 0 for row in table)
    decoded = tiny.decode(Engine(target, draft if found.config.drafts else None, found.config), REQUESTS)
    assert decoded == tiny.greedy(target, tiny.prompts(12), 10)


def test_plain_decoding_stays_plain() -> None:
    config = replace(SHAPE, method="plain")
    found = calibrate(tiny.model(), None, REQUESTS, config, ("batch_size", "bucket"), seconds=0.5)
    assert not any(c.config.drafts for c in found.candidates)


def test_candidates_stay_within_the_memory_budget() -> None:
    target, draft = tiny.model(), tiny.model(seed=1)

    def planned(shape: EngineConfig) -> int:
        return plan_memory(target.config, draft.config, shape, torch.float32).total

    two = planned(replace(SHAPE, batch_size=2, window=2))
    smallest = planned(replace(SHAPE, method="plain", batch_size=1, window=1))
    with pytest.raises(ValueError, match=r"are too few for one sequence of 96 tokens; expected at least"):
        calibrate(target, draft, REQUESTS, SHAPE, seconds=0.5, budget=smallest - 1)
    found = calibrate(target, draft, REQUESTS, SHAPE, seconds=0.5, budget=two)
    assert found.candidates
    assert all(planned(c.config) <= two for c in found.candidates)


def test_the_memory_of_a_candidate_keeps_its_window_and_its_batch() -> None:
    target, draft = tiny.model(), tiny.model(seed=1)
    found = calibrate(target, draft, REQUESTS, SHAPE, seconds=0.5)
    for c in found.candidates:
        kept = fit(target.config, draft.config, c.config, torch.float32, c.memory)
        assert (kept.batch_size, kept.window) == (c.config.batch_size, c.config.window)
        assert c.memory <= plan_memory(target.config, draft.config, c.config, torch.float32).total


def test_a_sample_that_cannot_be_decoded_is_refused() -> None:
    with pytest.raises(ValueError, match="no request of the sample can be decoded; the first: request 'long'"):
        calibrate(tiny.model(), tiny.model(seed=1), [Request("long", [1] * 500)], SHAPE, seconds=0.5)


@pytest.mark.slow
def test_without_a_draft_the_suffix_drafter_is_tried() -> None:
    """Although the config names a drafter that is not available."""
    found = calibrate(tiny.model(), None, REQUESTS, SHAPE, seconds=1.0)
    assert {c.config.drafter for c in found.candidates if c.config.drafts} == {"suffix"}
    assert any(not c.config.drafts for c in found.candidates)


def test_speculation_without_a_drafter_is_refused() -> None:
    with pytest.raises(ValueError, match="calibration: no drafter is available for method exspec"):
        calibrate(tiny.model(), None, REQUESTS, SHAPE, ("batch_size",), seconds=0.5)


@pytest.mark.parametrize("count", [1, 2, 12])
def test_a_drafter_that_learns_is_measured_on_requests_it_has_not_seen(count: int) -> None:
    """With few requests, it has learned nothing."""
    made: dict[str, Engine] = {}

    def make(name: str) -> Engine:
        shape = replace(SHAPE, method="plain") if name == "none" else replace(SHAPE, drafter=name)
        made[name] = Engine(tiny.model(), None, shape)
        return made[name]

    rows = REQUESTS[:count]
    sample = probe({name: partial(make, name) for name in ("none", "suffix")}, rows, 60.0)
    drafter = made["suffix"].drafter
    assert isinstance(drafter, Suffix)
    learned = {tuple(kept.tolist()) for kept in drafter.tree.kept}
    known = {(*p[-CONTEXT:], *c) for p, c in sample.completed}
    assert learned == (known if count == 12 else set())
    assert sample.taken == (8 if count == 12 else 0)
    fed = Feed(Engine(tiny.model(), None, replace(SHAPE, drafter="suffix")), sample)
    fed.run(0.0)
    drafter = fed.engine.drafter
    assert isinstance(drafter, Suffix)
    assert len(drafter.tree.kept) == (8 if count == 12 else 0)
    others = [s.request.prompt for s in (*fed.engine.pool.running, *fed.engine.pool.waiting)]
    assert count != 12 or all(prompt not in [p for p, _ in sample.completed] for prompt in others)


def raced(drafted: int, *turns: float) -> Candidate:
    """A finalist, and its tokens/s by turn."""
    changes: dict[str, Any] = {"draft_tokens": drafted} if drafted else {"method": "plain", "drafter": "none"}
    return Candidate(replace(SHAPE, **changes), 1.0, list(turns))


PLAIN = raced(0, 100, 50, 100, 100)


@pytest.mark.parametrize(
    ("finalists", "chosen", "reason"),
    [
        ([raced(3, 120, 60, 115, 90), PLAIN], 3, "model, K=3 is 1.17 times as fast as plain (0.90 to 1.20 in 4 turns)"),
        ([raced(3, 120, 60, 90, 90), PLAIN], 0, "plain is 0.97 times as fast as model, K=3, within the spread of the"),
        ([raced(3, 90, 45, 90, 90), PLAIN], 0, "plain is 1.11 times as fast as model, K=3 (1.11 to 1.11 in 4 turns)"),
        ([raced(8, 121, 60, 119, 121), raced(3, 120, 60, 120, 120), PLAIN], 3, "model, K=3 is 1.20 times as fast as"),
        ([raced(8, 150, 70, 150, 150), raced(3, 120, 60, 120, 120), PLAIN], 8, "model, K=8 is 1.50 times as fast as"),
        ([raced(8, 150, 150), raced(3, 120, 60, 120, 120), PLAIN], 8, "model, K=8 is 2.25 times as fast as plain (1.5"),
        ([raced(3), PLAIN], 0, "plain is predicted to be the fastest; there was no time to compare it"),
        ([raced(3)], 3, "model, K=3 alone fits memory and time"),
    ],
)  # fmt: skip
def test_the_plainer_shape_is_taken_within_the_spread(finalists: list[Candidate], chosen: int, reason: str) -> None:
    found, why = decided(finalists)
    assert found.config.drafted == chosen
    assert why.startswith(reason)


def test_finalists_that_are_far_behind_leave_but_both_kinds_stay() -> None:
    finalists = [raced(3, 100), raced(5, 95), raced(8, 80), raced(0, 50)]
    kept = in_reach([(c, None) for c in finalists])  # type: ignore[misc]
    assert [c.config.drafted for c, _ in kept] == [3, 5, 0]


def test_requests_that_repeat_are_prefilled_again() -> None:
    sample = Sample(tiny.requests(tiny.prompts(6)[2:], 8), [(40, 8)])
    feed = Feed(Engine(tiny.model(), None, replace(SHAPE, method="plain")), sample)
    while feed.count < 30:
        feed.run(0.0)
    statistics = feed.engine.statistics
    assert statistics.prefill_tokens > 100
    assert statistics.cached_tokens == 0


def test_a_shape_that_is_not_compiled_in_time_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.need("in_place", "compiled")
    for share in ("PREDICTED", "WARM"):
        monkeypatch.setattr(calibration, share, -1.0)
    monkeypatch.setattr(programs.CODE, "kept", {})
    config = replace(SHAPE, kernels="compiled", attention="auto")
    found = calibrate(tiny.model(), tiny.model(seed=1), REQUESTS, config, ("method",), seconds=3.0)
    assert found.config.kernels == "compiled"
    assert all(c.measured is None for c in found.candidates)
    assert found.reason.endswith("there was no time to compare it")


@pytest.mark.parametrize(("compiled", "kernels"), [(150.0, "compiled"), (90.0, "eager")])
def test_a_drafter_that_is_not_compiled_in_time_does_not_slow_the_others(
    monkeypatch: pytest.MonkeyPatch, compiled: float, kernels: str
) -> None:
    tiny.need("in_place", "compiled")

    speeds = {("eager", "none"): 100.0, ("eager", "model"): 80.0, ("compiled", "none"): compiled}

    def predicted(_: Calibrator, shapes: list[EngineConfig], *__: Any) -> list[Candidate]:
        return [Candidate(s, speeds[s.kernels, s.drafter]) for s in shapes if (s.kernels, s.drafter) in speeds]

    monkeypatch.setattr(Calibrator, "_predicted", predicted)
    monkeypatch.setattr(Trials, "choose", lambda _, shape, __: shape)
    monkeypatch.setattr(Trials, "compiled", lambda _, best: replace(best, kernels="compiled"))
    models, config = Models(tiny.model(), tiny.model(seed=1), None), replace(SHAPE, attention="auto")
    calibrator = Calibrator(models, config, ("method", "kernels"), 120.0, Engine, None, 96)
    found, _ = calibrator.predict(Sample(REQUESTS), 50)
    assert found[0].config.kernels == calibrator.config.kernels == kernels
