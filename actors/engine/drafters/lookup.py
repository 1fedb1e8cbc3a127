"""From a config or a model to its drafter."""

from pkgutil import resolve_name
from typing import Any, cast

from transformers import PretrainedConfig

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.drafter import Drafter
from exspec.actors.engine.drafters.head import HeadDrafter
from exspec.actors.engine.drafters.registry import DRAFTERS, NONE, check_name
from exspec.actors.engine.learners.learner import Learner


def drafter_class(name: str) -> type[Drafter]:
    """The drafter with this name. Raises ValueError for a drafter that is not registered."""
    check_name(name)
    return cast(type[Drafter], resolve_name(DRAFTERS[name]))


def learner_class(name: str) -> type[Learner] | None:
    """What trains the drafter with this name; None if it cannot be trained."""
    place = drafter_class(name).learner
    return None if place is None else cast(type[Learner], resolve_name(place))


def kind(config: EngineConfig) -> type[Drafter]:
    """The drafter of a config; NoDraft for plain decoding."""
    return drafter_class(config.drafter if config.drafts else NONE)


def label(config: EngineConfig) -> str:
    """The name of a config's drafter, with its settings."""
    return kind(config).label(config) if config.drafts else NONE


def available(target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> list[str]:
    """The names of the drafters that can draft for a target with this draft, in the order of the registry."""
    names = [name for name in DRAFTERS if name != NONE]
    return [name for name in names if drafter_class(name).refusal(target, draft, config) is None]


def head_of(config: dict[str, Any]) -> type[HeadDrafter] | None:
    """The drafter of the head that a config.json describes; None if it describes a model."""
    drafter = next((cls for cls in map(drafter_class, DRAFTERS) if cls.reads(config)), None)
    return cast(type[HeadDrafter] | None, drafter)
