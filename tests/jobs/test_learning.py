"""Jobs that train a drafter on their way."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exspec.actors.engine import EngineConfig
from exspec.actors.engine.engine import Engine
from exspec.actors.engine.shape.plan import Models, plan_memory
from exspec.actors.ledger import Ledger
from exspec.jobs.commands import run as command
from exspec.jobs.training import learning, planner
from exspec.jobs.training.learning import JobLearning
from exspec.jobs.training.prospect import Prospect, chance_of, length_of
from exspec.pipeline import run as run_module
from exspec.pipeline.errors import JobError, StoppedError
from exspec.pipeline.input.plan import Chunk, Task
from exspec.pipeline.learning import spread, up_to
from exspec.pipeline.prepare import prepare
from exspec.pipeline.progress import Progress
from exspec.pipeline.run import execute
from tests import tiny
from tests.actors.engine.learners.test_learners import TRAINED
from tests.jobs.calls import rows_of
from tests.pipeline import in_process as in_process_module
from tests.pipeline import jobs
from tests.pipeline.in_process import in_process

ROWS = 160


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, an input, and the output of a plain job."""
    place = tmp_path_factory.mktemp("learning")
    jobs.save_deep(place / "target")
    jobs.write_shards(place / "in", rows=ROWS, shards=8)
    run(place, place / "plain")
    return place


def run(place: Path, output: Path, lessons: JobLearning | None = None, restart: bool = False, **settings: Any) -> int:
    given: Any = (str(place / "target"), None)
    job = jobs.job(given, place / "in", output, **{"method": "plain", "rows_per_chunk": 10} | settings)
    with in_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "on_a_device", run_module.on_a_device)
        return execute(prepare(job, restart), learning=lessons)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small job trains, for a moment."""
    for name, value in {"FEWEST": 20, "SMALL": 0.0, "FIRST": 0.3, "WATCHED": 0.2}.items():
        monkeypatch.setattr(learning, name, value)
    for name, value in {"SMALL": 0.0, "SHORTEST": 1.0, "TRIAL": 0.2, "LEAST": 0.2}.items():
        monkeypatch.setattr(planner, name, value)


@pytest.fixture
def _hopeful(_quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of these tiny models are never faster than plain decoding, but the planner believes that they are."""
    monkeypatch.setattr(Prospect, "ratio", lambda *_: 1e6)
    monkeypatch.setattr(planner, "MARGIN", -1.0)
    monkeypatch.setattr(planner, "decided", lambda candidates: (candidates[1], "it is faster"))


def tokens_of(output: Path) -> list[tuple[Any, ...]]:
    """What does not depend on the drafter."""
    return [
        tuple(row[n] for n in ("id", "completion", "finish_reason", "completion_tokens")) for row in rows_of(output)
    ]


def engines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The drafters of all engines that are made from now on."""
    made: list[str] = []
    begin = Engine.__init__

    def noted(engine: Engine, *given: Any, **options: Any) -> None:
        begin(engine, *given, **options)
        made.append(engine.config.drafter)

    monkeypatch.setattr(Engine, "__init__", noted)
    return made


def drafters_of(output: Path) -> list[dict[str, Any]]:
    return json.loads((output / "_job.json").read_text()).get("drafters", [])  # type: ignore[no-any-return]


@pytest.mark.usefixtures("_hopeful")
@pytest.mark.fast("model")
@pytest.mark.parametrize("drafter", TRAINED)
def test_a_job_that_learns_writes_the_same_rows(
    drafter: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engines(monkeypatch)
    assert run(place, tmp_path / "out", JobLearning((drafter,), Progress())) == 0
    assert tokens_of(tmp_path / "out") == tokens_of(place / "plain")
    assert made[-1] == drafter
    (trained,) = drafters_of(tmp_path / "out")
    assert (trained["drafter"], trained["used"]) == (drafter, True)
    assert (tmp_path / "out" / "_drafters" / trained["name"] / "config.json").exists()


@pytest.mark.usefixtures("_hopeful")
def test_a_job_that_was_stopped_goes_on_with_its_drafter(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next job can begin with it."""
    ends = JobLearning.ends

    def stopped(lessons: JobLearning, _: Any) -> bool:
        if lessons.before is not None:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(JobLearning, "ends", stopped)
    with pytest.raises(StoppedError):
        run(place, tmp_path / "out", JobLearning(("eagle3",), Progress()))
    monkeypatch.setattr(JobLearning, "ends", ends)
    made = engines(monkeypatch)
    assert run(place, tmp_path / "out", JobLearning(("eagle3",), Progress())) == 0
    assert made[0] == "eagle3"
    assert tokens_of(tmp_path / "out") == tokens_of(place / "plain")
    assert len(drafters_of(tmp_path / "out")) == 1
    del made[:]
    settings = {"draft": f"from:{tmp_path / 'out'}", "method": "exspec"}
    assert run(place, tmp_path / "next", **settings) == 0
    assert made == ["eagle3"]
    assert tokens_of(tmp_path / "next") == tokens_of(place / "plain")
    with pytest.raises(JobError, match="uses no drafter that it has trained"):
        run(place, tmp_path / "other", draft=f"from:{place / 'plain'}", method="exspec")


@pytest.mark.usefixtures("_hopeful")
def test_a_drafter_below_its_promise_is_taken_back(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learning, "KEPT", 2.0)
    made = engines(monkeypatch)
    assert run(place, tmp_path / "out", JobLearning(("clover",), Progress())) == 0
    assert "back to the old drafter" in capsys.readouterr().out
    assert made[-1] == "none"
    assert [d["used"] for d in drafters_of(tmp_path / "out")] == [False]
    assert tokens_of(tmp_path / "out") == tokens_of(place / "plain")


