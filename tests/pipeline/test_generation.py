"""A model's generation config: used with --model-sampling, and otherwise named in a note."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from exspec.pipeline.errors import JobError
from exspec.pipeline.job.fingerprint import differences, fingerprint
from exspec.pipeline.job.generation import OwnSettings, note, own_settings, with_own
from exspec.pipeline.job.settings import Job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests import tiny
from tests.jobs import calls
from tests.pipeline import jobs

NOTE = "note: exspec ignores the model's generation config: bad_words_ids [[7], [8], [9], [11]], min_new_tokens 1"
ASKS = {"repetition_penalty": 1.4, "suppress_tokens": [7, 8, 9, 11], "min_new_tokens": 1}
BASE: dict[str, Any] = {"target": "t", "draft": "d", "input": "in", "output": "out"}


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> jobs.Pair:
    """A pair whose target ships settings that change greedy tokens."""
    pair = jobs.save_pair(tmp_path_factory.mktemp("asking"))
    write(pair, **ASKS)
    return pair


def write(pair: jobs.Pair, **settings: Any) -> None:
    GenerationConfig(eos_token_id=list(tiny.ENDS), pad_token_id=0, **settings).save_pretrained(pair[0])


def completions(job: Job) -> list[str]:
    assert execute(prepare(job)) == 0
    rows = jobs.read_output(Path(job.output))
    return [rows[str(n)]["completion"] for n in range(30)]


def test_with_the_models_own_settings_a_job_gives_what_its_generate_gives(
    asking: jobs.Pair, source: Path, tmp_path: Path, capsys: Any
) -> None:
    own = completions(jobs.job(asking, source, tmp_path / "own", limit=30, model_sampling=True))
    assert own == [jobs.generated(asking[0], n) for n in range(30)]
    assert "generation config" not in capsys.readouterr().out
    plain = completions(jobs.job(asking, source, tmp_path / "plain", limit=30))
    assert plain != own, "the settings change something"
    assert f"{NOTE}, repetition_penalty 1.4; --model-sampling uses it" in capsys.readouterr().out
    with pytest.raises(JobError, match=r"with other settings: bad_words_ids was .*repetition_penalty was 1"):
        prepare(jobs.job(asking, source, tmp_path / "plain", limit=30, model_sampling=True))
    assert prepare(jobs.job(asking, source, tmp_path / "own", limit=30, model_sampling=True)).job.bad_words_ids
    stored = json.loads((tmp_path / "own" / "_job.json").read_text())
    assert stored["fingerprint"]["repetition_penalty"] == 1.4, "what was resolved is stored"


def test_an_audit_of_a_job_without_them_compares_without_them(asking: jobs.Pair, source: Path, tmp_path: Path) -> None:
    assert execute(prepare(jobs.job(asking, source, tmp_path / "out", limit=20))) == 0
    calls.succeed("audit", tmp_path / "out", "--share", "1")
    comparisons = json.loads((tmp_path / "out" / "_audit.json").read_text())["comparisons"]
    assert [(c["rows"], c["equal"]) for c in comparisons] == [(20, 20), (20, 20)]


def test_plan_says_in_one_line_what_is_not_used(asking: jobs.Pair, source: Path, tmp_path: Path) -> None:
    plan = ("plan", "--input", source, "--output", tmp_path / "out", "--target", asking[0])
    assert f"{NOTE}, repetition_penalty 1.4; --model" in calls.succeed(*plan)
    assert f"{NOTE}; --model-sampling uses it" in calls.succeed(*plan, "--repetition-penalty", "1")
    assert "generation config" not in calls.succeed(*plan, "--model-sampling")


def test_the_fingerprint_has_the_resolved_settings() -> None:
    own = own_settings(GenerationConfig(repetition_penalty=1.1, do_sample=True, temperature=0.6))
    resolved = with_own(Job(**BASE, model_sampling=True), own)
    plain, models = fingerprint(Job(**BASE), {}), dict[str, str]()
    assert len(differences(plain, fingerprint(resolved, models))) == 3
    same = Job(**BASE, repetition_penalty=1.1, temperature=0.6, top_k=50)
    assert differences(fingerprint(same, models), fingerprint(resolved, models)) == []


def test_the_jobs_own_settings_go_before_the_models() -> None:
    own = own_settings(GenerationConfig(repetition_penalty=1.1, do_sample=True, temperature=0.6, top_p=0.9))
    job = with_own(Job(**BASE, model_sampling=True, temperature=0.0, top_p=0.5), own)
    assert (job.temperature, job.top_p, job.top_k, job.repetition_penalty) == (0.0, 0.5, 50, 1.1)
    assert with_own(Job(**BASE), own) == Job(**BASE), "asked for nothing"


def test_a_config_that_does_not_sample_is_greedy_whatever_else_it_says() -> None:
    config = GenerationConfig(do_sample=False, temperature=0.6, top_k=3, repetition_penalty=1.05)
    assert own_settings(config) == OwnSettings({"repetition_penalty": 1.05}, {})
    assert own_settings(GenerationConfig()) == OwnSettings({}, {})


def test_forbidden_words_are_those_of_transformers() -> None:
    config = GenerationConfig(bad_words_ids=[[3, 4], [5], [9]], suppress_tokens=[9, 6], eos_token_id=[5, 6])
    assert own_settings(config).settings == {"bad_words_ids": [[3, 4], [9], [6]]}, "an end token alone is no bad word"


def test_keys_that_the_engine_does_not_support_are_named() -> None:
    own = own_settings(GenerationConfig(begin_suppress_tokens=[220], num_beams=4, repetition_penalty=1.2))
    keys = "begin_suppress_tokens [220], num_beams 4"
    unknown = f"exspec does not support these keys of the model's generation config: {keys}"
    ignored = "exspec ignores the model's generation config: repetition_penalty 1.2; --model-sampling uses it"
    assert note(Job(**BASE), own) == f"{ignored}; {unknown}"
    assert note(with_own(Job(**BASE, model_sampling=True), own), own) == unknown
    assert own_settings(GenerationConfig(typical_p=0.5)).unknown == {}, "only sampling takes it"
    assert own_settings(GenerationConfig(typical_p=0.5, do_sample=True)).unknown == {"typical_p": 0.5}


def test_a_label_job_leaves_the_limits_out() -> None:
    own = own_settings(GenerationConfig(min_new_tokens=3, suppress_tokens=[1], repetition_penalty=1.2)).without_limits()
    assert own == OwnSettings({"repetition_penalty": 1.2}, {"min_new_tokens": 3, "bad_words_ids": [[1]]})


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        ({"repetition_penalty": 0.0}, r"generation config of .*target: repetition_penalty: .* 0.000001, not 0.0"),
        ({"min_new_tokens": 300}, r"generation config of .*: min_new_tokens is 300, above max_new_tokens \(256\)"),
        ({"suppress_tokens": [99]}, r"bad_words_ids: token 99 is not in the target's vocabulary of 61"),
        ({"suppress_tokens": [-1]}, r"generation config of .*: bad_words_ids.0.0: .*, not -1"),
    ],
)
def test_what_a_job_cannot_have_is_refused_by_its_key(
    pair: jobs.Pair, source: Path, tmp_path: Path, asks: dict[str, Any], message: str
) -> None:
    own = tmp_path / "target"
    shutil.copytree(pair[0], own)
    write((str(own), ""), **asks)
    with pytest.raises(JobError, match=message):
        prepare(jobs.job((str(own), pair[1]), source, tmp_path / "out", model_sampling=True))
    assert prepare(jobs.job((str(own), pair[1]), source, tmp_path / "out")).note, "only a note"
