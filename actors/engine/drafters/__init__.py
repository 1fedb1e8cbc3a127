"""The drafters, which propose the tokens that the target verifies: a file and a line in the registry each."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from exspec.actors.engine.config import EngineConfig
    from exspec.actors.engine.drafters.drafter import Drafter
    from exspec.actors.engine.drafters.head import HeadDrafter

DRAFTERS = {  # by name; by default the first that is available drafts
    "none": "exspec.actors.engine.drafters.none:NoDraft",
    "model": "exspec.actors.engine.drafters.model:DraftModel",
    "eagle3": "exspec.actors.engine.drafters.eagle3:Eagle3",
    "clover": "exspec.actors.engine.drafters.clover:Clover",
    "suffix": "exspec.actors.engine.drafters.suffix:Suffix",
    "early_exit": "exspec.actors.engine.drafters.early_exit:EarlyExit",
}
NONE = "none"


def check_name(name: str) -> None:
    """Raises ValueError for a drafter that is not registered."""
    if name not in DRAFTERS:
        raise ValueError(f"drafter: expected one of {', '.join(DRAFTERS)}, not {name!r}")


def drafter_class(name: str) -> "type[Drafter]":
    """The drafter of a name. Raises ValueError for one that is not registered."""
    check_name(name)
    return cast("type[Drafter]", resolve_name(DRAFTERS[name]))


def kind(config: "EngineConfig") -> "type[Drafter]":
    """The drafter of a config: plain decoding has none."""
    return drafter_class(config.drafter if config.drafts else NONE)


def label(config: "EngineConfig") -> str:
    """The name of a config's drafter, with its settings."""
    return kind(config).label(config) if config.drafts else NONE


def available(target: "PretrainedConfig", draft: "PretrainedConfig | None", config: "EngineConfig") -> list[str]:
    """The drafters that can draft for a target with this draft, in the order of the registry."""
    names = [name for name in DRAFTERS if name != NONE]
    return [name for name in names if drafter_class(name).refusal(target, draft, config) is None]


def head_of(config: "dict[str, Any]") -> "type[HeadDrafter] | None":
    """The drafter of the head that a config.json describes; None where it describes a model."""
    drafter = next((cls for cls in map(drafter_class, DRAFTERS) if cls.reads(config)), None)
    return cast("type[HeadDrafter] | None", drafter)
