"""Scaling laws of drafters, and what they say that a job should train."""

import json
from dataclasses import replace
from math import log10
from pathlib import Path
from typing import Any

import pytest

from exspec.actors.engine import EngineConfig
from exspec.actors.engine.engine import Engine
from exspec.actors.engine.shape.plan import Models
from exspec.jobs.training import scale
from exspec.jobs.training.choice import PLAIN, Choices
from exspec.jobs.training.law import Fit
from exspec.jobs.training.prospect import Rounds, side_by_side
from exspec.jobs.training.run import MADE, Training
from exspec.jobs.training.scale import Measured, Timed, fits, halves
from exspec.jobs.training.unfinished import WORK
from exspec.pipeline.errors import JobError
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.jobs.calls import call, succeed
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process

SECONDS = 1e-3  # of training, per token
ROW = 50  # tokens


def survival(length: float, drafts: int) -> tuple[float, ...]:
    """Of drafts with this accept length."""
    return (((length - 1) / drafts),) * drafts


def measured(a: float, b: float, c: float) -> list[Measured]:
    """Drafters that obey a law."""
    return [
        Measured("model", layers, tokens, SECONDS * tokens, survival(a + b * log10(tokens) + c * log10(layers), 4), 1.0)
        for layers in (1, 2, 4)
        for tokens in (1_000, 10_000, 100_000)
    ]


def timed(draft: float, verify: float = 0.01, plain: float = 0.01) -> list[Timed]:
    """Rounds of 1 and 8 rows that take as long; a draft's tokens and layers take time."""
    return [
        Timed("model", layers, rows, drafts, rounds(0.0, plain, rows), rounds(draft * drafts * layers, verify, rows))
        for layers in (1, 2, 4)
        for rows in (1, 8)
        for drafts in halves(4)
    ]


def rounds(draft: float, verify: float, rows: int) -> Rounds:
    made = Rounds(0.0, 0.0, draft, verify, 0.0, rows)
    return replace(made, speed=made.at(1.0))


def choices(lengths: tuple[float, float, float], draft: float, verify: float = 0.01) -> Choices:
    found = measured(*lengths)
    return Choices(fits(found), found, timed(draft, verify), ROW)


def test_the_laws_of_drafters_are_found_again() -> None:
    for (_, drafts), law in fits(measured(-1.0, 0.8, 0.5)).items():
        share = drafts / 4
        assert law.values == pytest.approx((1 + share * -2.0, share * 0.8, share * 0.5))
        assert law.r2 == pytest.approx(1.0)
        assert max(map(abs, law.errors)) < 1e-6


def test_a_law_is_judged_by_points_that_it_has_not_seen() -> None:
    """The error of a point is that of a fit to all others."""
    points = measured(-1.0, 0.8, 0.5)
    points[4] = replace(points[4], survival=survival(3.5, 4))
    laws: Fit = fits(points)["model", 4]
    others = fits(points[:4] + points[5:])["model", 4]
    expected, _ = others.at(points[4].tokens, points[4].layers)
    assert laws.errors[4] == pytest.approx(expected / 3.5 - 1)
    assert laws.r2 < 0.9


def test_a_job_trains_what_makes_it_shortest() -> None:
    """Written out: every drafter and number of tokens by the law, and the seconds by T1.3."""
    law, found = (-1.0, 0.8, 0.5), choices((-1.0, 0.8, 0.5), 1e-3)
    choice = found.of(30_000)
    begun = 30_000 * ROW / (8 / 0.01)
    assert choice.plain_seconds == pytest.approx(begun)
    best = min(
        SECONDS * tokens + begun * (0.001 * drafts * layers + 0.01) / 0.01 / length
        for tokens in found.tokens
        for layers in (1, 2, 4)
        for drafts in (4, 2, 1)
        for length in [1 + drafts / 4 * min(max(law[0] - 1 + law[1] * log10(tokens) + law[2] * log10(layers), 0), 4)]
    )
    assert choice.seconds == pytest.approx(best)
    spent = 0.001 * choice.draft_tokens * choice.layers + 0.01
    assert choice.ratio == pytest.approx(spent / (choice.accept_length * 0.01))
    assert choice.batch_size == 8
    assert not choice.outside


def test_small_jobs_stay_plain() -> None:
    found = choices((-1.0, 0.8, 0.5), 1e-3)
    first = found.pays_from
    assert first is not None
    assert found.of(first - 1).drafter == PLAIN
    assert found.of(first + 1).drafter == "model"


@pytest.mark.parametrize(("lengths", "draft", "verify"), [((1.0, 0.0, 0.0), 1e-4, 0.01), ((-1.0, 0.8, 0.5), 1e-4, 0.1)])
def test_a_useless_drafter_is_not_trained(lengths: tuple[float, float, float], draft: float, verify: float) -> None:
    """One that is never right, and one whose tokens cost too much to verify."""
    found = choices(lengths, draft, verify)
    assert found.of(10**9).drafter == PLAIN
    assert found.pays_from is None


