"""A setting is declared once, in the engine, and is then in job files, options, the bench and the pages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError, create_model

from exspec.actors.engine import EngineConfig
from exspec.actors.engine.config import DRAFTING, SETTINGS
from exspec.actors.engine.settings import Setting, setting, settings_of
from exspec.jobs.benchmarks import bench
from exspec.jobs.benchmarks.settings import SHAPE, BenchSettings
from exspec.jobs.options import _flag, _option
from exspec.pipeline.job.settings import Job, _engines
from tests.jobs import docs
from tests.jobs.calls import succeed

COMMANDS: Any = docs.commands()


def flags(command: str) -> set[str]:
    return {p.name for p in COMMANDS[command].params}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_engine_is_in_every_place(name: str) -> None:
    known = SETTINGS[name]
    assert Job.model_fields[name].description == known.help
    assert {name} <= flags("run") & flags("label") & flags("tune")
    assert f"\n- `--{name.replace('_', '-')}`" in (docs.FOLDER / docs.SETTINGS).read_text(encoding="utf-8")
    assert (name in flags("bench")) == (name not in ("method", "capacity"))


@dataclass(frozen=True)
class Extended(EngineConfig):
    """The config of an engine with three more settings."""

    beams: int | None = setting(None, "Beams of a row.", "any", ge=2)
    order: Literal["first", "last"] = setting("first", "Which comes first.")
    share: float = setting(0.5, "Share of the beams.", measured=True, gt=0, lt=1)


def test_a_new_setting_takes_one_field() -> None:
    known = settings_of(Extended)
    assert set(known) == {*SETTINGS, "beams", "order", "share"}
    made = create_model("Made", **{name: _engines(known[name]) for name in ("beams", "order", "share")})  # type: ignore[call-overload]
    assert made().model_dump() == {"beams": None, "order": "first", "share": "auto"}
    assert made(beams=3, order="last").beams == 3
    for wrong in ({"beams": 1}, {"order": "middle"}):
        with pytest.raises(ValidationError):
            made(**wrong)
    assert made.model_fields["beams"].json_schema_extra == {"group": "Decoding", "later": "any"}
    for name in ("beams", "order", "share"):
        for annotation in (_option(name, made.model_fields[name]), _flag(known[name])):
            (option,) = annotation.__metadata__
            assert option.help.startswith(known[name].help)


@pytest.mark.parametrize(
    ("known", "value", "message"),
    [
        (Setting("k", int, 1, "", "any", False, False, {"ge": 1}), 0, "k: expected a positive number, not 0"),
        (Setting("k", int, 2, "", "any", False, False, {"ge": 2}), 1, "k: expected a number from 2, not 1"),
        (
            Setting("p", float, 0.5, "", "any", False, False, {"gt": 0, "lt": 1}),
            1.0,
            "p: expected a number above 0 and",
        ),
        (SETTINGS["method"], "magic", "method: expected one of plain, eqspec, exspec, not 'magic'"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(known: Setting, value: Any, message: str) -> None:
    known.check(known.default)
    with pytest.raises(ValueError, match=f"^{message}"):
        known.check(value)


def test_a_drafters_own_settings_are_declared_in_its_folder() -> None:
    assert DRAFTING == ("exit_depth", "check_depth", "exit_tokens", "draft_window", "draft_chosen")
    folder = Path(__file__).parents[2] / "actors" / "engine"
    for name in DRAFTING:
        declaration = f"    {name}: int | None = setting("
        files = [path.name for path in folder.rglob("*.py") if declaration in path.read_text()]
        assert files == ["window_settings.py" if name.startswith("draft_") else "early_exit_settings.py"]


def test_the_bench_takes_the_engines_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[BenchSettings] = []
    monkeypatch.setattr(bench, "run", lambda settings, _: given.append(settings))
    usual = {name: getattr(EngineConfig(), name) for name in SHAPE}
    for line, changed in (
        ("", {}),
        ("--batch-size 4 --no-exact", {"batch_size": 4, "exact": False}),
        ("--draft a --draft b --target t --draft-length both", {"draft_length": "both"}),
    ):
        succeed("bench", *line.split())
        assert given[-1].shape == usual | changed
    assert given[-1].draft == ("a", "b")
