"""What decides an output, what may change between runs of a job, and invalid settings."""

from typing import Any

import pytest

from exspec.actors.engine import request
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.fingerprint import differences, fingerprint, may_change
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.job.settings import Job, load_job

BASE: dict[str, Any] = {"target": "t", "draft": "d", "input": "in", "output": "out"}
MODELS = {"target": "sha256:1", "draft": "sha256:2"}
OTHERS: dict[str, Any] = {
    "draft": "other", "draft_revision": "v2", "target_revision": "v2", "method": "plain", "threshold": 0.5, "limit": 7,
    "trust_remote_code": True, "allow_pickle": True, "max_error_share": 0.5, "wait": True,
}  # fmt: skip


def keys(device: str | None = "cpu", **changed: Any) -> dict[str, Any]:
    return fingerprint(Job(**BASE | changed), MODELS, device)


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_that_changes_no_token_may_change(name: str) -> None:
    assert differences(keys(), keys(**{name: OTHERS[name]})) == []
    assert may_change(name, exact=True)


@pytest.mark.parametrize("name", ["draft", "method", "threshold", "limit"])
def test_without_fixed_shapes_more_settings_decide(name: str) -> None:
    (sentence,) = differences(keys(exact=False), keys(exact=False, **{name: OTHERS[name]}))
    assert sentence.startswith(f"{name} was ")
    assert differences(keys(exact=False), keys()) == ["exact was False and is True"]


def test_without_fixed_shapes_the_content_of_the_draft_decides() -> None:
    other = fingerprint(Job(**BASE, exact=False), MODELS | {"draft": "sha256:3"}, "cpu")
    assert differences(keys(exact=False), other) == ["draft (content) was 'sha256:2' and is 'sha256:3'"]


def test_every_difference_is_a_sentence() -> None:
    now = fingerprint(Job(**BASE, max_new_tokens=128, dtype="bfloat16"), MODELS | {"target": "sha256:3"}, "cuda")
    assert differences(keys(), now) == [
        "device was 'cpu' and is 'cuda'",
        "dtype was 'float32' and is 'bfloat16'",
        "max_new_tokens was 256 and is 128",
        "target (content) was 'sha256:1' and is 'sha256:3'",
    ]


def test_a_missing_setting_has_its_default() -> None:
    """So that older outputs can resume after a new setting is added."""
    older = {key: value for key, value in keys().items() if key in ("target", "target (content)")}
    assert differences(older, keys()) == []
    assert differences(keys(), older) == []
    assert differences(older, keys(top_k=3)) == ["top_k was 0 and is 3"]
    assert differences(keys(dtype="bfloat16"), older) == ["dtype was 'bfloat16' and is 'float32'"]
    assert differences({}, keys())[-1] == "target was None and is 't'"


def test_an_older_output_has_keys_that_may_change_now_and_no_device() -> None:
    older = keys(device=None) | {
        "draft": "gone", "draft_revision": None, "target_revision": "main", "method": "auto", "threshold": None,
        "limit": 5, "draft (content)": "0" * 16,
    }  # fmt: skip
    assert differences(older, keys(device="cuda")) == []


def test_commits_are_compared_with_those_of_older_versions() -> None:
    older = keys() | {"target (content)": "1" * 40}
    now = fingerprint(Job(**BASE), {"target": "2" * 40}, "cpu")
    assert differences(older, now) == [f"target (content) was '{'1' * 40}' and is '{'2' * 40}'"]


def test_an_unknown_setting_counts_if_it_is_on() -> None:
    assert differences(keys() | {"beam": None, "steer": False, "words": []}, keys()) == []
    assert differences(keys() | {"beams": 4}, keys()) == ["beams was 4 and is None"]


def test_a_job_of_another_kind_is_another_job() -> None:
    label = fingerprint(LabelJob(**BASE, labels=["a", "b"]), MODELS, "cpu")
    assert differences(label, keys()) == ["labels was ['a', 'b'] and is []"]
    assert differences(keys(), label) == ["labels was [] and is ['a', 'b']"]


def test_no_secret_is_in_a_fingerprint_or_next_to_an_output() -> None:
    secret = Job(**BASE | {
        "target": "s3://key:SEC/RET@bucket/t", "draft": "https://host/d?X-Amz-Signature=SECRET",
        "storage_options": {"secret": "SECRET"}, "exact": False,
    })  # fmt: skip
    assert "SECRET" not in str(fingerprint(secret, MODELS))
    assert "RET" not in str(secret.published())
    assert fingerprint(secret, MODELS)["target"] == "s3://bucket/t"


def test_permission_to_run_code_is_not_written_next_to_an_output() -> None:
    """Else an audit of the output would run the code."""
    assert not {"trust_remote_code", "allow_pickle"} & set(Job(**BASE, trust_remote_code=True).published())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e-39), ("temperature", 1e-7), ("temperature", 1e7), ("temperature", float("inf")),
        ("temperature", float("nan")), ("top_p", 0), ("top_p", float("nan")), ("top_k", 2**63), ("top_k", -1),
        ("repetition_penalty", 1e-40), ("repetition_penalty", float("inf")), ("max_new_tokens", 2**31),
        ("memory_gib", float("inf")), ("max_error_share", 1.5), ("max_error_share", -0.1), ("attempts", 0),
        ("wait", "perhaps"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(JobError, match=f"^{name}: ") as error:
        load_job(Job, None, BASE | {name: value})
    assert len(str(error.value)) < 120


def test_the_job_and_the_engine_have_the_same_limits() -> None:
    job = Job(**BASE, temperature=1e-6, top_p=1e-50, top_k=2**31 - 1, repetition_penalty=1e6)
    request.Sampling(job.temperature, job.top_k, job.top_p, 0, job.repetition_penalty)