@pytest.mark.usefixtures("_hopeful")
def test_if_the_learner_dies_only_its_training_is_lost(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(planner.Teacher, "_tried", dies)
    assert run(place, tmp_path / "out", JobLearning(("clover",), Progress())) == 0
    assert "learning: ended: OutOfMemoryError: CUDA out of memory" in capsys.readouterr().out
    assert not (tmp_path / "out" / "_drafters").exists()
    assert tokens_of(tmp_path / "out") == tokens_of(place / "plain")


@pytest.mark.usefixtures("_hopeful")
def test_the_report_shows_each_swap(place: Path, tmp_path: Path) -> None:
    """And a job that starts over keeps the drafters of the old one with its output."""
    assert run(place, tmp_path / "out", JobLearning(("model",), Progress())) == 0
    report = json.loads((tmp_path / "out" / "_report.json").read_text())
    (made,) = report["drafters"]
    assert report["learning"]["seconds_spent"] == made["seconds"] > 0
    assert report["began"] < made["at"]
    page = (tmp_path / "out" / "_report.html").read_text()
    assert "Accept length by time (dashed: a new drafter)" in page
    assert "<h2>Drafters that the job has trained</h2>" in page
    assert run(place, tmp_path / "out", restart=True) == 0
    assert not list((tmp_path / "out").glob("_drafters/*/*"))
    assert "drafters" not in json.loads((tmp_path / "out" / "_job.json").read_text())
    (aside,) = tmp_path.glob("out-before-*")
    assert (aside / "_drafters" / made["name"] / "config.json").exists()


def test_only_an_exact_job_learns(place: Path, tmp_path: Path) -> None:
    given: Any = (str(place / "target"), None)
    job = jobs.job(given, place / "in", tmp_path / "out", exact=False, learn="auto", method="plain")
    with pytest.raises(JobError, match="learn: needs exact"):
        command.run(job, False, False, None, Progress())
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_quick")
def test_where_drafts_do_not_pay_nothing_is_trained(place: Path, tmp_path: Path) -> None:
    assert run(place, tmp_path / "out", JobLearning(("model", "dflash"), Progress())) == 0
    assert tokens_of(tmp_path / "out") == tokens_of(place / "plain")
    assert not (tmp_path / "out" / "_drafters").exists()


@pytest.mark.usefixtures("_quick")
def test_a_resumed_job_does_not_decide_again(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"method": "exspec", "drafter": "suffix"}
    monkeypatch.setattr(planner, "MARGIN", 1e9)

    def stopped(*_: Any) -> bool:
        raise KeyboardInterrupt

    ends = JobLearning.ends
    monkeypatch.setattr(JobLearning, "ends", stopped)
    with pytest.raises(StoppedError):
        run(place, tmp_path / "out", JobLearning(("model",), Progress()), **settings)
    monkeypatch.setattr(JobLearning, "ends", ends)
    asked: list[Any] = []
    monkeypatch.setattr(learning, "teach", asked.append)
    assert run(place, tmp_path / "out", JobLearning(("model",), Progress()), **settings) == 0
    assert not asked
    assert tokens_of(tmp_path / "out") == tokens_of(place / "plain")


@pytest.mark.usefixtures("_hopeful")
def test_slots_that_did_not_fit_stay_away(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors that ran out of memory in one phase begin the next one with fewer slots."""
    begun: list[int | None] = []

    class Short(Ledger):
        def __init__(self, slots: int | None = None) -> None:
            super().__init__(slots)
            begun.append(slots)
            self.shrink(5)

    monkeypatch.setattr(in_process_module, "Ledger", Short)
    assert run(place, tmp_path / "out", JobLearning(("clover",), Progress())) == 0
    assert begun == [None, 5]


def test_a_drafter_must_leave_the_batch_as_it_is() -> None:
    """Rows of a job always have the same shape."""
    target, draft = tiny.model(), tiny.model(seed=1)
    config = EngineConfig(method="exspec", drafter="model", batch_size=4, window=8, capacity=320)
    fewest = replace(config, pages=config.page_count // 4)
    enough = plan_memory(target.config, draft.config, fewest, target.dtype).total
    assert planner.same_rows(Models(target, draft, enough), config) == fewest
    with pytest.raises(ValueError, match="memory: model does not fit beside a batch of 4 rows"):
        planner.same_rows(Models(target, draft, enough - 1), config)


def test_the_first_tasks_are_from_everywhere() -> None:
    """And those that decode rows of a file again are all in one phase, the last."""
    shard: Any = None
    new = [Task(Chunk(shard, 0, i, 1)) for i in range(100)]
    again = [Task(Chunk(shard, 1, i, 1), "part") for i in range(5)]
    order = list(spread([*again[:2], *new, *again[2:]], 0.1))
    assert order[:11] == [*new[::10], new[1]]
    assert order[-5:] == again
    assert sorted(task.key for task in order) == sorted(task.key for task in (*new, *again))
    rest = iter(order)
    assert list(up_to(rest, 10)) == new[::10]
    assert list(up_to(rest, 92))[-5:] == again


def test_a_chance_and_its_accept_length() -> None:
    for length in (1.0, 2.5, 5.9):
        assert length_of(chance_of(length, 5), 5) == pytest.approx(length, abs=1e-6)
