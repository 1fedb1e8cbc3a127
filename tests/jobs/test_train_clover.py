"""Training a head of Clover on the rows of a finished job."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer import Typer
from typer.testing import CliRunner

from exspec.actors.engine import Request, SequenceStatistics
from exspec.actors.models import load_pair
from exspec.jobs.training import clover as train_clover
from exspec.jobs.training.clover import LastHidden, losses, new_head, train, training_examples
from exspec.jobs.training.examples import batches
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.kinds import stored_job
from exspec.pipeline.output.owner import read_output
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from exspec.pipeline.storage import Folder
from tests import tiny
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process

ROWS = 40


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A target, and the output of a job of its."""
    place = tmp_path_factory.mktemp("done")
    target = tiny.deep(4, 0.3)
    target.config.max_position_embeddings = 64
    target.config.eos_token_id = target.generation_config.eos_token_id = tiny.ENDS[0]  # type: ignore[union-attr]
    target.save_pretrained(place / "target")
    jobs.tokenizer().save_pretrained(place / "target")
    jobs.write_shards(place / "in", rows=ROWS)
    given: Any = (str(place / "target"), None)
    with in_process():
        assert execute(prepare(jobs.job(given, place / "in", place / "out", method="plain"))) == 0
    return given[0], place / "out"


def test_what_is_learned_are_the_tokens_of_the_target(done: tuple[str, Path]) -> None:
    name, out = done
    output, pair = read_output(Folder(str(out), {})), load_pair(name, None)
    job = stored_job(output.state.description, {})
    expected = [(jobs.prompt(n), tiny.generate(pair.target, jobs.prompt(n), jobs.budget(n))) for n in range(ROWS)]
    assert sorted(training_examples(job, output, pair, ROWS)) == sorted(expected)
    assert any(tokens[-1] == tiny.ENDS[0] for _, tokens in expected), "the end is learned too"
    pair.target.generation_config.eos_token_id = list(tiny.ENDS)  # which of them it was is not written
    cut = [
        (prompt, tokens[: tokens.index(tiny.ENDS[0])] if tiny.ENDS[0] in tokens else tokens)
        for prompt, tokens in expected
    ]
    assert sorted(training_examples(job, output, pair, ROWS)) == sorted(
        (prompt, tokens) for prompt, tokens in cut if tokens
    )


def test_batches_hold_every_token_once_under_its_own() -> None:
    rows = [([1] * (1 + n % 7), list(range(10 + n, 13 + n + n % 5))) for n in range(300)]
    learned = []
    for ids, labels in batches(rows, tiny.random.Random(0)):
        assert ids.shape == labels.shape
        for row, told in zip(ids.tolist(), labels.tolist(), strict=True):
            tokens = [token for token in told if token != -100]
            first = told.index(tokens[0])
            assert row[: first + len(tokens)] == [1] * (first + 1) + tokens[:-1], "each under the token before it"
            learned.append(([1] * (first + 1), tokens))
    assert sorted(learned) == sorted(rows)


def accepted(target: Any, head: Any) -> float:
    """Share of accepted tokens over the job's rows."""
    engine = tiny.engine(target, draft=head, drafter="clover", draft_tokens=3)
    for n in range(ROWS):
        engine.submit(Request(n, jobs.prompt(n), jobs.budget(n)))
    return sum((c.statistics for c in engine.run()), start=SequenceStatistics()).acceptance_rate


def test_a_trained_head_is_a_draft_and_drafts_what_it_has_learned(done: tuple[str, Path], tmp_path: Path) -> None:
    name, out = done
    train_clover.main(str(out), tmp_path / "head", heads=3, rows=ROWS, minutes=100, steps=150, device="cpu")
    pair = load_pair(name, str(tmp_path / "head"))
    assert accepted(pair.target, new_head(pair.target, 3).eval()) < 0.2
    assert accepted(pair.target, pair.draft) > 0.8, "nearly all of what it knows by heart"


def test_the_target_stays_as_it_is(done: tuple[str, Path]) -> None:
    target = AutoModelForCausalLM.from_pretrained(done[0])
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    train(target, [([1, 2, 3], [4, 5, 6, 7])], heads=2, minutes=100, steps=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    assert not any(module._forward_hooks for module in target.modules())


def test_every_head_learns_every_token_that_it_will_have_to_say() -> None:
    """But for those too near the beginning; the last of the longest row too."""
    target = tiny.deep(4, 0.3)
    head = new_head(target, 3)
    said: list[int] = []
    step = head.step

    def noted(number: int, hidden: torch.Tensor, embedding: torch.Tensor) -> Any:
        said.append(hidden.shape[1])
        return step(number, hidden, embedding)

    head.step = noted  # type: ignore[method-assign]
    ids, labels = next(batches([([1, 2], [3, 4, 5, 6])], tiny.random.Random(0)))
    assert len(losses(head, target, LastHidden(target), ids, labels)) == 3
    assert said == [4, 3, 2], "of the five places, each head has those that its token is behind"
    ids, labels = next(batches([([1], [3])], tiny.random.Random(0)))
    assert losses(head, target, LastHidden(target), ids, labels) == [], "nothing is behind"


@pytest.mark.parametrize(("rows", "heads", "told"), [([([1], [2, 3])], 2, "--heads 2: no row has at least 4 tokens")])
def test_heads_that_no_row_can_teach_are_refused(rows: Any, heads: int, told: str) -> None:
    with pytest.raises(JobError, match=told):
        train(tiny.deep(4), rows, heads, minutes=100, steps=2)


def test_ends_that_the_text_does_not_tell_are_not_learned(done: tuple[str, Path]) -> None:
    """A stop string, or an end token of the row's own, may stand where the model's would."""
    pair = load_pair(done[0], None)
    assert train_clover._end(Request(0, [1]), pair) == [tiny.ENDS[0]]
    for other in ({"stop": lambda: None}, {"ignore_end": True}, {"end_ids": frozenset([7])}):
        assert train_clover._end(Request(0, [1], **other), pair) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [["--device", "cuda"], ["--minutes", "0"], []])
def test_what_cannot_be_is_said_before_any_training(done: tuple[str, Path], tmp_path: Path, words: list[str]) -> None:
    if words == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    (tmp_path / "head").mkdir()
    if not words:
        (tmp_path / "head" / "config.json").write_text("{}")
    app = Typer()
    app.command()(train_clover.main)
    found = CliRunner().invoke(app, [str(done[1]), str(tmp_path / "head"), *words])
    assert found.exit_code == 2
    assert "Traceback" not in found.stderr
    assert (words[0] if words else "holds something") in found.stderr


def test_an_output_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "exspec.jobs.training.clover", str(tmp_path / "nothing"), str(tmp_path / "head")]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
    assert str(tmp_path / "nothing") in found.stderr
    assert not (tmp_path / "head").exists()
