"""Training a drafter on the rows of a job."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from exspec.actors.engine import Request
from exspec.actors.models import load_pair
from exspec.jobs import cli
from exspec.jobs.finished import FinishedRow
from exspec.jobs.training import examples as lessons
from exspec.jobs.training import run as training
from exspec.jobs.training import trainer
from exspec.jobs.training.examples import Example, Lessons, TargetStates, batched, example_of, padded
from exspec.jobs.training.settings import TrainSettings
from exspec.jobs.training.texts import AT_ONCE, write_texts
from exspec.jobs.training.trainer import Trainer
from exspec.jobs.training.unfinished import asked_of
from exspec.pipeline.errors import JobError
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests import tiny
from tests.actors.engine.learners.test_learners import TRAINED, new, taught, texts
from tests.jobs.calls import MAIN, call, succeed
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process

ROWS = 60
HELD = 40  # the first row of the last shard
STEPS = {"dflash": 200, "eagle3": 300, "clover": 250}  # until a drafter knows the rows; 100 for a draft model
every = pytest.mark.parametrize("drafter", TRAINED)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A target, and the output of a job of its."""
    place = tmp_path_factory.mktemp("done")
    given = jobs.save_deep(place / "target")
    jobs.write_shards(place / "in", rows=ROWS)
    with in_process():
        assert execute(prepare(jobs.job(given, place / "in", place / "out", method="plain"))) == 0
    return given[0], place / "out"


def learnable(first: int, end: int, target: Any, drafts: int = 3) -> list[Any]:
    """Prompts and completions of rows that are long enough to be learned."""
    rows = [(jobs.prompt(n), tiny.generate(target, jobs.prompt(n), jobs.budget(n))) for n in range(first, end)]
    return [(p, c) for p, c in rows if len(c) > 1 and len(p) + len(c) >= drafts + 3]


def train(*words: object) -> dict[str, Any]:
    """Run the command. Returns what it prints at last."""
    found: dict[str, Any] = json.loads(succeed("train", *words).splitlines()[-1])
    return found


def refusal(*words: object) -> str:
    """What a command that is refused says in its one sentence."""
    with pytest.raises((JobError, ValueError, OSError)) as error:
        call("train", *words)
    problems = cli._problems(error.value)
    assert problems is not None
    assert len(problems) == 1
    return problems[0]