def test_what_was_not_measured_is_named() -> None:
    choice = choices((-3.0, 0.9, 0.0), 1e-4).of(10**8)
    assert choice.training_tokens > 100_000
    assert choice.outside == (f"{choice.training_tokens:,} training tokens: 1,000 to 100,000 were measured",)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a job whose target drafters can learn."""
    place = tmp_path_factory.mktemp("scale")
    jobs.write_shards(place / "in", rows=60)
    with in_process():
        given = jobs.save_deep(place / "target")
        drafting = {"drafter": "suffix", "draft_from": 8}
        assert execute(prepare(jobs.job(given, place / "in", place / "out", **drafting))) == 0
    return place / "out"


SMALL = ("--layers", "1,2", "--tokens", "200,600", "--batch-sizes", "2", "--seconds", "0.01", "--draft-tokens", "3")


def test_scale(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters are trained, measured and timed, and can be used. The job began to draft at 8 tokens; no time is of such
    rounds. The choice is made from times that are given, for those of this machine are not known."""
    shapes: list[EngineConfig] = []

    def noted(target: Any, sample: Any, given: Any) -> Any:
        shapes.extend(config for config, _ in given)
        return side_by_side(target, sample, given)

    def slow(*given: Any) -> Timed:
        return Timed(*given[:4], rounds(0.0, 0.01, given[2]), rounds(0.0, 1.0, given[2]))

    monkeypatch.setattr(scale, "side_by_side", noted)
    monkeypatch.setattr(scale, "Timed", slow)
    printed = succeed("scale", done, tmp_path / "laws", *SMALL, "--drafters", "model,dflash")
    figures = json.loads(printed.splitlines()[-1])
    assert [(f["drafter"], f["draft_tokens"]) for f in figures["fits"]] == [
        ("model", 3), ("model", 1), ("dflash", 3), ("dflash", 1),
    ]  # fmt: skip
    assert figures["choice"]["rows"] == 60
    assert figures["choice"]["drafter"] == PLAIN
    assert not any(shape.draft_from for shape in shapes)
    whole = json.loads((tmp_path / "laws" / "scale.json").read_text())
    assert len(whole["drafters"]) == 8
    assert {(t["drafter"], t["layers"], t["draft_tokens"]) for t in whole["times"]} == {
        (drafter, layers, drafts) for drafter in ("model", "dflash") for layers in (1, 2) for drafts in (3, 1)
    }
    page = (tmp_path / "laws" / "scale.html").read_text()
    assert page.count("<svg") == 4
    assert len(list((tmp_path / "laws").glob("*/config.json"))) == 8
    assert not (tmp_path / "laws" / WORK).exists()


def test_scale_goes_on(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that was trained is not trained again."""
    begin, folder = Engine.__init__, tmp_path / "laws"

    def full(engine: Engine, *given: Any, **options: Any) -> None:
        if len(list(folder.glob(f"{WORK}/*/measured.json"))) == 2:
            raise OSError("No space left on device")
        begin(engine, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "__init__", full)
        with pytest.raises(OSError, match="No space left"):
            call("scale", done, folder, *SMALL)
    with pytest.raises(JobError, match=r"holds an unfinished training with tokens '200,600', not '200,900'"):
        call("scale", done, folder, *("200,900" if word == "200,600" else word for word in SMALL))
    run, trained = Training.run, list[str]()
    moved = Path.replace

    def noted(training: Training, *given: Any) -> bool:
        trained.append(training.work.name)
        return run(training, *given)

    def stopped(path: Path, to: Path) -> Path:
        if path.name == MADE and len(list(folder.glob("*/config.json"))) == 2:
            raise KeyboardInterrupt
        return moved(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "run", noted)
        patch.setattr(Path, "replace", stopped)
        assert call("scale", done, folder, *SMALL).exit_code == 130
    assert len(trained) == 2
    succeed("scale", done, folder, *SMALL)
    assert len(json.loads((folder / "scale.json").read_text())["drafters"]) == 4
    assert len(list(folder.glob("*/config.json"))) == 4
    with pytest.raises(JobError, match="holds something; expected an empty or a new folder"):
        call("scale", done, folder, *SMALL)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--drafters", "clover"), "--drafters: expected some of model, dflash, not 'clover'"),
        (("--layers", "0,1"), "--layers: expected positive numbers, not '0,1'"),
        (("--tokens", "many"), "--tokens: expected numbers with commas between them, not 'many'"),
        (("--tokens", "100"), "--layers and --tokens: expected at least two numbers of tokens and four drafters"),
        (("--drafters", "model,dflash", "--layers", "1,9"), "a draft model of 9 layers cannot be made"),
        (("--layers", "9"), "a draft model of 9 layers cannot be made from the 5 layers of the target"),
        (("--tokens", "200,210"), "--tokens: a step learns .* tokens; expected numbers that are that far apart"),
    ],
)
def test_refusals_of_scale(words: tuple[str, ...], message: str, done: Path, tmp_path: Path) -> None:
    with pytest.raises((JobError, ValueError, SystemExit), match=message):
        call("scale", done, tmp_path / "laws", *words)
    assert not (tmp_path / "laws").exists()


def test_a_batch_must_fit_before_anything_is_trained(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Models, "rows", lambda *_: 1)
    with pytest.raises(JobError, match="--batch-sizes: a batch of 2 rows does not fit into memory"):
        call("scale", done, tmp_path / "laws", *SMALL)
    assert not (tmp_path / "laws").exists()
