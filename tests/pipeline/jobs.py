"""Jobs for the pipeline's tests: shards of words, and a model whose completions can be computed by hand."""

import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from exspec.actors.engine import Engine, EngineConfig, Request, RequestError
from exspec.jobs.commands.repair import repaired
from exspec.pipeline.job.settings import Job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests import tiny
from tests.tiny import ArithmeticModel

ROOT = Path(__file__).parents[2]
WORDS = [f"w{i}" for i in range(tiny.VOCABULARY)]
Pair = tuple[str, str | None]  # folders of a target and a draft
DESCRIBED: dict[str, Any] = {"kind": "generate", "job": {}, "fingerprint": {}, "shape": {}, "device": "cpu"}


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def save_pair(folder: Path) -> Pair:
    """A tiny target and draft in folders of their own."""
    for name, seed in (("target", 0), ("draft", 1)):
        tiny.model(seed=seed, max_position_embeddings=64).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def save_deep(folder: Path) -> Pair:
    """A tiny target that drafters can learn, and no draft."""
    target = tiny.deep(5, 0.3)
    target.config.max_position_embeddings = 64
    target.config.eos_token_id = target.generation_config.eos_token_id = tiny.ENDS[0]  # type: ignore[union-attr]
    target.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder), None


def with_end_token(target: str, folder: Path) -> str:
    """A copy of a target whose tokenizer has an end token."""
    shutil.copytree(target, folder)
    made = tokenizer()
    made.eos_token = WORDS[tiny.ENDS[0]]
    made.save_pretrained(folder)
    return str(folder)


def prompt(row: int) -> list[int]:
    rng = random.Random(row)
    return [rng.randrange(tiny.VOCABULARY) for _ in range(rng.choice([1, 2, 5, 9, 20]))]


def budget(row: int) -> int:
    """Heavy-tailed lengths."""
    return 40 if row % 16 == 3 else 1 + row % 7


def write_shards(folder: Path, rows: int, shards: int = 3) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-rows // shards)
    for number, first in enumerate(range(0, rows, size)):
        numbers = list(range(first, min(first + size, rows)))
        table = pa.table({
            "key": numbers,
            "prompt": [" ".join(WORDS[t] for t in prompt(n)) for n in numbers],
            "budget": [budget(n) for n in numbers],
        })  # fmt: skip
        pq.write_table(table, folder / f"shard-{number}.parquet", row_group_size=7)


def expected(row: int) -> str:
    tokens = ArithmeticModel.continuation(prompt(row), budget(row))
    return " ".join(WORDS[t] for t in (tokens[:-1] if tokens[-1] == tiny.ENDS[0] else tokens))


class ArithmeticLoader:
    """Loads an engine over the arithmetic model. Every step takes at least `seconds`."""

    def __init__(self, seconds: float = 0.0, **config: Any) -> None:
        self.seconds = seconds
        self.config = {"method": "plain", "batch_size": 4, "window": 4, "capacity": 64, **config}
        self.window = self.config["window"]

    def __call__(self, window: int) -> tuple[Engine, Any]:  # noqa: ARG002
        engine = Engine(ArithmeticModel(), None, EngineConfig(**self.config))  # type: ignore[arg-type]
        step, submit = engine.step, engine.submit

        def hooked_step() -> None:
            self.before_step(engine)
            step()
            time.sleep(self.seconds)

        def hooked_submit(request: Request) -> None:
            self.before_submit(request)
            submit(request)

        engine.step, engine.submit = hooked_step, hooked_submit  # type: ignore[method-assign]
        return engine, tokenizer()

    def before_step(self, engine: Engine) -> None: ...

    def before_submit(self, request: Request) -> None: ...


class TogetherLoader(ArithmeticLoader):
    """No engine makes a step before `actors` of them have loaded. Each creates a file in `folder` when it has."""

    def __init__(self, folder: Path, actors: int) -> None:
        super().__init__()
        self.folder, self.actors = folder, actors

    def __call__(self, window: int) -> tuple[Engine, Any]:
        loaded = super().__call__(window)
        (self.folder / f"{os.getpid()}").touch()
        return loaded

    def before_step(self, _: Engine) -> None:
        while len(list(self.folder.iterdir())) < self.actors:
            time.sleep(0.01)


class TightLoader(ArithmeticLoader):
    """Only two slots fit into memory."""

    def __call__(self, window: int) -> tuple[Engine, Any]:
        if window > 2:
            raise torch.OutOfMemoryError
        return super().__call__(window)


class ForgetfulLoader(ArithmeticLoader):
    """Runs out of memory in its first round if it has more than `most` slots."""

    def __init__(self, most: int) -> None:
        # Several buckets: a window of slots, not only a batch.
        super().__init__(bucket=16, attention="gathered", window=16)
        self.most = most

    def __call__(self, window: int) -> tuple[Engine, Any]:
        self.config["window"] = max(4, window)
        return super().__call__(window)

    def before_step(self, engine: Engine) -> None:
        if engine.busy and engine.config.slots > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")


