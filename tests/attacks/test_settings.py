"""Odd settings and job files: everything that is wrong is said at once, by name."""

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exspec.pipeline.errors import JobError
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.job.settings import Job, load_job
from exspec.pipeline.prepare import prepare
from tests.pipeline import jobs


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job would start its own Ray. Other tests of this process may have started one."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


BASE: dict[str, Any] = {"target": "t", "input": "in", "output": "out"}
MIN, WINDOW = "min_new_tokens is 9, above max_new_tokens (2)", "window is 2, expected at least batch_size (4)"
WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "two rules": ({"min_new_tokens": 9, "max_new_tokens": 2, "window": 2, "batch_size": 4}, [MIN, WINDOW]),
    "a value and a rule": (
        {"top_p": 7, "window": 2, "batch_size": 4},
        ["top_p: Input should be less than or equal to 1, not 7", WINDOW],
    ),
    "a rule about a wrong value is not told": (
        {"max_new_tokens": "x", "min_new_tokens": 999},
        ["max_new_tokens: Input should be a valid integer, unable to parse string as an integer, not 'x'"],
    ),
    "a rule and a missing setting": ({"output": None, "actors": "3:1"}, ["output: Input", "actors is 3:1, expected"]),
    "a URL with one slash": (
        {"output": "https:/h/x"},
        ["output: https:/h/x: expected a path, or a URL that begins wi"],
    ),
    "yes as a number": ({"limit": True}, ["limit: expected a number or text; YAML reads yes, no, on and off"]),
    "yes as a real number": ({"temperature": True}, ["temperature: expected a number or text"]),
    "yes as a text": ({"system_prompt": True}, ["system_prompt: expected a number or text"]),
    "yes as a measured number": (
        {"batch_size": True},
        ["batch_size: expected a whole number from 1 up, or auto, not True"],
    ),
    "yes as a token": ({"bad_words_ids": [[True]]}, ["bad_words_ids.0.0: Input should be a valid integer, not True"]),
}


@pytest.mark.parametrize(("values", "messages"), WRONG.values(), ids=WRONG)
def test_all_wrong_settings_are_named_at_once(values: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(JobError) as error:
        load_job(Job, None, BASE | values)
    found = error.value.problems
    assert len(found) == len(messages), found
    for problem, message in zip(found, messages, strict=True):
        assert problem.startswith(message)


def test_rules_of_labeling_jobs_are_named_at_once() -> None:
    with pytest.raises(JobError) as error:
        load_job(
            LabelJob, None, BASE | {"labels": ["a", "a"], "stop": ["."], "min_new_tokens": 900, "ignore_eos": True}
        )
    assert [problem.partition(" ")[0] for problem in error.value.problems] == [
        "min_new_tokens", "labels:", "min_new_tokens", "stop",
    ]  # fmt: skip


FILES = {
    "a key twice": ("limit: 3\ntarget: t\nlimit: 4", "job.yaml, line 3, column 1: limit is given twice"),
    "a key twice in a value": (
        "storage_options: {key: a, secret: b, key: c}",
        "job.yaml, line 1, column 38: key is given twice",
    ),
    "a number as a key": ("1: 2", "job.yaml: 1: Keys should be strings"),
    "yes": ("limit: yes", "job.yaml: limit: expected a number or text"),
    "a rule": ("window: 2\nbatch_size: 4", f"job.yaml: {WINDOW}"),
    "two documents": ("limit: 3\n---\nlimit: 4", "job.yaml, line 2, column 1: not YAML: but found another document"),
    "a Python object": ("map: !!python/object/apply:os.getcwd []", "job.yaml, line 1, column 6: could not determine"),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_a_wrong_job_file_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(JobError) as error:
        load_job(Job, tmp_path / "job.yaml", {}, None)
    assert any(problem.startswith(f"{tmp_path}/{message}") or message in problem for problem in error.value.problems)


def test_a_merged_key_is_not_given_twice(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("storage_options: {<<: {key: a}, key: b}\ntarget: t\ninput: in\noutput: out")
    assert load_job(Job, tmp_path / "job.yaml", {}).storage_options == {"key": "b"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(LabelJob.model_fields)) | st.text(max_size=4), VALUES, max_size=4))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_any_settings_make_a_job_or_are_refused_by_name(values: dict[str, Any]) -> None:
    for kind in (Job, LabelJob):
        try:
            load_job(kind, None, BASE | values)
        except JobError as error:
            found = error.problems
        else:
            found = ("a job",)
        assert found
        assert all(found)


def refused(pair: jobs.Pair, place: Path, **values: Any) -> tuple[str, ...]:
    jobs.write_shards(place / "in", rows=2)
    with pytest.raises(JobError) as error:
        prepare(jobs.job(pair, place / "in", place / "out", **values))
    return error.value.problems


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_named_beside_the_rest(pair: jobs.Pair, tmp_path: Path) -> None:
    (column, device) = refused(pair, tmp_path, device="cuda", prompt_column="nosuch")
    assert "'nosuch' is not in the input" in column
    assert device == "device: is cuda, but this machine has no GPU that torch can use; use cpu, or set ray_address"


def test_the_gpu_of_a_cluster_need_not_be_here(
    pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.write_shards(tmp_path / "in", rows=2)
    job = jobs.job(pair, tmp_path / "in", tmp_path / "out", device="cuda")
    assert prepare(job.model_copy(update={"ray_address": "head:6379"})).job.device == "cuda"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert prepare(job).job.device == "cuda"


def test_a_batch_that_no_memory_holds_is_refused(pair: jobs.Pair, tmp_path: Path) -> None:
    (found,) = refused(pair, tmp_path, batch_size=10**9, window=10**9)
    assert found.startswith("memory: an actor needs ")
    assert "lower batch_size (1000000000), window (1000000000) or capacity (64)" in found
