"""The main job, end to end: complete, resumable, and refused with a reason."""

import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exspec.actors.engine.drafters.registry import DRAFTERS
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import Job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests import tiny
from tests.pipeline import jobs

AUTO = dict.fromkeys(("method", "drafter", "batch_size", "window", "draft_tokens", "bucket"), "auto")


def run(job: Job, **options: Any) -> int:
    return execute(prepare(job), load=jobs.ArithmeticLoader(), **options)


@pytest.mark.parametrize(
    ("draft", "settings", "method", "drafter", "measured"),
    [
        (True, {}, "exspec", "model", False),
        (True, {"tune_from": 1}, "exspec", "model", True),
        (False, {}, "plain", "none", False),  # without calibration, drafting may not pay
        (False, {"tune_from": 1}, "exspec", "suffix", True),
        (False, {"drafter": "suffix"}, "exspec", "suffix", False),
        (True, {"drafter": "suffix"}, "exspec", "suffix", False),
        (False, {"method": "exspec"}, "exspec", "suffix", False),
        (True, {"drafter": "none", "tune_from": 1}, "plain", "none", True),
    ],
)
def test_the_shape_of_a_new_job(
    pair: jobs.Pair, source: Path, tmp_path: Path, draft: bool, settings: dict[str, Any], method: str, drafter: str,
    measured: bool,
) -> None:  # fmt: skip
    given = (pair[0], pair[1] if draft else None)
    found = prepare(jobs.job(given, source, tmp_path / "out", **AUTO | settings)).shape  # type: ignore[arg-type]
    assert (found.config.method, found.config.drafter, bool(found.free)) == (method, drafter, measured)


def test_a_budget_leaves_fewer_pages_and_too_small_a_one_is_refused(
    pair: jobs.Pair, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"bucket": 16, "window": 40}
    prepared = prepare(jobs.job(pair, source, tmp_path / "out", memory_gib=0.0015, **settings))
    assert execute(prepared) == 0
    shape = prepared.output.read().state.description["shape"]
    assert (shape["batch_size"], shape["window"]) == (4, 40), "slots need no memory"
    printed = "".join(capsys.readouterr())
    assert 64 <= int(re.search(r"KV of (\d+) tokens", printed)[1]) < 40 * 64  # type: ignore[index]
    with pytest.raises(JobError, match=r"memory: 0.1 MiB are too few for one sequence of 64 tokens; expected at least"):
        execute(prepare(jobs.job(pair, source, tmp_path / "small", memory_gib=0.0001, **settings)))