@every
def test_a_trained_drafter_is_a_draft_of_its_target(
    drafter: str, done: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has random weights, so a drafter can only learn rows by heart."""
    monkeypatch.setattr(training, "WRITTEN", 0)
    folder = tmp_path / "made"
    printed = train(done[1], folder, "--drafter", drafter, "--draft-tokens", 3, "--steps", STEPS.get(drafter, 100))
    assert printed["drafter"] == drafter
    assert printed["draft_tokens"] == 3
    target = load_pair(done[0], None).target
    assert printed["rows"] == len(learnable(0, HELD, target)), "one of three shards is held out"
    assert 1 <= printed["accept_length"] < 4
    assert not (folder / "_training").exists()
    assert (folder / "training.html").read_text().count("<svg") == 3
    pair = load_pair(done[0], str(folder))
    assert pair.draft is not None
    assert getattr(pair.draft.config, "head_for", "model") == drafter
    rows = [Request(i, p, len(c)) for i, (p, c) in enumerate(learnable(0, HELD, target))]
    statistics = training.measure(pair, [r for r in rows if r.max_new_tokens > 4], drafter, 3)
    assert statistics.acceptance_rate > 0.25, "it has learned these; of random tokens it would be 0.02"


def test_what_is_learned_are_the_tokens_of_the_target(done: tuple[str, Path]) -> None:
    settings = TrainSettings(draft_tokens=3)
    of = training.Training(str(done[1]), {}, settings, Path())
    job, pair = of.load()
    rows = of.rows(job, pair)
    assert sorted(rows.learned) == sorted(learnable(0, HELD, pair.target))
    assert any(tokens[-1] == tiny.ENDS[0] for _, tokens in rows.learned), "the end is learned too"
    assert sorted(row for _, row in rows.held) == sorted(learnable(HELD, ROWS, pair.target))
    assert all(list(request.prompt) == prompt for request, (prompt, _) in rows.held)
    pair.target.generation_config.eos_token_id = list(tiny.ENDS)  # which of them it was is not written
    again = of.rows(job, pair)
    assert not any(tiny.ENDS[0] in tokens for _, tokens in again.learned)


def test_texts_that_the_target_writes_are_learned_beside_the_rows(
    done: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[list[Example]] = []

    def lessons_of(examples: list[Example], *rest: Any) -> Lessons:
        learned.append(examples)
        return Lessons(examples, *rest)

    monkeypatch.setattr(training, "Lessons", lessons_of)
    train(done[1], tmp_path / "made", "--drafter", "clover", "--steps", 3)
    rows = [[*prompt, *completion] for prompt, completion in learned[0] if completion]
    texts = [text for text, completion in learned[0] if not completion]
    assert len(rows) == len(learnable(0, HELD, load_pair(done[0], None).target))
    longest, known = max(map(len, rows)), sum(map(len, rows))
    assert training.WRITTEN * known < sum(map(len, texts)) < 2 * training.WRITTEN * known + AT_ONCE * longest
    assert max(map(len, texts)) <= longest
    assert min(map(len, texts)) >= 6, "long enough for a draft of three tokens"
    shared = [max(n for n in range(longest + 1) for row in rows if text[:n] == row[:n]) for text in texts]
    assert min(shared) >= 1, "each goes on from a row"
    assert sum(shared) < 0.8 * sum(map(len, texts)), "and is another text"
    assert all(row for _, row in learned[1]), "only rows are held out"


def test_a_training_of_a_moment_has_a_step(done: tuple[str, Path], tmp_path: Path) -> None:
    assert train(done[1], tmp_path / "made", "--drafter", "clover", "--minutes", 0.001)["accept_length"] >= 1


def test_texts_are_written_no_longer_than_asked() -> None:
    target = tiny.deep(4)
    rows = texts(target, 12)
    assert write_texts(target, rows, 0, 1000.0) == []
    assert write_texts(target, rows, 1000, 0.0) == []
    found = write_texts(target, rows, 1000, 1000.0)
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    assert 1000 <= sum(map(len, found)) <= 1000 + 2 * AT_ONCE * longest
    assert found == write_texts(target, rows, 1000, 1000.0)


def test_ends_that_the_text_does_not_tell_are_not_learned(done: tuple[str, Path]) -> None:
    """A stop string, or an end token of the row's own, may stand where the model's would."""
    pair = load_pair(done[0], None)
    assert lessons._end(Request(0, [1]), pair) == [tiny.ENDS[0]]
    for other in ({"stop": lambda: None}, {"ignore_end": True}, {"end_ids": frozenset([7])}):
        assert lessons._end(Request(0, [1], **other), pair) == []  # type: ignore[arg-type]
    assert example_of(FinishedRow("s", 0, "0", None, None, {}, None), pair) is None


def test_batches_hold_every_token_once() -> None:
    rows = [([1] * (1 + n % 7), list(range(10 + n, 13 + n + n % 5))) for n in range(300)]
    learned = []
    for batch in batched(rows):
        tokens, text, own = padded(batch)
        assert tokens.shape == text.shape == own.shape
        for (prompt, completion), row, all_of_it, mine in zip(batch, tokens.tolist(), text, own, strict=True):
            assert tokens[0].new_tensor(row)[all_of_it].tolist() == [*prompt, *completion]
            assert tokens[0].new_tensor(row)[mine].tolist() == completion
            learned.append((prompt, completion))
    assert sorted(learned) == sorted(rows)


def test_states_are_kept_up_to_the_budget_and_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons, "TOKENS_PER_STEP", 64)
    target = tiny.deep(4)
    rows = texts(target, 12)
    size = max(sum(map(len, row)) for row in rows)

    def epoch(budget: int) -> list[torch.Tensor]:
        made = Lessons(rows, TargetStates(target, (1, 3), size), tmp_path / str(budget), budget, "cpu")
        return [made.at(step).states for step in range(2 * len(made.batches))]

    every, none, some = epoch(10**9), epoch(0), epoch(20_000)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(every, none, some, strict=True))
    kept = [sum(f.stat().st_size for f in (tmp_path / str(n)).iterdir()) for n in (10**9, 0, 20_000)]
    assert kept[1] == 0 < kept[2] <= 20_000 < kept[0]


@every
def test_a_training_that_was_killed_ends_as_one_that_was_not(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "EVERY", 0.0)
    target = tiny.deep(5, 0.3)
    rows = texts(target, 8)

    def training_of(file: Path | None) -> Trainer:
        learner = new(target, drafter)
        batches = Lessons(rows, TargetStates(target, learner.layers, 64), tmp_path / "states", 0, "cpu")
        return Trainer(learner, lambda step, _: batches.at(step), 1000, 12, file)

    def killed(_: str) -> None:
        raise KeyboardInterrupt

    whole = training_of(None)
    whole.run(lambda _: None)
    first = training_of(tmp_path / "checkpoint.pt")
    monkeypatch.setattr(trainer, "SHOWN", 5)  # at its first line it is killed, before it has saved that step
    with pytest.raises(KeyboardInterrupt):
        first.run(killed)
    monkeypatch.setattr(trainer, "SHOWN", 25)
    resumed = training_of(tmp_path / "checkpoint.pt")
    assert resumed.step == 4
    resumed.run(lambda _: None)
    weights = resumed.learner.model.state_dict()
    assert all(torch.equal(t, weights[name]) for name, t in whole.learner.model.state_dict().items())


def test_a_command_that_was_killed_goes_on(
    done: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its checkpoint and its texts, and another training may not take the folder."""
    folder, work = tmp_path / "made", tmp_path / "made" / "_training"
    words = ["train", str(done[1]), str(folder), "--drafter", "clover", "--steps", "60"]
    code = f"from exspec.jobs.training import trainer; trainer.EVERY = 0.0; {MAIN}"
    first = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (work / "checkpoint.pt").exists():
        assert first.poll() is None
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not (folder / "config.json").exists()
    other = refusal(*words[1:3], "--drafter", "eagle3", "--steps", "60")
    assert "holds an unfinished training with drafter 'clover', not 'eagle3'" in other
    monkeypatch.delattr(training, "write_texts")
    assert train(*words[1:])["drafter"] == "clover"
    assert (folder / "model.safetensors").exists()


def test_bad_input_is_one_sentence_and_writes_nothing(done: tuple[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert f"{tmp_path / 'nothing'}" in refusal(tmp_path / "nothing", folder)
    assert "expected at least 16" in refusal(done[1], folder, "--rows", 3)
    assert "and 903 to 3,072 tokens with the prompt" in refusal(done[1], folder, "--draft-tokens", 900)
    assert "a head of Clover has one layer, not 2" in refusal(done[1], folder, "--drafter", "clover", "--layers", 2)
    assert "expected --regenerate" in refusal(done[1], folder, "--target", done[0])
    assert "nowhere" in refusal(done[1].parent / "in", folder, "--regenerate", "--target", tmp_path / "nowhere")
    assert "made from the 5 layers" in refusal(done[1], folder, "--drafter", "model", "--layers", 9)
    other = tiny.deep(4)
    other.save_pretrained(tmp_path / "draft")
    words = jobs.tokenizer()
    words.add_tokens(["more"])
    words.save_pretrained(tmp_path / "draft")
    told = refusal(done[1], folder, "--drafter", "model", "--draft", tmp_path / "draft")
    assert "different vocabularies" in told
    taught(tiny.deep(4, 0.3), "dflash", texts(tiny.deep(4, 0.3), 4), 1).save(tmp_path / "head", torch.float32)
    told = refusal(done[1], folder, "--drafter", "dflash", "--draft", tmp_path / "head")
    assert "the head is for a target of 4 layers, but the target has 5" in told
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {"mask_token_id": 61}))
    told = refusal(done[1], folder, "--drafter", "dflash", "--draft", tmp_path / "head")
    assert "mask_token_id is 61; expected one of the 61 tokens" in told
    jobs.tokenizer().save_pretrained(tmp_path / "draft")
    told = refusal(done[1], folder, "--drafter", "eagle3", "--draft", tmp_path / "draft")
    assert "is a draft for model, not eagle3" in told
    assert not folder.exists()
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert "holds something; expected an empty or a new folder" in refusal(done[1], folder)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_full_disk_is_one_sentence_and_leaves_no_half_of_a_drafter(
    checkpoints: bool, done: tuple[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        f"from exspec.jobs.training import trainer; trainer.EVERY = {0.0 if checkpoints else 1e9}; {MAIN}"
    )
    words = ["train", str(done[1]), str(folder), "--drafter", "clover", "--steps", "2"]
    found = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    said = [line for line in found.stderr.splitlines() if line.startswith("exspec: ")]
    assert len(said) == 1
    assert str(folder) in said[0]
    assert [file.name for file in folder.iterdir()] == ["_training"]


def test_messages_that_nobody_has_answered_are_answered_first(done: tuple[str, Path], tmp_path: Path) -> None:
    with in_process():
        words = ("--regenerate", "--target", done[0], "--drafter", "clover", "--steps", 2, "--max-new-tokens", 9)
        assert train(done[1].parent / "in", tmp_path / "made", *words)["rows"] > 0
    assert not (tmp_path / "made" / "_training").exists()


def test_rows_that_the_job_has_written_since_are_of_another_training(done: tuple[str, Path], tmp_path: Path) -> None:
    folder, work = tmp_path / "made", tmp_path / "made" / "_training"
    words = [done[1], folder, "--drafter", "clover", "--steps", 2]
    asked = {"output": str(done[1])} | asdict(TrainSettings(drafter="clover", steps=2))
    work.mkdir(parents=True)
    (work / "asked.json").write_text(json.dumps(asked | {"learned": "others"}))
    assert "its training began with other rows of the job" in refusal(*words)
    (work / "asked.json").unlink()
    with FileLock(work / "lock"):
        assert "another command trains into this folder" in refusal(*words)
    assert train(*words)["drafter"] == "clover"


def test_a_command_that_was_killed_at_its_very_end_tells_what_it_made(done: tuple[str, Path], tmp_path: Path) -> None:
    words = [done[1], tmp_path / "made", "--drafter", "clover", "--steps", 2]
    figures = train(*words)
    (tmp_path / "made" / "_training" / "states-0").mkdir(parents=True)
    assert train(*words) == figures
    assert not (tmp_path / "made" / "_training").exists()


def test_no_secret_is_written() -> None:
    settings = TrainSettings(draft="sftp://user:hunter2@host/head", target="s3://key:hunter2@bucket/model")
    assert "hunter2" not in json.dumps(asked_of("s3://key:hunter2@bucket/out", settings))


@pytest.mark.slow
def test_two_processes_train_one_head(done: tuple[str, Path]) -> None:
    """Started from a folder by relative paths. If one fails, the command says why."""
    (done[1].parent / "broken" / "_training" / "checkpoint.pt").mkdir(parents=True)
    words = ["--drafter", "clover", "--steps", "40", "--workers"]
    found = [
        subprocess.run(
            [sys.executable, "-c", MAIN, "train", "out", folder, *words, count],
            cwd=done[1].parent, capture_output=True, text=True, check=False,
        )
        for folder, count in (("made", "99"), ("broken", "2"), ("made", "2"))
    ]  # fmt: skip
    assert "--workers 99: each needs a CPU" in found[0].stderr
    assert "training in 2 processes failed: [Errno 21] Is a directory" in found[1].stderr
    assert found[2].returncode == 0, found[2].stderr
    assert json.loads(found[2].stdout.splitlines()[-1])["accept_length"] > 1
    assert load_pair(done[0], str(done[1].parent / "made")).draft is not None
