"""Measurements are kept for later processes, and nothing that is wrong with their file stops a job."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from exspec.actors.engine import EngineConfig
from exspec.actors.engine.shape.costs import Costs
from exspec.actors.engine.shape.kept import Kept
from exspec.actors.engine.shape.plan import Models
from tests import tiny

REQUESTS = tiny.requests(tiny.prompts(4), 10)


def of(**changes: Any) -> Kept:
    about: dict[str, Any] = {"models": {"target": "a"}, "dtype": "float32", "machine": {"device": "x"}, "threads": 2}
    return Kept.of(**about | changes)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXSPEC_CACHE", str(tmp_path))


def test_what_is_kept_is_found_again_for_the_same_machine_and_models_only() -> None:
    assert of().seconds("form") == {}
    assert of().shape() is None
    of().keep_seconds("form", {"verify": 0.5})
    of().keep_seconds("form", {"propose": 0.25})
    of().keep_shape(EngineConfig(batch_size=16))
    assert of().seconds("form") == {"verify": 0.5, "propose": 0.25}
    assert of().seconds("another") == {}
    shape = of().shape()
    assert shape is not None
    assert shape["batch_size"] == 16
    others: list[dict[str, Any]] = [
        {"threads": 1}, {"dtype": "bfloat16"}, {"machine": {"device": "y"}}, {"models": {"target": "b"}}
    ]  # fmt: skip
    for change in others:
        assert of(**change).seconds("form") == {}
        assert of(**change).shape() is None


@pytest.mark.parametrize("text", ["", "{", '{"seconds": {}, "shape": {"a setting of a later version": 1}}'])
def test_a_file_that_cannot_be_used_counts_as_none(text: str) -> None:
    kept = of()
    kept.path.parent.mkdir(parents=True)
    kept.path.write_text(text)
    assert kept.seconds("form") == {}
    assert kept.shape() is None
    kept.keep_seconds("form", {"verify": 0.5})
    assert of().seconds("form") == {"verify": 0.5}


def test_a_folder_that_cannot_be_written_costs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EXSPEC_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        of().keep_seconds("form", {"verify": 0.5})
    assert "measurements are not kept for later jobs: " in caplog.text


def test_forwards_that_an_earlier_process_has_timed_are_not_run_again() -> None:
    models, config = Models(tiny.model(), tiny.model(seed=1)), tiny.config()

    def cost(kept: Kept) -> Costs:
        costs = Costs(models, REQUESTS, 40, config, kept)
        costs.round(config, 30)
        costs.prefill(config, 20)
        return costs

    first, second = cost(of()), cost(of())
    assert first.engines
    assert not second.engines
    assert second.known == first.known == json.loads(of().path.read_text())["seconds"][first.form]