class PoisonLoader(ArithmeticLoader):
    """One prompt ends the process, every time."""

    def __init__(self, prompt: list[int]) -> None:
        super().__init__()
        self.prompt = prompt

    def before_submit(self, request: Request) -> None:
        if list(request.prompt) == self.prompt:
            os._exit(1)


class RefusingLoader(PoisonLoader):
    """One prompt is refused by the engine."""

    def before_submit(self, request: Request) -> None:
        if list(request.prompt) == self.prompt:
            raise RequestError("refused")


class BreaksOff:
    """Fails in the block that holds a key."""

    def __init__(self, key: int) -> None:
        self.key = key

    def __call__(self, block: pa.Table) -> pa.Table:
        if self.key in block["key"].to_pylist():
            raise OSError("no room is left")
        return block


def job(pair: Pair, source: Any, output: Any, **settings: Any) -> Job:
    return Job(**{
        "target": pair[0], "draft": pair[1], "input": [str(source)], "output": str(output), "rows_per_chunk": 8,
        "actors": "1",
        "id_column": "key", "max_new_tokens_column": "budget", "batch_size": 4, "window": 4, "draft_tokens": 3,
        "method": "exspec", "bucket": 512,
        **settings,
    })  # fmt: skip


def run(
    pair: Pair,
    place: Path,
    rows: int | None = None,
    load: Any = None,
    restart: bool = False,
    retry_errors: bool = False,
    repair: Path | None = None,
    **settings: Any,
) -> int:
    """Run a job over `place / "in"` with the arithmetic model, or `load`. rows: of shards to write there first."""
    if rows:
        write_shards(place / "in", rows)
    made = job(pair, place / "in", place / "out", **settings)
    fixed = partial(repaired, repair, made.storage_options) if repair else None
    prepared = prepare(made, restart, mending=retry_errors or repair is not None)
    return execute(prepared, retry_errors, load=load or ArithmeticLoader(), repair=fixed)


def started(pair: Pair, place: Path, parts: int) -> subprocess.Popen[bytes]:
    """Start a job over 120 rows in a process with its own Ray, and wait until it has committed some parts."""
    write_shards(place / "in", rows=120)
    write_job(pair, place)
    process = subprocess.Popen(command(place), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_parts(place / "out", parts, process)
    return process


def write_job(pair: Pair, place: Path, **settings: Any) -> None:
    """Write the job over `place / "in"` as a file for `command`."""
    made = job(pair, place / "in", place / "out", **settings)
    (place / "job.json").write_text(made.model_dump_json(exclude_unset=True))


def command(place: Path, seconds: float = 0.05) -> list[str]:
    """The command that runs the job in `place`; each step takes so many seconds."""
    return [sys.executable, "-m", "tests.pipeline.driver", str(seconds), "run", "--job", str(place / "job.json")]


def wait_for_parts(output: Path, count: int, process: subprocess.Popen[Any]) -> None:
    """Wait until the running process has committed so many parts."""
    deadline = time.monotonic() + 300
    while len(list(output.glob("part-*"))) < count:
        assert process.poll() is None, f"the driver ended with {process.returncode} before it had so many parts"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def edit_log(output: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Apply an edit to every entry of a log."""
    for path in sorted((output / "_log").iterdir()):
        entry = json.loads(gzip.decompress(path.read_bytes()))
        edit(entry)
        path.write_bytes(gzip.compress(json.dumps(entry).encode()))


def edit_files(output: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Apply an edit to the log's record of every file."""
    edit_log(output, lambda entry: [edit(file) for file in entry.get("new", ())])


def record(part: Path) -> None:
    """Write size and digest of a part into the log, as if the job had written what it holds now."""
    content = part.read_bytes()
    found = {"size": len(content), "digest": hashlib.md5(content).hexdigest()}
    edit_files(part.parent, lambda file: file.update(found if file["name"] == part.name else {}))


def report(folder: Path) -> dict[str, Any]:
    """The report of an output."""
    return json.loads((folder / "_report.json").read_text())  # type: ignore[no-any-return]


def generated(folder: str, row: int) -> str:
    """The completion of a row by transformers, from the model in a folder."""
    tokens = tiny.generate(_model(folder), prompt(row), budget(row))
    return str(tokenizer().decode(tokens[:-1] if tokens[-1] in tiny.ENDS else tokens))


@lru_cache(maxsize=1)
def _model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def read_output(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows by id, from all parts. Fails if an id occurs twice."""
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("part-*.parquet")):
        for row in pq.read_table(path).to_pylist():
            assert row["id"] not in rows, f"{row['id']} occurs twice"
            rows[row["id"]] = row
    return rows


def assert_complete(folder: Path, rows: int) -> None:
    """Every row is there once, with the completion of the arithmetic model."""
    found = read_output(folder)
    assert set(found) == {str(n) for n in range(rows)}
    wrong = [n for n in range(rows) if found[str(n)]["completion"] != expected(n)]
    assert not wrong, (wrong[:5], found[str(wrong[0])], expected(wrong[0]))
    assert (folder / "_SUCCESS").exists()
