"""Trains a drafter on the rows of a job: reads them, trains, writes the drafter, and decodes rows held out."""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import distributed

from exspec.actors.engine import Engine, EngineConfig, Request, SequenceStatistics
from exspec.actors.engine.drafters.lookup import learner_class
from exspec.actors.engine.faults import first_line
from exspec.actors.engine.learners.learner import Growth, Learner
from exspec.actors.models import Pair, load_draft
from exspec.actors.source import Source
from exspec.jobs.finished import check_map, choose, read_rows
from exspec.jobs.training.examples import TOKENS_PER_STEP, Example, Lessons, TargetStates, counts_of, example_of
from exspec.jobs.training.prospect import tidy
from exspec.jobs.training.settings import TrainSettings
from exspec.jobs.training.texts import write_texts
from exspec.jobs.training.trainer import Record, Tally, Trainer
from exspec.jobs.training.unfinished import write
from exspec.pipeline.cluster.connect import connect, device
from exspec.pipeline.errors import JobError, counted
from exspec.pipeline.input.snapshot import vanished
from exspec.pipeline.job.kinds import stored_job
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.owner import read_output
from exspec.pipeline.shape import device_here, pair_of
from exspec.pipeline.storage import Folder
from exspec.pipeline.weights import local_model

MADE, RECORDS, CHECKPOINT, TEXTS = "drafter", "records.json", "checkpoint.pt", "texts.json"  # of a training's folder
HELD_OUT = 0.1  # share of the rows
HELD_ROWS = 64  # of them that are decoded, at most
FEWEST = 16  # rows
WRITING = 0.2  # share of the time in which the target may write texts
WRITTEN = 2  # tokens that it writes for each of the rows', at most
MANY = 2_000_000  # tokens of rows, of which a drafter knows little by heart
GIB = 2**30


@dataclass(frozen=True)
class Rows:
    """learned: examples to learn from. held: requests that were held out, and their examples. by_shard: whether no
    shard has both. long: how many were left out because they are too long."""

    learned: list[Example]
    held: list[tuple[Request, Example]]
    by_shard: bool
    long: int

    @property
    def left_out(self) -> str | None:
        """What to say of rows that are too long; None if there are none."""
        return f"{counted(self.long, 'row')} of more than {TOKENS_PER_STEP:,} tokens left out" if self.long else None

    @property
    def digest(self) -> str:
        return sha256(repr(self.learned).encode()).hexdigest()


