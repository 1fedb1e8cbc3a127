"""The shape of a resumed job: what may change, and what stays as in the first run."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from exspec.actors.engine import EngineConfig
from exspec.actors.engine.shape.kept import Kept
from exspec.pipeline.job.fingerprint import differences, fingerprint, may_change
from exspec.pipeline.job.kinds import SETTINGS
from exspec.pipeline.job.settings import Job
from exspec.pipeline.shape import Shape, recalled, shape_of, stored_shape
from tests import tiny

BASE: dict[str, Any] = {"target": "t", "input": "in", "output": "out"}
# For each engine setting of a job: its value in the first run, and in the next.
CHANGES: dict[str, tuple[Any, Any]] = {
    "method": ("exspec", "plain"), "drafter": ("suffix", "early_exit"), "threshold": (0.5, 0.9),
    "draft_length": ("fixed", "both"), "exit_depth": (1, 2), "check_depth": (2, 3), "exit_tokens": (1, 3),
    "batch_size": (4, 8), "window": (16, 32), "draft_tokens": (3, 4), "draft_from": (0, 64), "bucket": (32, 64),
    "capacity": (64, 96), "exact": (True, False), "draft_window": (40, 50), "draft_chosen": (40, 50),
}  # fmt: skip


def shape(job: Job, stored: dict[str, Any] | None = None) -> EngineConfig:
    return shape_of(job, [tiny.model(num_hidden_layers=6).config], 10, stored).config


def begun(**settings: Any) -> dict[str, Any]:
    return stored_shape(shape(Job(**BASE | settings)))


def test_every_engine_setting_of_a_job_is_covered() -> None:
    assert set(CHANGES) == {field.name for field in fields(EngineConfig)} & set(SETTINGS)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_used_or_refused(name: str) -> None:
    before, now = CHANGES[name]
    early = name in ("exit_depth", "check_depth", "exit_tokens")
    usual: dict[str, Any] = {"drafter": "early_exit" if early else "suffix"}
    if name in ("draft_window", "draft_chosen"):
        usual = {"drafter": "sparse", "draft_window": 33}
    one = Job(**BASE | usual | {name: before})
    other = Job(**BASE | usual | ({"drafter": "auto"} if name == "method" else {}) | {name: now})
    changes = differences(fingerprint(one, {}), fingerprint(other, {}))
    if not may_change(name, exact=True):
        assert changes == [f"{name} was {before!r} and is {now!r}"]
        return
    assert changes == []
    resumed = shape(other, stored_shape(shape(one)))
    assert getattr(resumed, name) == now
    assert resumed.width == shape(one).width, "the shape that decides tokens"


def test_other_settings_stay_as_in_the_first_run() -> None:
    stored = begun(drafter="suffix", threshold=0.5, batch_size=4, window=16, draft_tokens=3, bucket=32, capacity=64)
    resumed = shape(Job(**BASE), stored)
    assert stored_shape(resumed) == stored
    assert shape(Job(**BASE, threshold=0.9), stored) == shape(Job(**BASE, threshold=0.9, drafter="suffix"), stored)


def small(models: list[Any], **settings: Any) -> Shape:
    return shape_of(Job(**BASE | settings), models, 10, None)


def test_a_small_job_takes_what_an_earlier_calibration_chose(tmp_path: Path) -> None:
    kept, models = Kept({}, tmp_path), [tiny.model().config]
    assert recalled(small(models), kept, models) == small(models)
    chosen = EngineConfig(drafter="suffix", batch_size=4, draft_tokens=2, kernels="compiled_packed", prefill_rows=16)
    kept.keep_shape(chosen)
    found = recalled(small(models), kept, models).config
    assert found == replace(small(models).config, **asdict(replace(chosen, kernels="packed")) | {"capacity": 96})
    for settings in ({"batch_size": 4}, {"method": "plain"}, {"drafter": "none"}):
        assert recalled(small(models, **settings), kept, models) == small(models, **settings)
    kept.keep_shape(replace(chosen, drafter="model"))
    assert recalled(small(models), kept, models) == small(models), "the job has no draft"


def test_what_depends_on_the_machine_is_not_stored() -> None:
    assert not {"pages", "attention", "draft_length"} & set(begun())
