"""The drafter of a job may change from run to run, and no row changes with it."""

from pathlib import Path
from typing import Any

import pytest

from exspec.actors.engine.drafters.lookup import label
from exspec.pipeline.errors import JobError
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests import tiny
from tests.actors.engine.drafters import test_dflash
from tests.actors.engine.drafters.test_eagle3 import as_published
from tests.pipeline import jobs

LAYERS = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, a draft model and heads for it."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny.deep(LAYERS, 0.3)
    target.config.max_position_embeddings = 64
    target.save_pretrained(folder / "target")
    tiny.model(seed=1, max_position_embeddings=64).save_pretrained(folder / "draft")
    for name in ("target", "draft"):
        jobs.tokenizer().save_pretrained(folder / name)
    as_published(tiny.head(target), folder / "authors", "authors")
    as_published(tiny.head(target, embeds=True), folder / "speculators", "speculators")
    test_dflash.as_published(tiny.dflash(target), folder / "dflash", "speculators")
    tiny.clover(target).save_pretrained(folder / "clover")
    tiny.clover(target, hidden_size=64).save_pretrained(folder / "wide")
    as_published(tiny.head(tiny.deep(LAYERS), vocab_size=62), folder / "foreign", "authors")
    return {path.name: str(path) for path in folder.iterdir()}


def test_the_drafter_may_change_between_the_runs_of_a_job(models: dict[str, str], source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs: list[tuple[int, str | None, dict[str, Any], str]] = [
        (15, "draft", {}, "model"),
        (30, "authors", {}, "eagle3"),
        (40, "speculators", {"drafter": "eagle3"}, "eagle3"),
        (45, "clover", {}, "clover"),
        (47, "dflash", {}, "dflash"),
        (50, None, {"drafter": "early_exit", "exit_depth": 1, "check_depth": 3, "exit_tokens": 1}, "early_exit 1/3/1"),
        (55, None, {"drafter": "sparse", "draft_window": 33}, "sparse 33"),
        (60, None, {"drafter": "none", "method": "plain"}, "none"),
    ]
    for limit, draft, settings, name in runs:
        given = (models["target"], models[draft] if draft else None)
        job = jobs.job(given, source, out, limit=limit, **settings)  # type: ignore[arg-type]
        prepared = prepare(job)
        assert label(prepared.shape.config) == name
        assert execute(prepared) == 0
    completions = {name: row["completion"] for name, row in jobs.read_output(out).items()}
    assert completions == {str(n): jobs.generated(models["target"], n) for n in range(60)}
    assert jobs.report(out)["rows"] == 60


@pytest.mark.parametrize(
    ("draft", "settings", "message"),
    [
        ("foreign", {}, "draft .*foreign: the head is for a vocabulary of 62 and hidden states of 32, but the target"),
        ("wide", {}, "draft .*wide: the head is for a vocabulary of 61 and hidden states of 64, but .* has 61 and 32$"),
        ("authors", {"drafter": "clover"}, "drafter clover: it needs a head of Clover as its draft"),
        (
            "clover",
            {"drafter": "clover", "method": "eqspec"},
            "drafter clover: method eqspec moves the KV, but not the features of the head",
        ),
        ("dflash", {"drafter": "eagle3"}, "drafter eagle3: it needs a head of EAGLE-3 as its draft"),
        ("authors", {"drafter": "model"}, "drafter model: the draft is a head for eagle3"),
        ("draft", {"drafter": "clover"}, "drafter clover: it needs a head of Clover as its draft"),
        ("draft", {"drafter": "eagle3"}, "drafter eagle3: it needs a head of EAGLE-3 as its draft"),
        (None, {"drafter": "early_exit", "exit_depth": 3, "check_depth": 2}, "drafter early_exit: it leaves at"),
        (None, {"drafter": "early_exit", "method": "eqspec"}, "drafter early_exit: method eqspec moves the KV"),
        (None, {"drafter": "sparse", "method": "eqspec"}, "drafter sparse: method eqspec moves the KV"),
        (None, {"drafter": "sparse"}, "drafter sparse: it reads 256 tokens, but the capacity is 64; set draft_window"),
        ("draft", {"draft_window": 16}, r"draft_window: expected at least a page \(32 tokens\), not 16"),
    ],
)
def test_what_cannot_draft_is_refused_before_anything_is_loaded(
    models: dict[str, str], source: Path, tmp_path: Path, draft: str | None, settings: dict[str, Any], message: str
) -> None:
    given = (models["target"], models[draft] if draft else None)
    with pytest.raises(JobError, match=message):
        prepare(jobs.job(given, source, tmp_path / "out", **settings))  # type: ignore[arg-type]


def test_a_head_drafts_no_more_than_it_was_trained_for(models: dict[str, str], source: Path, tmp_path: Path) -> None:
    """Unless the job says so: the other columns of a round would be unused."""
    for draft, asked, drafted in (
        ("clover", "auto", 3),
        ("dflash", "auto", 5),
        ("authors", "auto", 5),
        ("clover", 4, 4),
    ):
        job = jobs.job((models["target"], models[draft]), source, tmp_path / "out", draft_tokens=asked)
        assert prepare(job).shape.config.draft_tokens == drafted