@dataclass(frozen=True)
class Training:
    """output: of the job whose rows are learned. options: of its file system, as fsspec takes them. work: a folder for
    what an unfinished training needs to go on."""

    output: str
    options: dict[str, Any]
    settings: TrainSettings
    work: Path

    @property
    def drafts(self) -> int:
        """K."""
        return self.settings.draft_tokens or self.kind.drafts

    @property
    def shortest(self) -> int:
        """Tokens of the shortest text that has a draft."""
        return self.drafts + 3

    @property
    def kind(self) -> type[Learner]:
        """What trains this kind of drafter."""
        kind = learner_class(self.settings.drafter)
        assert kind is not None
        return kind

    def load(self) -> tuple[Job, Pair]:
        """The job, its target, and the draft to train further if there is one. Raises JobError or ModelError."""
        own = self.settings
        if own.draft is not None and own.layers is not None:
            raise JobError("--layers: is of a new drafter, and --draft names one")
        job = self.stored()
        pair = pair_of(job, device_here(job), draft=False)
        pair.target.requires_grad_(False)
        if own.draft is None:
            return job, pair
        source = Source(local_model(own.draft, self.options), None, own.trust_remote_code, own.allow_pickle)
        draft = load_draft(pair, source, job.target)
        if (made_for := getattr(draft.config, "head_for", "model")) != own.drafter:
            raise JobError(f"--draft {own.draft}: is a draft for {made_for}, not {own.drafter}")
        return job, replace(pair, draft=draft)

    def stored(self) -> Job:
        """The job. Raises JobError."""
        permissions = {
            "trust_remote_code": self.settings.trust_remote_code, "allow_pickle": self.settings.allow_pickle
        }  # fmt: skip
        done = read_output(Folder(self.output, self.options))
        job = stored_job(done.state.description, self.options).model_copy(update=permissions)
        check_map(job, self.output)
        others = job.reads or job.listed or job.best_of or job.adapters or job.max_thinking_tokens is not None
        if (job.num_gpus or 0) > 1:
            raise JobError(f"{self.output}: its target was split over {job.num_gpus:g} GPUs; training needs it on one")
        if job.embeds:
            raise JobError(f"{self.output}: has embeddings, and no completions to learn; expected another job")
        if others:
            raise JobError(
                f"{self.output}: has given completions, samples, thinking, or adapters by row, whose tokens are not "
                "learned; expected another job"
            )
        return job

    def rows(self, job: Job, pair: Pair) -> Rows:
        """The rows to learn. Rows without a completion are left out, and so are rows whose text does not encode to the
        tokens that were counted, and rows too short to have a draft or too long. Raises JobError if too few are
        left."""
        long = 0
        done = read_output(Folder(self.output, self.options))
        gone = vanished(done.state.plan.shards, job.storage_options)
        shards: dict[str, list[tuple[Request, Example]]] = {}
        for row in read_rows(job, done, pair, choose(done, self.settings.rows, None, 0, gone)):
            example = example_of(row, pair)
            if example is None or len(example[1]) < 2 or (size := sum(map(len, example))) < self.shortest:
                continue
            if size > TOKENS_PER_STEP:
                long += 1
            else:
                assert row.request is not None
                shards.setdefault(row.shard, []).append((row.request, example))
        total = sum(map(len, shards.values()))
        wanted, names = max(1, int(HELD_OUT * total)), sorted(shards, key=lambda name: (-len(shards[name]), name))
        held: list[tuple[Request, Example]] = []
        if by_shard := len(names) > 1:
            while len(names) > 1 and len(held) < wanted:
                held += shards[names.pop()]
        else:
            for rows in shards.values():
                held = rows[-wanted:]
                del rows[-wanted:]
        learned = [example for name in names for _, example in shards[name]]
        if len(learned) < FEWEST:
            raise JobError(
                f"{self.output}: {len(learned)} rows, without those held out, have a completion of at least 2 tokens, "
                f"and {self.shortest} to {TOKENS_PER_STEP:,} tokens with the prompt; expected at least {FEWEST} such "
                "rows"
            )
        return Rows(learned, held[:: max(1, len(held) // HELD_ROWS)][:HELD_ROWS], by_shard, long)

    def write_texts(self, pair: Pair, learned: Sequence[Example], say: Callable[[str], None]) -> None:
        """Let the target write texts that are learned beside the rows, if there are few rows and steps enough to learn
        texts too. Texts too short to have a draft are left out."""
        file, known = self.work / TEXTS, sum(len(prompt) + len(completion) for prompt, completion in learned)
        read = self.settings.steps * self.settings.workers * TOKENS_PER_STEP
        wanted = min(WRITTEN * known, min(MANY, read) - known)
        if wanted <= 0 or file.exists() or any(self.work.glob("states-*")):  # it has begun, with or without texts
            return
        began, limit = time.monotonic(), WRITING * 60 * self.settings.minutes
        found = write_texts(pair.target, learned, wanted, limit)
        tidy()
        seconds = min(time.monotonic() - began, limit)  # so that a very short training still has a step
        texts = [text for text in found if len(text) >= self.shortest]
        write(file, {"texts": texts, "seconds": seconds}, indent=None)
        say(f"{counted(len(texts), 'text')} with {sum(map(len, texts)):,} tokens written by the target beside them")

    def learner(self, pair: Pair, learned: Sequence[Example]) -> Learner:
        """What trains the pair's draft, or a new one. Raises ValueError if none can be made."""
        torch.manual_seed(0)
        growth = Growth(self.drafts, self.settings.layers, counts_of(learned))
        model: Any = pair.draft or self.kind.grow(pair.target, growth)
        return self.kind(pair.target, model.float().to(pair.target.device), self.drafts)

    def run(
        self, learner: Learner, pair: Pair, rows: Rows, say: Callable[[str], None],
        go_on: Callable[[Trainer, Callable[[], float]], bool] = lambda *_: True,
    ) -> bool:  # fmt: skip
        """Train, and write the drafter and the records of the training into `work`. go_on: is asked from time to time;
        it gets a function that computes the accept length on rows that were held out. Returns its last answer."""
        file = self.work / TEXTS
        written: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"texts": [], "seconds": 0.0}
        learned = [*rows.learned, *((text, []) for text in written["texts"])]
        held = [example for _, example in rows.held]
        longest = max(len(prompt) + len(completion) for prompt, completion in [*learned, *held])
        states = TargetStates(pair.target, learner.layers, longest)
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        cache, budget = self.work / f"states-{rank}", self.settings.cache_gib * GIB / self.settings.workers
        lessons = Lessons(learned, states, cache, budget, pair.target.device)
        trainer = Trainer(
            learner, lambda step, _: lessons.at(step), self.settings.minutes, self.settings.steps,
            self.work / CHECKPOINT, written["seconds"],
        )  # fmt: skip
        others = Lessons(held, states, self.work / "states-held", budget, pair.target.device)
        going = trainer.run(say, lambda trainer: go_on(trainer, lambda: accept_length(learner, others)))
        if trainer.rank or not going:
            return going
        self.save(learner, pair, self.work / MADE)
        records = [asdict(record) for record in trainer.records]
        (self.work / RECORDS).write_text(json.dumps({"draft_tokens": learner.count, "records": records}))
        return True

    def save(self, learner: Learner, pair: Pair, folder: Path) -> None:
        """Write the drafter. Raises JobError if it cannot be written."""
        try:
            learner.save(folder, pair.target.dtype)
            if self.settings.drafter == "model":
                pair.tokenizer.save_pretrained(folder)
        except SafetensorError as error:
            raise JobError(f"{folder}: the drafter cannot be written ({error})") from error

    def run_together(self, job: Job) -> None:
        """Train in several processes, which Ray Train starts, each on a GPU if the cluster has any. All must reach
        `work`. Raises JobError."""
        import ray
        from ray.train import RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchTrainer

        connect(job)
        kind, count = "GPU" if device(job) == "cuda" else "CPU", self.settings.workers
        if (found := ray.cluster_resources().get(kind, 0)) < count:
            raise JobError(f"--workers {count}: each needs a {kind}, and the cluster has {found:.0f}")
        trainer = TorchTrainer(
            _worker,
            train_loop_config={"training": self, "folder": Path.cwd()},
            scaling_config=ScalingConfig(num_workers=count, use_gpu=kind == "GPU"),
            run_config=RunConfig(storage_path=str(self.work.resolve() / "ray")),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            failures = getattr(error, "worker_failures", {}).values()
            cause = next(iter(failures), getattr(error, "controller_failure", error))
            raise JobError(f"training in {count} processes failed: {first_line(cause)}") from error

    def forget(self) -> None:
        """Remove what only an unfinished training needs."""
        (self.work / CHECKPOINT).unlink(missing_ok=True)
        for states in self.work.glob("states-*"):
            shutil.rmtree(states)

    def made(self, pair: Pair, job: Job) -> tuple[Pair, int, list[Record]]:
        """The pair with the drafter that was trained, its K, and the records."""
        found = json.loads((self.work / RECORDS).read_text())
        records = [Record(**values) for values in found["records"]]
        return replace(pair, draft=load_draft(pair, str(self.work / MADE), job.target)), found["draft_tokens"], records


def _worker(given: dict[str, Any]) -> None:
    """One of several processes."""
    training: Training = given["training"]
    os.chdir(given["folder"])  # paths are relative to the driver's
    use_cores(training.settings.workers)
    job, pair = training.load()
    rows = training.rows(job, pair)
    say = (lambda _: None) if distributed.get_rank() else print
    training.run(training.learner(pair, rows.learned), pair, rows, say)


@torch.no_grad()
def accept_length(learner: Learner, lessons: Lessons) -> float:
    """Tokens that a round would commit, the bonus included, over the lessons."""
    tally, model = Tally(), learner.model
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for lesson in lessons.all():
            with torch.autocast(model.device.type, dtype=torch.bfloat16):
                tally.add(learner.outcome(lesson))
    model.train()
    return tally.record(0, 0.0).accept_length


def use_cores(processes: int) -> None:
    """Let torch use this process's share of the cores."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))


def measure(pair: Pair, requests: Sequence[Request], drafter: str, drafts: int, **settings: Any) -> SequenceStatistics:
    """Decode requests with the pair's draft. settings: more of the engine's."""
    longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
    config = EngineConfig(
        method="exspec", drafter=drafter, draft_tokens=drafts, batch_size=min(8, len(requests)), capacity=longest,
        **settings,
    )  # fmt: skip
    engine = Engine(pair.target, pair.draft, config)
    for request in requests:
        engine.submit(request)
    return sum((c.statistics for c in engine.run()), start=SequenceStatistics())
