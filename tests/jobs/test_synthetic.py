"""`exspec synthetic`: the acceptance rate can be set, tokens equal plain decoding's, and it needs few packages."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from exspec.actors.engine import Engine
from exspec.actors.engine.graphs import Recordings
from exspec.jobs import cli
from exspec.jobs.benchmarks import stages as measured
from exspec.jobs.benchmarks import synthetic
from exspec.jobs.benchmarks.independence import RowIndependence
from exspec.jobs.benchmarks.settings import SyntheticSettings
from exspec.jobs.benchmarks.shapes import SHAPES
from exspec.jobs.benchmarks.stages import STAGES, Measurement, differences
from exspec.jobs.benchmarks.synthetic import Message, measure, work
from tests.jobs.stages import failing


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="no shape 'GPT-9'; expected TARGET:DRAFT of Qwen/Qwen3-8B"):
        SyntheticSettings("GPT-9:tiny")


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen/Qwen3-8B", 8.19), ("Qwen/Qwen3-0.6B", 0.596), ("Vicuna-7B", 6.74), ("GLM-4-9B", 9.4)]
)
def test_shapes_are_those_of_the_models_they_are_named_after(name: str, billions: float) -> None:
    """Parameters, counted without allocating any."""
    settings = dict(SHAPES[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


def test_engine_and_benchmark_need_torch_and_transformers_alone() -> None:
    """A machine with a GPU may have little else: what is imported here must do without the rest."""
    others = [
        "ray",
        "typer",
        "pydantic",
        "rich",
        "pyarrow",
        "fsspec",
        "s3fs",
        "jinja2",
        "matplotlib",
        "tenacity",
        "llguidance",
        "jsonschema",
        "psutil",
    ]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({others})); from exspec.jobs.benchmarks import bench, synthetic"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


TINY = SyntheticSettings(
    "tiny:tiny", device="cpu", seconds=300, shapes=((2, 2), (4, 2)), batch_sizes="2", draft_tokens="2,1", limit=4,
    acceptances="0.6", rivals=("generate",), rival_batch_sizes=(2,), prefills=((4, 32), (1, 64)), kernels=("eager",),
    prompt_tokens=24, max_new_tokens=20,
)  # fmt: skip


def stages(settings: SyntheticSettings, *names: str) -> dict[str, dict[str, Any]]:
    """The report of these stages, run in this process. Each of them must end without an error."""
    found: dict[str, dict[str, Any]] = {}

    def take(message: Message) -> None:
        stage = found.setdefault(message.stage, {"results": []})
        stage["results"] += [message.result] if message.result else []
        stage.update(message.ending)
        assert not stage.get("error"), stage["error"]

    work(settings, names, time.monotonic() + settings.seconds, take)
    assert set(found) == {"setup", *names}
    return found


def test_acceptance_is_what_was_asked_for_and_every_token_is_plain() -> None:
    measurement = Measurement(replace(TINY, limit=8, max_new_tokens=40))
    config = measurement.config(4, 5)
    expected = measurement.decode(Engine(measurement.target, None, config.plain())).tokens
    engine, drafter = measurement.replaying(config)
    for acceptance in (0.3, 0.9):
        drafter.replay(expected, acceptance)
        outcome = measurement.decode(engine, order=1)
        assert outcome.tokens == expected
        drafted, accepted = outcome.sequences.drafted_by_position, outcome.sequences.accepted_by_position
        assert accepted[0] / drafted[0] == pytest.approx(acceptance, abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.rare)])
def test_every_stage_of_a_measurement_gives_its_figures(dtype: str) -> None:
    rivals = ("generate", "continuous batching") if dtype == "float32" else TINY.rivals
    found = stages(replace(TINY, dtype=dtype, rivals=rivals), *STAGES)
    (setup,) = found["setup"]["results"]
    assert {"hardware", "bandwidth_gb_per_s", "attention", "not_in_place", "kernels", "not_compiled"} == set(setup)
    for name in STAGES:
        assert not found[name]["cut_short"]
        assert found[name]["seconds"] <= found[name]["budget_seconds"]

    compared = found["independence"]["results"]
    shapes = {(c["rows"], c["columns"], c["attention"]) for c in compared}
    assert shapes >= {(2, 3, "gathered"), (4, 3, "gathered"), (2, 3, setup["attention"])}
    for comparison in compared:
        changed = comparison["changed"]
        assert set(changed) == {"again", "recorded", "permuted", "reversed", "others_changed", "others_dead",
                                "later_tokens_changed", "column"}  # fmt: skip
        for name in ("again", "recorded", "permuted", "reversed", "others_changed", "others_dead"):
            assert (name, changed[name]["equal"]) == (name, comparison["rows"])
        assert comparison["equal"] or comparison["attention"] == "gathered"

    (profiled,) = found["profile"]["results"]
    assert list(profiled["phases"]) == ["draft", "verify", "commit"]
    for phase in profiled["phases"].values():
        assert set(phase) == {"ms", "kernels", "kernels_ms", "launches", "top"}
        assert 0 < len(phase["top"]) <= 15
    assert profiled["phases"]["verify"]["kernels"] > 10

    runs = found["exact"]["results"]
    assert {(r["rows"], r["sampled"], r["right"]) for r in runs} == set(product((2, 4), (False, True), (0, 0.6, 1)))
    for run in runs:
        assert run["exact"] == 1.0, run
        assert run["acceptance_rate"] == (run["right"] if run["right"] in (0, 1) else pytest.approx(0.5, abs=0.4))

    timed = found["speed"]["results"]
    assert {(t["rows"], t["draft_tokens"]) for t in timed if t.get("method") == "exspec"} == {(2, 1), (2, 2)}
    assert all(t["exact"] == 1.0 and t["ratio_to_plain"] > 0 for t in timed if t.get("method") == "exspec")
    methods = {"plain", "plain in this shape", "exspec", "prefill", *rivals}
    assert {t["method"] for t in timed if "method" in t} == methods
    (costs,) = [t for t in timed if "phases_of" in t]
    assert costs["phases_of"] == 2
    assert set(costs["phases"]) == {"plain", "verify", "draft", "prefill"}
    assert all(phase["ms"] > 0 and phase["floor_ms"] > 0 for phase in costs["phases"].values())
    assert all(t["tokens_per_second"] for t in timed if t.get("method") in ("plain", "prefill", "generate"))


def test_a_clock_that_runs_out_cuts_a_stage_short_and_an_error_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"before": 1}
        raise RuntimeError("misaligned address")

    monkeypatch.setitem(synthetic.STAGES, "profile", (broken, 1.0))
    messages: list[Message] = []
    work(replace(TINY, dtype="float32"), ["exact", "profile", "speed"], time.monotonic(), messages.append)
    ends = {m.stage: m.ending for m in messages if m.ending}
    assert ends["exact"]["cut_short"]
    assert ends["profile"]["error"].startswith("RuntimeError: misaligned address (")
    assert "speed" not in ends
    assert [m.result for m in messages if m.stage == "profile" and m.result] == [{"before": 1}]


def test_a_row_that_depends_on_its_place_or_its_neighbours_is_found() -> None:
    measurement = Measurement(replace(TINY, dtype="float32"))
    (config,) = measurement.resolved(4, 2)
    compared = RowIndependence(measurement.target, config)
    forward = compared.forward
    compared.forward = lambda rows: forward(rows) + torch.arange(len(rows.slots))[:, None, None] * 1e-3
    changed = compared.compare()["changed"]
    assert changed["again"]["equal"] == 4
    assert changed["reversed"]["equal"] == 0
    assert changed["reversed"]["first_row"] == 0
    compared.forward = lambda rows: forward(rows) + rows.slots.sum() * 1e-3
    changed = compared.compare()["changed"]
    assert changed["permuted"]["equal"] == 4
    assert changed["others_changed"]["equal"] == changed["others_dead"]["equal"] == 0
    assert not compared.compare()["equal"]


def test_the_first_token_that_differs_is_named() -> None:
    expected = [[5, 6], [5, 6, 7], [4]]
    assert differences(expected, expected) == {"exact": 1.0, "first_difference": None}
    found = differences(expected, [[5, 6], [5, 9, 7], [4]])
    assert found == {"exact": 0.6667, "first_difference": {"prompt": 1, "position": 1, "expected": 6, "found": 9}}
    found = differences(expected, [[5, 6], [5, 6, 7], []])
    assert found["first_difference"] == {"prompt": 2, "position": 0, "expected": 4, "found": None}


def test_warming_records_every_shape_that_rounds_can_have() -> None:
    """A shape that is recorded inside the clock would be measured with its recording."""

    class Counted(Recordings):
        def __init__(self) -> None:
            super().__init__(self.record)
            self.made = 0

        def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
            self.made += 1
            return run

    measurement = Measurement(replace(TINY, dtype="float32", max_new_tokens=11))
    for sampled in (False, True):
        recorder = Counted()
        config = measurement.config(2, 4)
        engine = Engine(measurement.target, measurement.draft, config, recorder=recorder)
        measurement.warm(engine, sampled)
        before = recorder.made
        measurement.decode(engine, sampled=sampled)
        assert recorder.made == before > 4


@pytest.mark.slow
def test_a_stage_that_crashes_hangs_or_fails_leaves_the_next_ones_alone(tmp_path: Path) -> None:
    report = measure(replace(TINY, seconds=300), tmp_path / "made" / "out.json", failing)
    assert json.loads((tmp_path / "made" / "out.json").read_text()) == json.loads(json.dumps(report))
    found = report["stages"]
    assert [len(p["names"]) for p in found["setup"]["results"]] == [4, 3, 2, 1]
    assert [found[name]["results"] for name in STAGES] == [[{"result": name}] for name in STAGES]
    assert found["independence"]["error"] == "its process ended with exit code 7"
    assert found["profile"]["error"].startswith("it hung, and was ended")
    assert found["exact"]["error"] == "RuntimeError: no"
    assert found["speed"]["error"] is None


@pytest.mark.slow
def test_the_command_gives_a_report_of_all_stages_whatever_time_there_is(tmp_path: Path) -> None:
    options = ["tiny:tiny", str(tmp_path / "out.json"), "--device", "cpu", "--dtype", "float32", "--seconds", "40"]
    done = subprocess.run(
        [sys.executable, "-m", "exspec.jobs.benchmarks.synthetic", *options], check=True, capture_output=True, text=True
    )
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report["stages"]) == {"setup", *STAGES}
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {name: stage for line in printed for name, stage in line.items()} == report["stages"]
    assert all({"seconds", "error"} & set(stage) for stage in report["stages"].values())


def test_an_error_of_the_setup_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no memory for the weights")

    monkeypatch.setattr(measured, "build", broken)
    messages: list[Message] = []
    work(TINY, list(STAGES), time.monotonic(), messages.append)
    assert [m.stage for m in messages] == ["setup", "setup"]
    assert messages[-1].ending["error"].startswith("RuntimeError: no memory for the weights (")


WORDS = ["tiny:tiny", "out.json", "--device", "cpu", "--seconds", "7", "--batch-sizes", "2,1", "--draft-tokens", "3",
         "--acceptances", "0.5", "--limit", "9", "--max-new-tokens", "8", "--dtype", "float32"]  # fmt: skip


def test_both_programs_take_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(synthetic, "measure", lambda *given: calls.append(given))
    for words in (WORDS, WORDS[:2]):
        synthetic.main(words)
        assert CliRunner().invoke(cli.app, ["synthetic", *words], catch_exceptions=False).exit_code == 0
    given = SyntheticSettings("tiny:tiny", "cpu", 7.0, "2,1", "3", "0.5", 9, 8, "float32")
    assert calls[0] == calls[1] == (given, Path("out.json"))
    assert calls[2] == calls[3] == (SyntheticSettings("tiny:tiny"), Path("out.json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "nonsense"], "--device: expected cpu, cuda or cuda:N, not 'nonsense'"),
        (["--draft-tokens", "5,x"], "--draft-tokens: expected numbers with commas between them, not '5,x'"),
        (["--seconds", "0"], "seconds: expected a positive number, not 0.0"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(words: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        synthetic.main(["tiny:tiny", "out.json", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