@pytest.mark.slow
def test_sampled_rows_have_their_own_seeds_and_a_second_run_samples_the_same(
    pair: jobs.Pair, source: Path, tmp_path: Path
) -> None:
    texts = []
    for name, settings in (
        ("one", {"temperature": 1.0, "seed": 5, "rows_per_chunk": 16}),
        ("two", {"temperature": 1.0, "seed": 5, "rows_per_chunk": 5}),
        ("greedy", {}),
    ):
        assert execute(prepare(jobs.job(pair, source, tmp_path / name, **settings))) == 0
        texts.append({n: row["completion"] for n, row in jobs.read_output(tmp_path / name).items()})
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_only_what_is_missing_runs_again(pair: jobs.Pair, source: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    job = jobs.job(pair, source, out)
    assert run(job) == 0
    parts = sorted(out.glob("part-*"))
    before = {path: path.stat().st_mtime_ns for path in parts}
    assert run(job) == 0
    assert "nothing to do: all 60 rows are in" in capsys.readouterr().out
    for path in parts[::3]:
        path.unlink()
    assert run(job) == 0
    assert "rows to decode again: the files that held them are gone or damaged" in capsys.readouterr().out
    jobs.assert_complete(out, 60)
    kept = {path: path.stat().st_mtime_ns for path in out.glob("part-*") if path in before}
    assert kept == {path: before[path] for path in parts if path not in parts[::3]}


@pytest.mark.slow
def test_new_shards_are_appended_and_changed_ones_refused(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    job = jobs.job(pair, source, tmp_path / "out")
    assert run(job) == 0
    table = pa.table({"key": [60, 61], "prompt": ["w1 w2", "w3"], "budget": [2, 2]})
    pq.write_table(table, source / "night.parquet")
    assert run(job) == 0
    assert len(jobs.read_output(tmp_path / "out")) == 62
    pq.write_table(table.slice(1), source / "night.parquet")
    with pytest.raises(JobError, match=r"night.parquet: planned shard has changed \(2 rows"):
        run(job)
    (source / "night.parquet").unlink()
    with pytest.raises(JobError, match=r"night.parquet: planned shard has vanished"):
        run(job)


def test_another_job_in_the_same_output_is_refused_by_the_keys_that_differ(
    pair: jobs.Pair, source: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert run(jobs.job(pair, source, out)) == 0
    other = jobs.job(pair, source, out, temperature=0.5, seed=3)
    expected = "seed was 0 and is 3, temperature was 0.0 and is 0.5; use another output or --restart"
    with pytest.raises(JobError, match=expected):
        run(other)
    assert execute(prepare(other, restart=True), load=jobs.ArithmeticLoader()) == 0
    (aside,) = tmp_path.glob("out-before-*")
    assert len(list(aside.glob("part-*"))) == len(list(out.glob("part-*")))
    assert f"the old output is now in {aside}" in capsys.readouterr().out
    assert {row["completion"] for row in jobs.read_output(aside).values()} == {jobs.expected(n) for n in range(60)}
    assert run(jobs.job(pair, source, aside)) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_row_errors_are_data(pair: jobs.Pair, tmp_path: Path, capsys: Any) -> None:
    """The job continues, every row is in the output, and a retry of the errors changes nothing else."""
    prompts: list[str | None] = ["w1 w2", None, "", "w3 " * 80, "w4"]
    (tmp_path / "in").mkdir()
    table = pa.table({"key": ["a", "b", "c", "d", "d"], "prompt": prompts, "budget": [3, 3, 3, 3, -1]})
    pq.write_table(table, tmp_path / "in" / "s.parquet")
    assert jobs.run(pair, tmp_path) == 0
    found = pq.read_table(next((tmp_path / "out").glob("part-*"))).to_pylist()
    assert [(row["id"], row["row"]) for row in found] == [("a", 0), ("b", 1), ("c", 2), ("d", 3), ("d", 4)]
    assert [row["finish_reason"] for row in found[1:]] == ["error"] * 4
    assert [row["error"] for row in found] == [
        None,
        "column 'prompt' is null",
        "the prompt is empty",
        "a prompt of 80 tokens leaves no room in the context of 64",
        "column 'budget': expected a whole number from 1 up, not -1",
    ]
    assert jobs.report(tmp_path / "out")["errors"] == 4
    assert jobs.run(pair, tmp_path) == 0
    assert "nothing to do: all 5 rows are in" in (said := capsys.readouterr().out)
    assert said.endswith(", 4 of them with an error\n")
    assert jobs.run(pair, tmp_path, retry_errors=True) == 0
    assert "4 rows with an error that a retry would not help; convert --errors writes them" in capsys.readouterr().out
    again = pq.read_table(next((tmp_path / "out").glob("part-*"))).to_pylist()
    assert again == found, "a row without an error keeps even its seconds"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_column": "question"}, "prompt_column: 'question' is not in the input, which has key, prompt, budget"),
        ({"prompt_column": "budget"}, "prompt_column: 'budget' is int64, expected text or a list of messages"),
        ({"id_column": "uid"}, "id_column: 'uid' is not in the input"),
        ({"input": ["nowhere/"]}, "nowhere: no such file or folder"),
        ({"target": "no/such-model"}, "target no/such-model: no such folder, not in the local cache of the hub, and"),
        ({"prompt_template": "{{ a b }}"}, "prompt_template, line 1: expected token"),
        ({"bucket": 2}, "bucket: expected at least the verify width (4)"),
        ({**AUTO, "draft": None, "drafter": "model"}, "drafter model needs a draft; give one, or use another drafter"),
        ({**AUTO, "drafter": "suffix", "method": "plain"}, "method plain does not draft, but drafter is suffix"),
        ({**AUTO, "drafter": "none", "method": "exspec"}, "method exspec needs a drafter"),
        ({**AUTO, "drafter": "oracle"}, f"drafter: expected one of {', '.join(DRAFTERS)}, not 'oracle'"),
    ],
)
def test_a_problem_is_one_sentence(
    pair: jobs.Pair, source: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError) as error:
        prepare(jobs.job(pair, source, tmp_path / "out", **settings))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_all_problems_are_reported_at_once(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError) as error:
        prepare(jobs.job(pair, source, tmp_path / "out", prompt_column="x", draft="no/draft"))
    assert "prompt_column: 'x'" in str(error.value)
    assert "draft no/draft" in str(error.value)


def test_bad_shards_are_named(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    job = jobs.job(pair, source, tmp_path / "out")

    def refused(message: str) -> None:
        with pytest.raises(JobError, match=message):
            prepare(job)

    (source / "text.parquet").write_text("this is not Parquet")
    refused(r"text.parquet: not a Parquet file")
    pq.write_table(pa.table({"key": [1], "budget": [1]}), source / "text.parquet")
    refused(r"text.parquet: has no column 'prompt', which .*shard-0.parquet has")
    for path in source.glob("*"):
        path.unlink()
    refused("input: no Parquet, JSONL, CSV or Arrow files in")
    pq.write_table(pa.table({"key": [1], "prompt": ["w1"], "budget": [1]}).slice(1), source / "empty.parquet")
    refused("have no rows")


def test_an_output_that_overlaps_its_input_is_refused(pair: jobs.Pair, source: Path) -> None:
    """Its parts would be shards of the next run."""
    for output in (source, source / "out", source.parent):
        with pytest.raises(JobError, match="overlaps the input"):
            prepare(jobs.job(pair, source, output))


def test_a_draft_with_too_short_a_context_is_refused(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    tiny.model(seed=1, max_position_embeddings=32).save_pretrained(tmp_path / "draft")
    jobs.tokenizer().save_pretrained(tmp_path / "draft")
    job = jobs.job(pair, source, tmp_path / "out", draft=str(tmp_path / "draft"))
    with pytest.raises(JobError, match="its context of 32 tokens is shorter than the capacity of 64"):
        prepare(job)
    prepare(job.model_copy(update={"capacity": 32}))


def test_a_retry_of_errors_runs_missing_chunks_too(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    job = jobs.job(pair, source, tmp_path / "out")
    assert run(job) == 0
    sorted((tmp_path / "out").glob("part-*"))[0].unlink()
    assert run(job, retry_errors=True) == 0
    jobs.assert_complete(tmp_path / "out", 60)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory with the given options."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
        return place

    yield mount
    subprocess.run(["umount", place], check=False)


@pytest.mark.parametrize(
    ("options", "message"), [("ro", "Read-only file system"), ("size=512k", "No space left on device")]
)
def test_a_disk_that_cannot_be_written_is_refused(
    pair: jobs.Pair, source: Path, small_disk: Any, options: str, message: str
) -> None:
    with pytest.raises(JobError, match=rf"disk/out: cannot be written: OSError: .*{message}"):
        prepare(jobs.job(pair, source, small_disk(options) / "out"))


def test_an_output_below_a_file_is_refused(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(JobError, match="file/out: cannot be written: NotADirectoryError"):
        prepare(jobs.job(pair, source, tmp_path / "file" / "out"))


@pytest.mark.slow
def test_a_disk_that_fills_up_sets_chunks_aside_and_the_job_resumes(
    pair: jobs.Pair, source: Path, small_disk: Any, capsys: Any
) -> None:
    """A column of incompressible text makes all but the first few parts too large for the disk."""
    for i, path in enumerate(sorted(source.glob("*"))):
        table = pq.read_table(path)
        noise = [random.Random(f"{i} {n}").randbytes(30_000) for n in range(len(table))]
        pq.write_table(table.append_column("noise", pa.array(noise)), path)
    out = small_disk("size=1100k") / "out"
    job = jobs.job(pair, source, out)
    assert run(job) == 1
    printed = capsys.readouterr().out
    assert re.search(r"set aside: .*cannot be written: OSError: .*No space left on device", printed)
    assert "set aside: stopped: 3 chunks could not be written; the last: " in printed
    assert not (out / "_SUCCESS").exists()
    assert 0 < len(jobs.read_output(out)) < 60
    subprocess.run(["mount", "-o", "remount,size=16m", out.parent], check=True)
    assert run(job) == 0
    jobs.assert_complete(out, 60)


@pytest.mark.slow
def test_a_job_whose_rows_all_fail_is_a_failure(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    """A job with more errors than max_error_share stops before the end."""
    template = "{{ prompt.nothing }}"
    assert run(jobs.job(pair, source, tmp_path / "one", prompt_template=template)) == 1
    assert len(jobs.read_output(tmp_path / "one")) == 60
    assert not (tmp_path / "one" / "_SUCCESS").exists()
    half = "{% if key is even %}{{ prompt.nothing }}{% else %}w1{% endif %}"
    job = jobs.job(pair, source, tmp_path / "two", prompt_template=half, max_error_share=0.1)
    assert execute(prepare(job), load=jobs.ArithmeticLoader(0.05)) == 1
    report = jobs.report(tmp_path / "two")
    assert "rows with an error, more than max_error_share" in report["set_aside"][-1]
    assert 6 < report["errors"] < 30
    assert run(job.model_copy(update={"max_error_share": 0.5})) == 0
    assert len(jobs.read_output(tmp_path / "two")) == 60


@pytest.mark.slow
def test_values_that_cannot_be_read_are_errors_of_their_rows(pair: jobs.Pair, tmp_path: Path) -> None:
    """Any carried value comes out as it went in, but text that is not UTF-8 comes with escapes."""
    (tmp_path / "in").mkdir()
    broken = pa.array([b"good", b"\xff\xfe", b"good", b"good"]).cast(pa.binary()).view(pa.string())
    late = pa.array([0, 2**62, 1, 2], pa.int64()).view(pa.timestamp("us", tz="Nowhere/At-All"))
    table = pa.table({"prompt": ["w1", "w2", "w3", "w4"], "note": broken, "at": late, "stop": [1, None, None, None]})
    pq.write_table(table, tmp_path / "in" / "s.parquet")
    plain = {"id_column": None, "max_new_tokens_column": None, "max_new_tokens": 3}
    assert run(jobs.job(pair, tmp_path / "in", tmp_path / "out", stop_column="stop", **plain)) == 0
    (part,) = (tmp_path / "out").glob("part-*")
    out = pq.read_table(part)
    assert [error is None for error in out["error"].to_pylist()] == [False, True, True, True]
    assert out["error"][0].as_py().startswith("column 'stop': expected")
    assert out["note"].combine_chunks().view(pa.binary()).to_pylist()[1] == rb"\xff\xfe"
    assert out["at"].cast(pa.int64()).to_pylist() == [0, 2**62, 1, 2]
    assert out["prompt_tokens"].to_pylist()[1:] == [1, 1, 1]
    template = {"prompt_template": "{{ note }}", "carry": []}
    assert run(jobs.job(pair, tmp_path / "in", tmp_path / "two", **plain, **template)) == 0
    (part,) = (tmp_path / "two").glob("part-*")
    assert [bool(error) for error in pq.read_table(part)["error"].to_pylist()] == [False, True, False, False]


def test_a_chunk_that_cannot_be_read_is_set_aside_by_name(
    pair: jobs.Pair, source: Path, tmp_path: Path, capsys: Any
) -> None:
    """A damaged page: the other chunks are decoded, and the exit code says that rows are missing."""
    shard = source / "shard-1.parquet"
    offset = pq.read_metadata(shard).row_group(2).column(1).data_page_offset
    content = bytearray(shard.read_bytes())
    content[offset : offset + 30] = bytes(30)
    shard.write_bytes(content)
    assert run(jobs.job(pair, source, tmp_path / "out")) == 1
    printed = capsys.readouterr().out
    for rows in ("rows 8 to 15", "rows 16 to 19"):
        assert re.search(rf"set aside: .*shard-1.parquet, {rows}: cannot be read: ", printed)
    assert set(jobs.read_output(tmp_path / "out")) == {str(n) for n in range(60) if not 28 <= n < 40}


def test_a_shard_rewritten_in_the_run_is_set_aside(pair: jobs.Pair, source: Path, tmp_path: Path, capsys: Any) -> None:
    """Old and new rows are never mixed."""
    prepared = prepare(jobs.job(pair, source, tmp_path / "out"))
    table = pq.read_table(source / "shard-1.parquet")
    pq.write_table(table.set_column(1, "prompt", pa.array(["w1"] * 20)), source / "shard-1.parquet", row_group_size=7)
    assert execute(prepared, load=jobs.ArithmeticLoader()) == 1
    assert "set aside: shard-1.parquet: has changed since it was planned" in capsys.readouterr().out
    assert set(jobs.read_output(tmp_path / "out")) == {str(n) for n in range(60) if not 20 <= n < 40}
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_another_kind_of_device_is_another_job(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    prepared = prepare(jobs.job(pair, source, tmp_path / "out", limit=8))
    assert execute(prepared, load=jobs.ArithmeticLoader()) == 0
    with pytest.raises(JobError, match="device was 'cpu' and is 'cuda'"):
        prepare(jobs.job(pair, source, tmp_path / "out", device="cuda"))
    (summary,) = prepared.output.read().state.summaries()
    assert set(summary.hardware) == {"device", "torch", "attention", "kernels"}
